"""The made-up device notices defects that a CPU does not: they are put back one by one."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llm.checkpoint.save import Saver
from llm.checkpoint.snapshot import HostCopies
from llm.extensions.decentralized.any_rank import FlagReducer
from llm.extensions.decentralized.averaging import GossipAverager
from llm.extensions.decentralized.decentralized import DecentralizedStrategy
from llm.models import build, loss
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.fsdp import ShardedStrategy
from tests.support.made_up_device import NAME, SideStream
from tests.support.made_up_run import Case, run
from tests.support.ranks import Outcome, run_ranks, values
from tests.support.strict_mode import Notes

more = pytest.mark.layouts


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
    norm = AcceleratedStrategy._compute_gradient_norm

    def gradient_norm(self: AcceleratedStrategy) -> torch.Tensor:
        do(self)
        return norm(self)

    AcceleratedStrategy._compute_gradient_norm = gradient_norm


def send_read_and_copy() -> None:
    before_the_norm(lambda strategy: dist.all_reduce(torch.ones(1)))
    before_the_norm(lambda strategy: strategy.loss_scale().item())
    before_the_norm(lambda strategy: strategy.loss_scale().to("cpu", non_blocking=True))


def test_what_the_host_sends_reads_and_copies_in_a_step_is_noticed():
    update = notes_with(send_read_and_copy, Case(4))["update"]
    assert sum("norm = self._compute_gradient_norm()" in line for line in update.host_messages) == 1
    copied, read = update.reads  # the last defect comes first
    assert copied.startswith("_to_copy at parallel/base.py")
    assert read.startswith("_local_scalar_dense at parallel/base.py")


def leave_experts_in_float32() -> None:
    build.autocast_grouped_products = lambda: None


@more
def test_experts_that_multiply_in_float32_raise_or_are_noticed():
    outcome = outcome_with(leave_experts_in_float32, Case(1, family="mixtral"))
    if outcome.error is None:  # PyTorch 2.15 has float32 grouped products
        notes, _ = outcome.value
        products = [product.split()[0] for product in notes["gradient"].wide_products]
        assert "_grouped_mm" in products
    else:
        assert re.search(r"Expected .*\bgot .*torch\.float32", outcome.error), outcome.error


def compute_the_blocks_in_float32() -> None:
    run_model = loss.run_model

    def run_model_without_autocast(*args: Any) -> Any:
        with torch.autocast(NAME, enabled=False):
            return run_model(*args)

    loss.run_model = run_model_without_autocast


@more
def test_products_of_the_model_in_float32_are_noticed():
    notes = notes_with(compute_the_blocks_in_float32, Case(1))
    # The output of a Conv1D of GPT-2: four products in each of two blocks and micro-batches.
    products = [product.split()[0] for product in notes["gradient"].wide_products]
    assert products.count("addmm") == 16


def mix_devices() -> None:
    before_the_norm(lambda strategy: strategy.parameters[-1].grad.add_(torch.ones(32)))


@more
def test_a_sum_of_tensors_on_two_devices_raises():
    error = outcome_with(mix_devices, Case(1)).error
    # PyTorch 2.10 writes "two different devices gpux:0, cpu".
    assert re.search(r"two (different )?devices,? gpux:0(,| and) cpu", error)


def gather_each_layer_alone() -> None:
    """A group of its own for the feed-forward layers of each block."""
    shard = ShardedStrategy._shard_modules

    def shard_modules(
        self: ShardedStrategy, root: Any, blocks: Any, mesh: Any, **options: Any
    ) -> None:
        shard(self, root, [*(block.mlp for block in blocks), *blocks], mesh, **options)

    ShardedStrategy._shard_modules = shard_modules


@pytest.mark.layouts
def test_one_more_all_gather_for_each_block_is_noticed():
    collectives = notes_with(gather_each_layer_alone, Case(4, {"data_parallel_shard_size": 4}))
    # In two blocks and two micro-batches, forward and backward: 9 and 6 without it.
    assert collectives["gradient"].collectives["allgather_base"] == 17
    assert collectives["gradient"].collectives["reduce_scatter_base"] == 10


GOSSIP = Case(4, {"data_parallel": "gossip"})


def average_without_a_wait() -> None:
    GossipAverager.wait_for_messages = lambda self: None


@pytest.mark.extended
def test_gossip_that_does_not_wait_for_its_messages_is_noticed():
    uses = notes_with(average_without_a_wait, GOSSIP)["update"].in_flight
    lines = {use.partition(" at ")[2].partition(":")[0] for use in uses}
    assert lines == {"parallel/flat_buffers.py", "extensions/decentralized/averaging.py"}
    # The first use of what a partner has sent, and the next message in a buffer that is in flight.
    assert uses[0].startswith("aten::_foreach_add_.List at ")
    assert "aten::_foreach_copy_" in {use.partition(" at ")[0] for use in uses}


def answer_without_a_wait() -> None:
    FlagReducer.wait_for_messages = lambda self: None


@more
def test_flags_that_are_read_before_they_arrive_are_noticed():
    uses = notes_with(answer_without_a_wait, GOSSIP)["update"].in_flight
    assert uses[0].startswith("aten::maximum at extensions/decentralized/any_rank.py")


def read_the_answer_without_a_wait() -> None:
    any_rank = AcceleratedStrategy.reduce_flags

    def read_at_once(self: AcceleratedStrategy, flags: list[bool]) -> list[bool]:
        if self._pending_flags is not None:
            self._pending_flags = SimpleNamespace(wait=lambda: None), self._pending_flags[1]
        return any_rank(self, flags)

    AcceleratedStrategy.reduce_flags = read_at_once


@more
def test_an_answer_that_the_host_reads_before_it_is_there_is_noticed():
    uses = notes_with(read_the_answer_without_a_wait, Case(4))["update"].in_flight
    assert uses[0].startswith("tolist at parallel/base.py")
    assert uses[-1].startswith("free at parallel/base.py")


def update_without_a_wait() -> None:
    Saver.before_update = lambda self: None


@pytest.mark.extended
def test_an_update_that_does_not_wait_for_the_copies_of_a_save_is_noticed():
    notes = notes_with(update_without_a_wait, Case(1))
    assert notes["save"].in_flight == []
    uses = notes["next step"].in_flight
    assert {use.partition(" at ")[2].partition(":")[0] for use in uses} == {"parallel/base.py"}
    assert any(use.startswith("aten::_fused_adamw_") for use in uses)


def copy_what_is_still_computed() -> None:
    SideStream.wait_stream = lambda self, other: None


@more
def test_copies_that_do_not_wait_for_the_step_are_noticed():
    uses = notes_with(copy_what_is_still_computed, Case(1))["save"].in_flight
    assert uses[0].startswith("aten::copy_ of what is computed at checkpoint/snapshot.py")


def drop_what_is_copied() -> None:
    DecentralizedStrategy.copied_first = AcceleratedStrategy.copied_first
    make = HostCopies.__init__

    def make_without_sources(
        self: HostCopies, tensors: Any, *, sources: Any, end_event: Any
    ) -> None:
        make(self, tensors, sources=[None] * len(sources), end_event=end_event)

    HostCopies.__init__ = make_without_sources


@more
def test_memory_that_is_given_up_while_it_is_copied_is_noticed():
    # The mean of the replicas, which is made to be saved.
    uses = notes_with(drop_what_is_copied, GOSSIP)["save"].in_flight
    assert {use.partition(" at ")[0] for use in uses} == {"free"}
