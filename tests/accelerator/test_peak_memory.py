"""The plan of a GPU's memory against the bytes that tensors of a made-up device take at once."""

import functools
from typing import Any

import pytest
import torch

from llm.parallel.base import AcceleratedStrategy
from llm.tools.plan.estimate import estimate
from llm.tools.plan.job import Job
from llm.tools.plan.memory import CONTEXT
from llm.tools.plan.options import PlanOptions
from tests.support.made_up_run import MICRO_BATCHES, Case, run
from tests.support.ranks import run_ranks, values
from tests.support.strict_mode import Notes

SAMPLES, LENGTH = 64, 16  # short samples: the made-up device keeps attention scores
MODEL = {
    **{"num_layers": 4, "hidden_size": 256, "num_attention_heads": 1},
    "config_overrides": "vocab_size=8192",
}
CASES = {
    "one rank": Case(1, MODEL, family=None, shape=(SAMPLES, LENGTH)),
    "FSDP": Case(4, {**MODEL, "data_parallel_shard_size": 4}, family=None, shape=(SAMPLES, LENGTH)),
}
every_case = pytest.mark.parametrize(
    "name", ["one rank", pytest.param("FSDP", marks=pytest.mark.layouts)]
)


@functools.cache
def run_case(name: str) -> dict[str, Notes]:
    [(notes, _)] = values(run_ranks(run, 1, CASES[name]))
    return notes


@functools.cache
def planned(name: str) -> int:
    """Bytes of tensors at most, by the plan for an H100 on each rank."""
    case = CASES[name]
    options = PlanOptions(
        **case.options,
        per_device_train_batch_size=SAMPLES,
        block_size=LENGTH,
        gradient_accumulation_steps=MICRO_BATCHES,
        gpus_per_node=case.world_size,
        torch_compile=False,  # as the case runs
    )
    job = Job(options)
    return estimate(job, job.dims).memory.total - CONTEXT


@every_case
def test_a_step_takes_the_memory_that_the_plan_says(name):
    notes = run_case(name)
    peak = max(notes["gradient"].peak, notes["update"].peak)
    assert planned(name) == pytest.approx(peak, rel=0.1)


def run_keeping_gradients(case: Case) -> Any:
    norm, kept = AcceleratedStrategy._compute_gradient_norm, []

    def gradient_norm(self: AcceleratedStrategy) -> torch.Tensor:
        kept.append([parameter.grad for parameter in self.parameters])
        return norm(self)

    AcceleratedStrategy._compute_gradient_norm = gradient_norm
    return run(case)


@pytest.mark.extended
def test_gradients_that_outlive_their_step_take_more_than_the_plan_says():
    [(notes, _)] = values(run_ranks(run_keeping_gradients, 1, CASES["one rank"]))
    assert notes["gradient"].peak > 1.1 * planned("one rank")


@every_case
def test_evaluating_and_saving_take_no_more_memory_than_a_step(name):
    notes = run_case(name)
    assert notes["evaluation"].peak < planned(name)
    assert notes["save"].peak < planned(name)


@pytest.mark.extended
def test_a_step_after_a_save_takes_no_more_memory_than_one_before_it():
    # Gossip makes the mean of the weights to save it.
    case = Case(4, {**MODEL, "data_parallel": "gossip"}, family=None, shape=(SAMPLES, LENGTH))
    [(notes, _)] = values(run_ranks(run, 1, case))
    before = max(notes["gradient"].peak, notes["update"].peak)
    assert notes["next step"].peak < 1.01 * before
