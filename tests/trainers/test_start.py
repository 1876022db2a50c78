"""Where a run starts from, how far it may go, and when it saves and ends by the clock."""

import re
import shlex
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from llm.config.toml import read_toml
from llm.errors import CheckpointError, LLMError
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
        make_model(MagicMock())
    assert chosen == taken


def saved(checkpoint: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def part(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors.items() if key.startswith(f"strategy/{name}/")}


@pytest.mark.parametrize(
    ("named", "step"),
    [
        ("origin", 6),
        ("origin/3", 3),
        ("origin/best", 6),
        ("origin/checkpoints/step_00000003", 3),
    ],
)
def test_a_start_is_a_run_its_step_its_best_or_a_checkpoints_folder(bench, origin, named, step):
    run = bench.read(init_from=bench.folder / named)

    assert run.init_from.step == step
    assert run.initial_weights == f"from {origin.folder}/checkpoints/step_0000000{step}"


def test_init_from_loads_the_weights_and_nothing_else(bench, origin):
    # A rate of zero: what is saved after the first step are the weights it started with.
    run = bench.train_well(
        "from", init_from=origin.folder, learning_rate=0.0, max_train_steps=1,
        checkpointing_steps=1, weight_decay=0.0,
    )  # fmt: skip

    source = origin.folder / "checkpoints" / "step_00000006"
    ours, theirs = saved(run.folder / "checkpoints" / "step_00000001"), saved(source)
    assert part(ours, "model").keys() == part(theirs, "model").keys()
    for name, weights in part(theirs, "model").items():
        np.testing.assert_array_equal(ours[name], weights)
    counts = {v.item() for k, v in part(ours, "optimizer").items() if k.endswith("/step")}
    assert counts == {1.0}
    assert [(record["step"], record["samples"]) for record in run.metrics] == [(1, 4)]
    assert f"weights: from {source}" in run.output
    assert f"| initial weights | from {source} |" in (run.folder / "README.md").read_text()


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


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "/nowhere holds no valid checkpoint"),
        ("origin/7", "/origin/7 names no checkpoint of .*/origin, which has the steps 3, 6"),
        ("origin/oldest", "/origin/oldest names no checkpoint of"),
        ("model", "/model holds no valid checkpoint"),
    ],
)
def test_init_from_a_place_without_a_checkpoint_is_refused(bench, origin, path, said):
    with pytest.raises(CheckpointError, match=f"--init_from .*{said}"):
        bench.read(init_from=bench.folder / path)


@pytest.mark.parametrize("how", ["origin", "origin/3", "origin/best"])
def test_a_run_is_not_written_over_what_it_starts_from(bench, origin, how):
    with pytest.raises(LLMError, match="which this run would replace"):
        bench.read("origin", init_from=bench.folder / how, overwrite_output_dir=True)


def test_a_checkpoint_of_another_run_does_not_permit_overwriting_a_run(bench, origin):
    shutil.copytree(origin.folder, bench.folder / "other", symlinks=True)
    named = origin.folder / "checkpoints" / "step_00000003"
    with pytest.raises(LLMError, match="other holds a run already"):
        bench.read("other", resume_from_checkpoint=named, max_train_steps=6)


def test_init_from_another_model_is_refused_in_one_sentence(bench, origin, tmp_path):
    other = Bench(tmp_path, n_embd=16)

    run = other.train("other", init_from=origin.folder, max_train_steps=1)

    assert run.codes == [2]
    assert "does not fit this model" in run.output
    assert "Traceback" not in run.output


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
    [
        pytest.param({"lr_scheduler_type": "constant"}, 8, marks=pytest.mark.extended),
        (WSD, 5),
    ],
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

    with pytest.raises(LLMError, match="max_duration was '8 steps' and is '12 steps'"):
        bench.read(name, resume_from_checkpoint=True, max_train_steps=12, **options)


def test_a_shorter_run_is_refused(bench):
    constant = {"lr_scheduler_type": "constant"}
    cut_after(bench, "shorter", 4, **constant)

    with pytest.raises(LLMError, match="max_duration was '8 steps' and is '6 steps'"):
        bench.read("shorter", resume_from_checkpoint=True, max_train_steps=6, **constant)


def test_two_ranks_save_by_the_clock_of_the_first(bench):
    slow = Fault(at=STEP, what="wait", call=0, amount=0.1)

    run = bench.train_well(
        "clocks", ranks=2, max_train_steps=12, checkpointing_minutes=0.5 / 60, faults=[slow]
    )

    # A step takes a tenth of a second or more, and a checkpoint falls due after half a second.
    steps = run.saved_steps
    assert steps[-1] == 12
    assert 2 <= len(steps) < 12
    assert all(b - a <= 6 for a, b in zip([0, *steps], steps, strict=False))


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
    launched = ["--nproc_per_node", str(ranks), "-m", "llm.trainers.gpt"]
    program = launched if ranks > 1 else ["train"]
    printed = [*program, "--config", str(config), "--resume_from_checkpoint"]
    assert command[-len(printed) :] == printed
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
