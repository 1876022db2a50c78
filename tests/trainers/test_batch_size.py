"""`--per_device_train_batch_size auto`: trials that grow while the next one fits on every rank."""

import tomllib
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from llm.errors import ConfigError
from llm.metrics.hardware import GIB, device_memory
from llm.metrics.peak_memory import (
    allocated_memory,
    host_memory,
    peak_memory,
    reset_peak_memory,
    usable_memory,
)
from llm.models.loss import LanguageModelLoss
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.find_batch_size import run_trial_step
from llm.trainers.gpt.main import parse_args
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.support.faults import Fault
from tests.support.layouts import make_strategy, share
from tests.support.models import tiny_config, tiny_model
from tests.support.ranks import run_ranks, values
from tests.support.recovery import without_times
from tests.support.training import NO_DROPOUT, Bench

AUTO = {
    "per_device_train_batch_size": "auto",
    "ranks": 2,
    "global_batch_size": 24,
    "eval_steps": 2,
}
SEARCH = "llm.trainers.gpt.find_batch_size"


def memory(*peaks: int, usable: int) -> list[Fault]:
    """Made-up memory in GiB: 1 before a pass, the peaks of trials, and what rank 1 may use."""

    def value(name: str, amount: float, **options: int) -> Fault:
        return Fault(at=f"{SEARCH}:{name}", what="value", amount=amount * GIB, **options)

    return [
        value("allocated_memory", 1, call=0),
        *(value("peak_memory", peak, call=call) for call, peak in enumerate(peaks, start=1)),
        value("usable_memory", 1000, call=0, rank=0),
        value("usable_memory", usable, call=0, rank=1),
    ]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("auto"), **NO_DROPOUT)


@pytest.mark.extended
def test_ranks_agree_on_what_fits_on_all_and_a_resume_keeps_it(bench):
    """One sample takes 1 GiB above the first one: 7 fit on rank 1, and 6 divide the batch."""
    faults = memory(2, 7, usable=8)
    found = bench.train_well(
        "found", **AUTO, max_train_steps=2, checkpointing_steps=2, faults=faults
    )
    assert (
        "--per_device_train_batch_size auto: 6 samples; a forward and backward pass takes up to "
        "7.00 of 8.00 GiB (on rank 1)."
    ) in found.output
    resolved = tomllib.loads((found.folder / "config.toml").read_text(encoding="utf-8"))
    assert resolved["per_device_train_batch_size"] == 6

    options = {"max_train_steps": 4, "checkpointing_steps": 2, "resume_from_checkpoint": True}
    resumed = bench.train_well("found", **AUTO, **options)
    assert "_size auto:" not in resumed.output
    given = bench.train_well("given", **{**AUTO, "per_device_train_batch_size": 6}, **options)
    # A trial leaves no trace in weights or moments.
    assert without_times(resumed) == without_times(given)


@pytest.mark.parametrize(
    ("layout", "faults", "size"),
    [
        pytest.param(
            *("data_parallel_shard_size", memory(2, 7, usable=8), 6), marks=pytest.mark.extended
        ),
        pytest.param(
            *("tensor_parallel_size", memory(2, 7, usable=8), 6), marks=pytest.mark.layouts
        ),
        pytest.param(
            *("context_parallel_size", memory(2, 7, usable=8), 6), marks=pytest.mark.layouts
        ),
        # A pipeline of two stages needs two micro-batches, so 24 samples are too many.
        pytest.param(
            *("pipeline_parallel_size", memory(2, 9, 13, usable=1000), 12),
            marks=pytest.mark.layouts,
        ),
    ],
)
def test_ranks_that_divide_a_model_measure_it_too(bench, layout, faults, size):
    options = {**AUTO, layout: 2, "max_train_steps": 2}
    found = bench.train_well(f"{layout}-auto", **options, faults=faults)
    assert f"_size auto: {size} samples;" in found.output
    given = bench.train_well(layout, **{**options, "per_device_train_batch_size": size})
    assert without_times(found) == without_times(given)


def test_the_average_of_the_weights_is_counted_before_it_exists(bench):
    """The tiny model and its average are small, and so is what the rank may use."""
    parameters = sum(
        parameter.numel() for parameter in tiny_model(tiny_config("gpt2")).parameters()
    )
    sizes = []
    for ema in (None, 0.9):
        faults = [
            Fault(at=f"{SEARCH}:{name}", what="value", amount=amount * parameters, call=call)
            for name, call, amount in [
                ("allocated_memory", 0, 12),
                ("peak_memory", 1, 16),
                ("peak_memory", 2, 28),
                ("usable_memory", 0, 30),
            ]
        ]
        run = bench.train_well(
            f"ema-{ema}",
            **{**AUTO, "ranks": 1, "max_train_steps": 1, "ema_decay": ema},
            faults=faults,
        )
        config = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
        sizes.append(config["per_device_train_batch_size"])
    assert sizes == [4, 3]  # 18 bytes for each parameter are 4.5 samples, and 14 are 3.5


def test_a_first_trial_without_memory_is_one_sentence(bench):
    faults = [Fault(at=f"{SEARCH}:run_trial_step", what="out of memory", rank=1)]
    run = bench.train("full", **AUTO, faults=faults)
    assert run.codes == [76, 2]
    assert "Traceback" not in run.output
    assert "error: Out of memory on cpu" in run.outcomes[1].output
    assert "error: rank 1 on " in run.outcomes[0].output


@pytest.mark.slow
def test_a_branch_takes_a_divisor_of_the_parents_global_batch(bench):
    """Which the parent was not given: it follows from its micro-batch."""
    options = {"gradient_accumulation_steps": 2, "checkpointing_steps": 2, "max_train_steps": 4}
    parent = bench.train_well("parent", per_device_train_batch_size=3, **options)
    options |= {"branch_from": parent.folder / "2", "per_device_train_batch_size": "auto"}

    branch = bench.train_well("branch", **options)

    assert "batch: 6 samples per device x 1 rank x 1 micro-batch = 6 samples" in branch.output
    assert branch.losses == pytest.approx(parent.losses[2:], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_parallel": "gossip"}, "auto does not go with --data_parallel gossip; give"),
        ({"kfac": True, "kfac_library": "kfac-pytorch"}, "auto does not go with --kfac_library k"),
        ({"per_device_train_batch_size": "most"}, "expects an integer or auto, not 'most'"),
        ({"per_device_train_batch_size": 0}, "must be at least 1, not 0"),
    ],
)
def test_batches_that_cannot_be_searched_for_are_refused(bench, options, said):
    with pytest.raises(ConfigError, match=said):
        parse_args(bench.command("refused", **{"per_device_train_batch_size": "auto", **options}))


def changes_of_a_trial(options: GPTConfig, precision: str) -> list[bool]:
    """Whether weights and states are others after a trial, and after a step."""
    strategy = make_strategy({}, precision)
    model = tiny_model(tiny_config("gpt2", **NO_DROPOUT))
    strategy.prepare(
        LanguageModelLoss(model),
        choose_factory(options, make_extensions(options), seed=1).make,
    )
    batches, num_tokens = share(0, strategy, 2)

    def tensors() -> list[torch.Tensor]:
        parts = {"strategy": strategy, **strategy.run_optimizer.parts()}
        leaves = tree_leaves([part.state_dict() for part in parts.values()])
        return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    changes, before = [], tensors()
    run_trial_step(strategy, batches, num_tokens=num_tokens)
    changes.append(not all(torch.equal(*pair) for pair in zip(before, tensors(), strict=True)))
    assert all(parameter.grad is None for parameter in model.parameters())
    strategy.forward_backward(batches, num_tokens=num_tokens)
    strategy.optimizer_step(1.0)
    changes.append(not all(torch.equal(*pair) for pair in zip(before, tensors(), strict=True)))
    return changes


def test_experts_on_several_ranks_are_refused_with_the_plan(bench):
    experts = {"data_parallel_shard_size": 2, "expert_parallel_size": 2}
    with pytest.raises(
        ConfigError, match=r"tokens choose its experts; give .* `llm-trainers plan`"
    ):
        bench.read(ranks=2, per_device_train_batch_size="auto", **experts)


@pytest.mark.extended
def test_trials_with_the_losses_of_routers_do_not_count_in_the_run(tmp_path):
    bench = Bench(tmp_path, family="mixtral")
    options = {"global_batch_size": 4, "router_z_loss": 0.1, "max_train_steps": 2}
    found = bench.train_well("found", per_device_train_batch_size="auto", **options)
    assert "--per_device_train_batch_size auto: 4 samples" in found.output
    given = bench.train_well("given", per_device_train_batch_size=4, **options)
    assert without_times(found) == without_times(given)


@pytest.mark.parametrize(
    ("options", "precision"), [({}, "no"), ({}, "fp16"), ({"kfac": True}, "no")], ids=str
)
def test_a_trial_changes_neither_weights_nor_states(options, precision):
    ranks = run_ranks(changes_of_a_trial, 1, GPTConfig(**options), precision)
    assert values(ranks) == [[False, True]]


def test_the_peak_of_this_process_contains_freed_tensors():
    device = torch.device("cpu")
    reset_peak_memory(device)
    start = allocated_memory(device)
    torch.ones(2**24).sum()
    assert peak_memory(device) - start > 0.9 * 2**26


def test_ranks_of_a_host_share_its_memory():
    whole, half = (usable_memory(torch.device("cpu"), ranks_on_host=n) for n in (1, 2))
    assert whole == pytest.approx(0.8 * host_memory())
    assert half == pytest.approx(whole / 2, rel=1e-6)


@pytest.mark.parametrize("error", [None, RuntimeError("The device does not tell.")])
def test_a_gpu_shares_its_memory_with_other_programs(monkeypatch, error):
    """8 of its 10 GiB are free or reserved by this process; some drivers know the total only."""

    def mem_get_info(_: torch.device) -> tuple[int, int]:
        if error is not None:
            raise error
        return 7 * GIB, 10 * GIB

    backend = SimpleNamespace(
        is_available=lambda: True,
        max_memory_allocated=lambda _: 0,
        memory_reserved=lambda _: 1 * GIB,
        mem_get_info=mem_get_info,
        get_device_properties=lambda _: SimpleNamespace(total_memory=10 * GIB),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: backend)
    usable = usable_memory(torch.device("cuda"), ranks_on_host=4)
    assert usable == int(0.9 * (8 if error is None else 10) * GIB)


def test_a_device_without_figures_of_its_memory_is_refused_with_the_plan():
    with pytest.raises(ConfigError, match="memory of mps; give a number"):
        usable_memory(torch.device("mps"), ranks_on_host=1)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/jobs/7\n", {"jobs/7/memory.max": "max", "jobs/memory.max": "4096"}, 4096),
        ("0::/on/the/host\n", {"memory.max": "8192"}, 8192),  # in a container
        (
            "5:cpu,cpuacct:/a\n4:memory:/a\n0::/a\n",
            {"memory/a/memory.limit_in_bytes": "512", "memory/memory.limit_in_bytes": "9" * 18},
            512,
        ),
        ("0::/\n", {}, None),
    ],
)
def test_the_memory_of_the_host_is_what_control_groups_leave(tmp_path, groups, files, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    known = host_memory(tmp_path)
    assert known == (expected or device_memory(torch.device("cpu")))
