"""Gossip: each rank averages its weights with a few others in each step, in changing groups.

x_i <- sum_j W_ij x_j - lr * d(x_i)   (overlap: the exchange runs while the gradient is computed)
x_i <- sum_j W_ij (x_j - lr * d(x_j)) (blocking)

as in D-PSGD (Lian et al. 2017, arXiv:1705.09056), with one group per rank and round, as in one-peer
exponential graphs (Ying et al. 2021, arXiv:2110.13363).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm.extensions.decentralized.modes import Gossip
from llm.parallel.flat_buffers import FlatBuffer, group_for_flat_buffers
from llm.runtime import torch_names


@dataclass
class _Exchange:
    """Messages of a round in flight.

    Attributes:
        works: Handles to wait for.
        replicas: The replicas that average with each other, with this one.
        partner_slices: For a pair, the slice of each buffer that the partner sends; else empty.
    """

    works: list[Any]
    replicas: tuple[int, ...]
    partner_slices: list[Tensor]


class GossipAverager:
    """Averages replicas of the model by rounds; every rank calls it at the same steps.

    A replica may be trained by several ranks of one node. If each of them holds all of its weights,
    each exchanges an equal slice with its counterparts on other nodes, and an all-gather inside the
    node follows: weights cross the network between nodes once. If the replica's weights are
    sharded, each rank exchanges its shard.

    Flat buffers hold one more copy of the weights; pairs also need a copy of the incoming
    weights.

    Attributes:
        num_rounds: Number of rounds begun.

    Args:
        gossip: Which replicas average, and when.
        tensors: The weights that this rank holds, in the same order on all ranks.
        rank: Rank of this process.
        ranks_per_replica: Number of consecutive ranks that train one replica.
        is_sharded: Whether each of these ranks holds only a shard of the weights.
    """

    def __init__(
        self,
        gossip: Gossip,
        tensors: Sequence[Tensor],
        *,
        rank: int,
        ranks_per_replica: int = 1,
        is_sharded: bool = False,
    ) -> None:
        self.num_rounds = 0
        self._rounds_of_period = gossip.rounds
        self._replica, self._slice_index = divmod(rank, ranks_per_replica)
        self._ranks_per_replica = ranks_per_replica
        self._num_slices = 1 if is_sharded else ranks_per_replica
        self._overlap = gossip.overlap
        self._in_flight: _Exchange | None = None
        num_replicas = sum(map(len, gossip.rounds[0]))
        self._buffers: list[FlatBuffer] = []
        if num_replicas == 1:
            return
        self._buffers = [
            FlatBuffer(group, multiple_of=self._num_slices)
            for group in group_for_flat_buffers(tensors)
        ]
        slice_index = 0 if is_sharded else self._slice_index
        self._slices = [
            buffer.flat.chunk(self._num_slices)[slice_index] for buffer in self._buffers
        ]
        self._partner_slices: list[Tensor] = []
        if any(len(group) == 2 for groups in gossip.rounds for group in groups):
            self._partner_slices = [torch.empty_like(flat_slice) for flat_slice in self._slices]
        self._make_process_groups(num_replicas)

    def _make_process_groups(self, num_replicas: int) -> None:
        """Make the process groups of pairs, larger groups and replicas; every rank must call it.

        They are separate from the gradients' groups, so that messages do not wait for each other.
        """
        ranks_per_replica = self._ranks_per_replica
        self._pair_group = dist.new_group()
        # The first operation of a group must include all of its ranks: NCCL connects them then.
        dist.all_reduce(torch.zeros(1, device=self._buffers[0].flat.device), group=self._pair_group)
        self._group_by_replicas: dict[tuple[int, ...], Any] = {}
        all_groups = dict.fromkeys(itertools.chain.from_iterable(self._rounds_of_period))
        for replicas in all_groups:
            if len(replicas) <= 2:
                continue
            for slice_index in range(ranks_per_replica):
                process_group = dist.new_group(
                    [replica * ranks_per_replica + slice_index for replica in replicas]
                )
                if slice_index == self._slice_index and self._replica in replicas:
                    self._group_by_replicas[replicas] = process_group
        if self._num_slices > 1:
            num_ranks = num_replicas * ranks_per_replica
            ranks_by_replica = [
                [*range(first_rank, first_rank + ranks_per_replica)]
                for first_rank in range(0, num_ranks, ranks_per_replica)
            ]
            self._replica_group, _ = dist.new_subgroups_by_enumeration(ranks_by_replica)

    def before_step(self) -> None:
        """Overwrite the weights with the mean of the exchange that ran during the gradient."""
        self._finish_round()

    def after_step(self) -> None:
        """Exchange the updated weights."""
        self._start_round(self.num_rounds)
        self.num_rounds += 1
        if not self._overlap:
            self._finish_round()

    def _start_round(self, round_index: int) -> None:
        """Send this rank's slices to the replicas of its group, and receive or sum theirs."""
        groups = self._rounds_of_period[round_index % len(self._rounds_of_period)]
        replicas = next(group for group in groups if self._replica in group)
        if len(replicas) == 1:
            return
        for buffer in self._buffers:
            buffer.pack()
        if len(replicas) == 2:
            (partner,) = set(replicas) - {self._replica}
            self._in_flight = _Exchange(
                self._exchange_slices_with(partner), replicas, self._partner_slices
            )
            return
        pending_sums = [
            dist.all_reduce(flat_slice, group=self._group_by_replicas[replicas], async_op=True)
            for flat_slice in self._slices
        ]
        self._in_flight = _Exchange(pending_sums, replicas, [])

    def _exchange_slices_with(self, partner: int) -> list[Any]:
        """Send this rank's slices to a replica, and receive its slices; return the handles."""
        partner_rank = partner * self._ranks_per_replica + self._slice_index
        operations = []
        for flat_slice, partner_slice in zip(self._slices, self._partner_slices, strict=True):
            send = dist.P2POp(dist.isend, flat_slice, partner_rank, group=self._pair_group)
            receive = dist.P2POp(dist.irecv, partner_slice, partner_rank, group=self._pair_group)
            operations += [send, receive]
        # As one batch: a send and a receive in turn would deadlock with NCCL.
        pending_messages: list[Any] = dist.batch_isend_irecv(operations)
        return pending_messages

    @torch.no_grad()
    def _finish_round(self) -> None:
        """Overwrite the weights with the group's mean."""
        self.wait_for_messages()
        exchange, self._in_flight = self._in_flight, None
        if exchange is None:
            return
        if exchange.partner_slices:
            torch._foreach_add_(self._slices, exchange.partner_slices)
        torch._foreach_div_(self._slices, len(exchange.replicas))
        for buffer, flat_slice in zip(self._buffers, self._slices, strict=True):
            if self._num_slices > 1:
                # A clone, because the slice is part of the buffer that is written to.
                torch_names.all_gather_single(
                    buffer.flat, flat_slice.clone(), group=self._replica_group
                )
            buffer.unpack()

    def wait_for_messages(self) -> None:
        """Wait for messages in flight; the weights do not change."""
        if self._in_flight is not None:
            for work in self._in_flight.works:
                work.wait()
            self._in_flight.works = []

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds begun; messages in flight are sent again from the weights."""
        return {"round": self.num_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from loaded weights; every rank must call it.

        Args:
            state: Result of `state_dict`; round 0 if weights are equal on all ranks.
        """
        self.wait_for_messages()
        self._in_flight = None
        self.num_rounds = state["round"]
        if self._overlap and self.num_rounds > 0:
            self._start_round(self.num_rounds - 1)
