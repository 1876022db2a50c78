"""Where a run starts from, how far it may go, and when it saves and ends by the clock."""

import re
import shlex
import shutil
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from llm.config.toml import read_toml
from llm.data.batch_plan import BatchPlan
from llm.data.loader import TrainLoader
from llm.trainers.gpt.build_run import make_model
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.faults import Fault
from tests.support.recovery import last_hash, without_times
from tests.support.training import Bench, Run

STEP = "llm.trainers.gpt.loop:Trainer.train_step"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def origin(bench) -> Run:
    options = {"keep_checkpoints": 2, "save_top_k": 1}
    return bench.train_well("origin", max_train_steps=6, checkpointing_steps=3, **options)


@pytest.mark.parametrize(("device", "taken"), [("cuda:1", [1]), ("xpu:1", [1]), ("cpu", [])])
def test_a_rank_selects_its_accelerator_before_the_model_is_built(monkeypatch, device, taken):
    chosen = []
    monkeypatch.setattr("llm.trainers.gpt.build_run.device_of", lambda world: torch.device(device))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(
        "llm.trainers.gpt.build_run.build_model", MagicMock(side_effect=InterruptedError)
    )

    with pytest.raises(InterruptedError):
        make_model(MagicMock(), MagicMock(), MagicMock())
    assert chosen == taken


def saved(checkpoint: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def part(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors.items() if key.startswith(f"strategy/{name}/")}


@pytest.mark.parametrize("how", ["origin", "origin/3", "origin/best", "checkpoints"])
def test_init_from_loads_the_weights_and_nothing_else(bench, origin, how):
    first, last = (origin.folder / "checkpoints" / f"step_0000000{step}" for step in (3, 6))
    source = first if how == "origin/3" else last
    path = first.parent / source.name if how == "checkpoints" else bench.folder / how

    # A rate of zero: what is saved after the first step are the weights it started with.
    run = bench.train_well(
        f"from-{how.replace('/', '-')}", init_from=path, learning_rate=0.0, max_train_steps=1,
        checkpointing_steps=1, weight_decay=0.0,
    )  # fmt: skip

    ours, theirs = saved(run.folder / "checkpoints" / "step_00000001"), saved(source)
    assert part(ours, "model").keys() == part(theirs, "model").keys()
    for name, weights in part(theirs, "model").items():
        np.testing.assert_array_equal(ours[name], weights)
    counts = {v.item() for k, v in part(ours, "optimizer").items() if k.endswith("/step")}
    assert counts == {1.0}
    assert [(record["step"], record["samples"]) for record in run.metrics] == [(1, 4)]
    initial = f"from {bench.folder}/origin/checkpoints/{source.name}"
    assert f"weights: {initial}" in run.output
    assert f"| initial weights | {initial} |" in (run.folder / "README.md").read_text()


def test_init_from_is_ignored_when_the_run_resumes(bench, origin):
    options = {"init_from": origin.folder, "checkpointing_steps": 2, "max_train_steps": 4}
    straight = bench.train_well("branch", **options)
    cut = bench.folder / "branch-cut"
    shutil.copytree(straight.folder, cut)
    shutil.rmtree(cut / "checkpoints" / "step_00000004")

    resumed = bench.train_well("branch-cut", resume_from_checkpoint=True, **options)

    assert "at step 2" in resumed.output
    assert last_hash(resumed) == last_hash(straight)
    assert without_times(resumed) == without_times(straight)


@pytest.mark.parametrize("path", ["nowhere", "origin/7", "origin/oldest", "model"])
def test_init_from_a_place_without_a_checkpoint_is_refused_in_one_sentence(bench, origin, path):
    run = bench.train("wrong", init_from=bench.folder / path, max_train_steps=1)

    assert run.codes == [2]
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert Path(path).name in errors[0] or "step_00000007" in errors[0]
    assert "Traceback" not in run.output
    assert not (bench.folder / "wrong").exists()


@pytest.mark.parametrize("how", ["origin", "origin/3", "origin/best"])
def test_a_run_is_not_written_over_what_it_starts_from(bench, origin, how):
    run = bench.train("origin", init_from=bench.folder / how, overwrite_output_dir=True)

    assert run.codes == [2]
    assert "which this run would replace" in run.output
    assert origin.saved_steps == [3, 6]


def test_a_checkpoint_of_another_run_does_not_permit_overwriting_a_run(bench, origin):
    other = bench.train_well("other", max_train_steps=1)
    before = other.metrics

    run = bench.train(
        "other", resume_from_checkpoint=origin.folder / "checkpoints" / "step_00000003",
        max_train_steps=6,
    )  # fmt: skip

    assert run.codes == [2]
    assert "other holds a run already" in run.output
    assert other.metrics == before


def test_init_from_another_model_is_refused_in_one_sentence(bench, origin, tmp_path):
    other = Bench(tmp_path, n_embd=16)

    run = other.train("other", init_from=origin.folder, max_train_steps=1)

    assert run.codes == [2]
    assert "does not fit this model" in run.output
    assert "Traceback" not in run.output


class CountedSamples:
    """Samples that are all alike, and how many of them were read."""

    block_size = 4
    read_so_far = 0

    def read(self, numbers: np.ndarray) -> np.ndarray:
        self.read_so_far += len(numbers)
        return np.zeros((len(numbers), 5), np.int64)


def test_the_first_batch_after_a_million_steps_is_as_fast_as_after_ten():
    plan = BatchPlan(
        num_windows=1000,
        micro_batch_size=2,
        world_size=1,
        global_batch_size=2,
        total_samples=3_000_000,
    )
    for step in (10, 1_000_000):
        samples = CountedSamples()
        loader = TrainLoader(samples=samples, plan=plan, rank=0, device=torch.device("cpu"))
        with closing(loader.steps(step)) as batches:
            first = next(batches)

        assert first.samples.tolist() == [2 * step, 2 * step + 1]
        assert samples.read_so_far <= 6  # its own, and two steps ahead


WSD = {"lr_scheduler_type": "warmup_stable_decay", "num_warmup_steps": 1, "num_decay_steps": 3}


def cut_after(bench: Bench, name: str, step: int, **options) -> None:
    """A run of 8 steps of which everything after a step is lost."""
    whole = bench.folder / f"eight-{options.get('lr_scheduler_type')}"
    if not whole.exists():
        bench.train_well(whole.name, max_train_steps=8, checkpointing_steps=1, **options)
    shutil.copytree(whole, bench.folder / name)
    for path in (bench.folder / name / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize(
    ("options", "reached"),
    [({"lr_scheduler_type": "constant"}, 8), (WSD, 5)],
    ids=["constant, at its end", "warmup_stable_decay, before the decay"],
)
def test_an_extended_run_ends_as_one_of_that_length_from_the_start(bench, options, reached):
    name = f"longer-{options['lr_scheduler_type']}"
    cut_after(bench, name, reached, **options)
    options = {"max_train_steps": 12, "checkpointing_steps": 4, **options}

    longer = bench.train_well(name, resume_from_checkpoint=True, **options)

    straight = bench.train_well(f"{name}-straight", **options)
    assert f"at step {reached}" in longer.output
    assert last_hash(longer) == last_hash(straight)
    assert longer.losses == straight.losses


@pytest.mark.parametrize(
    ("options", "reached"),
    [({"lr_scheduler_type": "cosine"}, 4), (WSD, 6)],
    ids=["cosine", "warmup_stable_decay, in the decay"],
)
def test_extending_a_run_is_refused_if_it_changes_completed_steps(bench, options, reached):
    name = f"refused-{options['lr_scheduler_type']}"
    cut_after(bench, name, reached, **options)

    run = bench.train(name, resume_from_checkpoint=True, max_train_steps=12, **options)

    assert run.codes == [2]
    assert "max_train_steps was 8 and is 12" in run.output


def test_a_shorter_run_is_refused(bench):
    constant = {"lr_scheduler_type": "constant"}
    cut_after(bench, "shorter", 4, **constant)

    run = bench.train("shorter", resume_from_checkpoint=True, max_train_steps=6, **constant)

    assert run.codes == [2]
    assert "max_train_steps was 8 and is 6" in run.output


def test_checkpoints_are_saved_by_the_clock(bench):
    slow = Fault(at=STEP, what="wait", call=0, amount=0.1)

    run = bench.train_well(
        "clock", max_train_steps=12, checkpointing_minutes=0.5 / 60, faults=[slow]
    )

    # A step takes a tenth of a second or more, and a checkpoint falls due after half a second.
    steps = run.saved_steps
    assert steps[-1] == 12
    assert 2 <= len(steps) < 12
    assert all(b - a <= 6 for a, b in zip([0, *steps], steps, strict=False))


def test_two_ranks_save_by_the_clock_of_the_first(bench):
    slow = Fault(at=STEP, what="wait", call=0, amount=0.1)

    run = bench.train_well(
        "clocks", ranks=2, max_train_steps=12, checkpointing_minutes=0.5 / 60, faults=[slow]
    )

    assert len(run.saved_steps) >= 2


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.layouts), 2])
def test_exit_after_ends_with_code_75_and_the_run_resumes_to_the_same_bits(bench, ranks):
    name = f"exit with späces {ranks}"
    options = {"ranks": ranks, "max_train_steps": 20}
    slow = Fault(at=STEP, what="wait", call=0, amount=0.1)

    run = bench.train(name, exit_after=1 / 60, overwrite_output_dir=True, faults=[slow], **options)

    assert run.codes == [75] * ranks
    status = run.read_json("status.json")
    assert (status["status"], status["reason"]) == ("preempted", "--exit_after")
    assert run.saved_steps == [status["step"]]
    assert 0 < status["step"] < 20
    config = run.folder / "config.toml"
    command = shlex.split(re.search("To continue: (.*)", run.output)[1])
    launcher = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    printed = ["-m", "llm.trainers.gpt", "--config", str(config), "--resume_from_checkpoint"]
    assert command[-len([*launcher, *printed]) :] == [*launcher, *printed]
    recorded = dict.fromkeys(read_toml(GPTConfig, config))
    resumed = bench.train_well(
        name, ranks=ranks, **recorded, config=config, resume_from_checkpoint=True
    )
    assert f"at step {status['step']}" in resumed.output
    straight = bench.train_well(f"{name}-straight", **options)
    assert without_times(resumed) == without_times(straight)
    model = "model.safetensors"
    assert (resumed.folder / model).read_bytes() == (straight.folder / model).read_bytes()


def test_the_time_until_a_run_ends_includes_that_of_reading_its_inputs(bench):
    slow = Fault(at="llm.trainers.gpt.train:make_model", what="wait", amount=1.5)

    run = bench.train("reads long", exit_after=1 / 60, faults=[slow])

    assert run.codes == [75]
    assert run.read_json("status.json")["step"] == 1


def test_a_run_forms_two_gloo_groups_of_all_ranks(bench, tmp_path):
    formed = tmp_path / "formed"
    fault = Fault(
        at="torch.distributed.distributed_c10d:_new_process_group_helper",
        what="note",
        call=0,
        rank=1,
        file=formed,
    )
    limits = tmp_path / "limits"
    limit = Fault(at="llm.trainers.gpt.main:raise_file_limit", what="note", rank=1, file=limits)

    bench.train_well("groups", ranks=2, max_train_steps=2, faults=[fault, limit])

    # The default one, and that of the thread which saves: each costs a descriptor for every rank.
    assert len(formed.read_text(encoding="utf-8").splitlines()) == 2
    assert limits.exists()
