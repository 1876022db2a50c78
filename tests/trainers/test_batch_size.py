"""`--per_device_train_batch_size auto`: the plan's figure, and a trial on each rank."""

import io
import subprocess
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from llm.errors import ConfigError
from llm.metrics.hardware import device_memory
from llm.models.loss import LanguageModelLoss
from llm.models.patches.tied_embedding import tie_gradients
from llm.parallel.base import AcceleratedStrategy
from llm.tools.plan.plan import main as plan
from llm.trainers.gpt import find_batch_size
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from llm.trainers.gpt.seams import choose_factory, make_extensions
from llm.trainers.gpt.trial_step import trial_step
from tests.support.faults import Fault
from tests.support.layouts import cpu_accelerator, make_strategy, share
from tests.support.models import still_model, tiny_config, tiny_model
from tests.support.ranks import run_ranks, values
from tests.support.recovery import without_times
from tests.support.training import NO_DROPOUT, Bench

AUTO = {
    "per_device_train_batch_size": "auto",
    "ranks": 2,
    "global_batch_size": 24,
    "eval_steps": 2,
}
TRIAL = "llm.trainers.gpt.find_batch_size:trial_step"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("auto"), **NO_DROPOUT)


def test_ranks_agree_on_what_fits_on_all_and_a_resume_keeps_it(bench):
    """All 12 samples of a rank fit the plan; on one rank the trial of them runs out of memory."""
    full = Fault(at=TRIAL, what="out of memory", rank=1)
    found = bench.train_well(
        "found", **AUTO, max_train_steps=2, checkpointing_steps=2, faults=[full]
    )
    said = "--per_device_train_batch_size auto: 6 samples fit (the plan's figure: 12)"
    assert said in found.output
    resolved = tomllib.loads((found.folder / "config.toml").read_text(encoding="utf-8"))
    assert resolved["per_device_train_batch_size"] == 6

    options = {"max_train_steps": 4, "checkpointing_steps": 2, "resume_from_checkpoint": True}
    resumed = bench.train_well("found", **AUTO, **options)
    assert "_size auto:" not in resumed.output
    given = bench.train_well("given", **{**AUTO, "per_device_train_batch_size": 6}, **options)
    # A trial leaves no trace in weights or moments.
    assert without_times(resumed) == without_times(given)


@pytest.mark.slow
def test_a_branch_takes_a_divisor_of_the_parents_global_batch(bench):
    """Which the parent was not given: it follows from its micro-batch."""
    options = {"gradient_accumulation_steps": 2, "checkpointing_steps": 2, "max_train_steps": 4}
    parent = bench.train_well("parent", per_device_train_batch_size=3, **options)
    options |= {"branch_from": parent.folder / "2", "per_device_train_batch_size": "auto"}

    branch = bench.train_well("branch", **options)

    assert "batch: 6 samples per device x 1 rank x 1 micro-batch = 6 samples" in branch.output
    assert branch.losses == pytest.approx(parent.losses[2:], rel=1e-4)


def ask(bench: Bench, **options: object) -> int | str:
    command = bench.command("asked", **{"per_device_train_batch_size": "auto", **options})
    return find_batch_size.ask_plan(parse_args(command), 2, torch.device("cpu"))


def plan_here(words: list[str], **_: object) -> SimpleNamespace:
    """Plan without the seconds that a process of its own takes to start."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = plan(words[words.index("plan") + 1 :])
    return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr=errors.getvalue())


def test_half_the_memory_is_half_the_batch(bench, monkeypatch):
    monkeypatch.setattr(subprocess, "run", plan_here)
    figures = []
    for mib in (128, 64):
        monkeypatch.setattr(find_batch_size, "host_memory", lambda mib=mib: mib * 2**20)
        figures.append(ask(bench, block_size=64))
    assert figures[0] == 2 * figures[1]
    assert 4 <= figures[1] <= 256


def test_what_the_plan_refuses_is_refused_with_its_sentence(bench, monkeypatch):
    monkeypatch.setattr(subprocess, "run", plan_here)
    answer = ask(bench, kfac=True, kfac_library="kfac-pytorch")
    assert answer == "--kfac_library kfac-pytorch cannot be planned; leave it out."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_parallel": "gossip"}, "auto cannot plan --data_parallel gossip; give a number"),
        ({"per_device_train_batch_size": "most"}, "expects an integer or auto, not 'most'"),
        ({"per_device_train_batch_size": 0}, "must be at least 1, not 0"),
    ],
)
def test_batches_that_cannot_be_searched_for_are_refused(bench, options, said):
    with pytest.raises(ConfigError, match=said):
        parse_args(bench.command("refused", **{"per_device_train_batch_size": "auto", **options}))


def changes_of_a_trial(options: GPTConfig) -> list[bool]:
    """Whether weights and states are others after a trial, and after a step."""
    strategy = make_strategy({})
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
    trial_step(strategy, batches)
    changes.append(not all(torch.equal(*pair) for pair in zip(before, tensors(), strict=True)))
    assert all(parameter.grad is None for parameter in model.parameters())
    strategy.forward_backward(batches, num_tokens=num_tokens)
    strategy.optimizer_step(1.0)
    changes.append(not all(torch.equal(*pair) for pair in zip(before, tensors(), strict=True)))
    return changes


def gradient_after_trials(*, fails: bool) -> tuple[bool, torch.Tensor]:
    """Whether ranks all-reduce by DDP, and the gradient of a step after trials."""
    strategy, model = AcceleratedStrategy(cpu_accelerator("no")), still_model()
    tie_gradients(model)
    strategy.prepare(
        LanguageModelLoss(model),
        choose_factory(GPTConfig(), make_extensions(GPTConfig()), seed=1).make,
    )
    batches, num_tokens = share(0, strategy, 1)

    def run_out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if fails:
        # Between the backward passes of the head and of the lookup.
        hook = model.transformer.h[0].register_full_backward_hook(run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            trial_step(strategy, batches)
        hook.remove()
    trial_step(strategy, batches)
    strategy.forward_backward(batches, num_tokens=num_tokens)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return isinstance(strategy.wrapped, DistributedDataParallel), gradient


def test_a_trial_that_fails_in_its_backward_pass_leaves_no_trace():
    found, expected = (
        values(run_ranks(partial(gradient_after_trials, fails=fails), 2)) for fails in (True, False)
    )
    for (is_ddp, gradient), (_, undisturbed) in zip(found, expected, strict=True):
        assert is_ddp
        assert torch.equal(gradient, undisturbed)


@pytest.mark.parametrize("options", [{}, {"kfac": True}], ids=str)
def test_a_trial_changes_neither_weights_nor_states(options):
    assert values(run_ranks(changes_of_a_trial, 1, GPTConfig(**options))) == [[False, True]]


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
    known = find_batch_size.host_memory(tmp_path)
    assert known == (expected or device_memory(torch.device("cpu")))
