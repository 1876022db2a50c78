"""The made-up device notices defects that a CPU does not: they are put back one by one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from llm.models import build, loss
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.fsdp import ShardedStrategy
from tests.support.made_up_device import NAME
from tests.support.made_up_run import Case, run
from tests.support.ranks import Outcome, run_ranks, values
from tests.support.strict_mode import Notes


def notes_with(defect: Callable[[], None], case: Case) -> dict[str, Notes]:
    [(notes, _)] = values([outcome_with(defect, case)])
    return notes


def outcome_with(defect: Callable[[], None], case: Case) -> Outcome:
    [outcome] = run_ranks(run_defective, 1, defect, case)
    return outcome


def run_defective(defect: Callable[[], None], case: Case) -> Any:
    defect()
    return run(case)


def before_the_norm(do: Callable[[AcceleratedStrategy], Any]) -> None:
    """Let every step do something more."""
    norm = AcceleratedStrategy._gradient_norm

    def gradient_norm(self: AcceleratedStrategy) -> torch.Tensor:
        do(self)
        return norm(self)

    AcceleratedStrategy._gradient_norm = gradient_norm


def send_from_the_host() -> None:
    before_the_norm(lambda strategy: dist.all_reduce(torch.ones(1)))


def test_a_tensor_of_the_host_in_a_collective_of_the_device_is_noticed():
    [message] = notes_with(send_from_the_host, Case(4))["update"].host_messages
    assert message.startswith("allreduce at parallel/base.py")


def read_the_loss_scale() -> None:
    before_the_norm(lambda strategy: strategy.loss_scale().item())


def test_a_value_that_the_host_reads_in_a_step_is_noticed():
    [read] = notes_with(read_the_loss_scale, Case(1))["update"].reads
    assert read.startswith("_local_scalar_dense at parallel/base.py")


def copy_the_loss_scale() -> None:
    before_the_norm(lambda strategy: strategy.loss_scale().to("cpu", non_blocking=True))


def test_a_copy_to_the_host_in_a_step_is_noticed():
    [read] = notes_with(copy_the_loss_scale, Case(1))["update"].reads
    assert read.startswith("_to_copy at parallel/base.py")


def leave_experts_in_float32() -> None:
    build.autocast_grouped_products = lambda: None


def test_experts_that_multiply_in_float32_raise():
    error = outcome_with(leave_experts_in_float32, Case(1, family="mixtral")).error
    assert "Expected inputs of BF16 type but got mat_a.dtype=torch.float32" in error


def compute_the_blocks_in_float32() -> None:
    run_model = loss.run_model

    def run_model_without_autocast(*args: Any) -> Any:
        with torch.autocast(NAME, enabled=False):
            return run_model(*args)

    loss.run_model = run_model_without_autocast


def test_products_of_the_model_in_float32_are_noticed():
    notes = notes_with(compute_the_blocks_in_float32, Case(1))
    # The output of a Conv1D of GPT-2: four products in each of two blocks and micro-batches.
    products = [product.split()[0] for product in notes["gradient"].wide_products]
    assert products.count("addmm") == 16


def mix_devices() -> None:
    before_the_norm(lambda strategy: strategy.parameters[-1].grad.add_(torch.ones(32)))


def test_a_sum_of_tensors_on_two_devices_raises():
    error = outcome_with(mix_devices, Case(1)).error
    assert "at least two devices, gpux:0 and cpu" in error


def gather_each_layer_alone() -> None:
    """A group of its own for the feed-forward layers of each block."""
    shard = ShardedStrategy._shard_block

    def shard_block(self: ShardedStrategy, block: torch.nn.Module, mesh: Any) -> None:
        shard(self, block.mlp, mesh)
        shard(self, block, mesh)

    ShardedStrategy._shard_block = shard_block


def test_one_more_all_gather_for_each_block_is_noticed():
    collectives = notes_with(gather_each_layer_alone, Case(4, {"data_parallel_shard_size": 4}))
    # In two blocks and two micro-batches, forward and backward: 18 and 10 without it.
    assert collectives["gradient"].collectives["allgather_base"] == 26
    assert collectives["gradient"].collectives["reduce_scatter_base"] == 14
