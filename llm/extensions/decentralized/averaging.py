"""Gossip: each rank averages its weights with a few others in each step, in changing groups.

x_i <- sum_j W_ij x_j - lr * d(x_i)   (overlap: the exchange runs while the gradient is computed)
x_i <- sum_j W_ij (x_j - lr * d(x_j)) (blocking)

as in D-PSGD (Lian et al. 2017, arXiv:1705.09056), with one group per rank and round, as in one-peer
exponential graphs (Ying et al. 2021, arXiv:2110.13363).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm.extensions.decentralized.modes import Gossip
from llm.parallel.buckets import Bucket, bucket_groups
from llm.runtime import torch_names


@dataclass
class _Exchange:
    """Messages in flight; for each bucket the buffer that receives a partner's slice of it."""

    works: list[Any]
    group: tuple[int, ...]
    incoming: list[Tensor]


class GossipAverager:
    """Averages replicas of the model by rounds; every rank calls it at the same steps.

    A replica may be trained by several ranks of one node. If each of them holds all of its weights,
    each exchanges an equal slice with its counterparts on other nodes, and an all-gather inside the
    node follows: weights cross the network between nodes once. If the replica's weights are
    sharded, each rank exchanges its shard.

    Buckets take memory for one more copy of the weights; pairs also need a copy of the incoming
    weights.

    Attributes:
        round: Number of rounds begun.

    Args:
        gossip: Which replicas average, and when.
        tensors: The weights that this rank holds, in the same order on all ranks.
        rank: Rank of this process.
        ranks_per_replica: Number of consecutive ranks that train one replica.
        sharded: Whether each of these ranks holds only a shard of the weights.
    """

    def __init__(
        self,
        gossip: Gossip,
        tensors: Sequence[Tensor],
        *,
        rank: int,
        ranks_per_replica: int = 1,
        sharded: bool = False,
    ) -> None:
        self.round = 0
        self._rounds = gossip.rounds
        self._replica, self._slice = divmod(rank, ranks_per_replica)
        self._ranks_per_replica = ranks_per_replica
        self._num_slices = 1 if sharded else ranks_per_replica
        self._overlap = gossip.overlap
        self._in_flight: _Exchange | None = None
        replicas = sum(map(len, gossip.rounds[0]))
        self._buckets: list[Bucket] = []
        if replicas == 1:
            return
        self._buckets = [
            Bucket(group, multiple_of=self._num_slices) for group in bucket_groups(tensors)
        ]
        flat_slice = 0 if sharded else self._slice
        self._slices = [bucket.flat.chunk(self._num_slices)[flat_slice] for bucket in self._buckets]
        self._incoming: list[Tensor] = []
        if any(len(group) == 2 for groups in gossip.rounds for group in groups):
            self._incoming = [torch.empty_like(flat_slice) for flat_slice in self._slices]
        self._make_groups(replicas)

    def _make_groups(self, replicas: int) -> None:
        """Make process groups; every rank must take part in making each of them.

        They are separate from the gradients' groups, so that messages do not wait for each other.
        """
        ranks = self._ranks_per_replica
        self._pairs = dist.new_group()
        # The first operation of a group must include all of its ranks: NCCL connects them then.
        dist.all_reduce(torch.zeros(1, device=self._buckets[0].flat.device), group=self._pairs)
        self._larger: dict[tuple[int, ...], Any] = {}
        for group in {group: None for groups in self._rounds for group in groups}:
            if len(group) <= 2:
                continue
            for number in range(ranks):
                process_group = dist.new_group([replica * ranks + number for replica in group])
                if number == self._slice and self._replica in group:
                    self._larger[group] = process_group
        if self._num_slices > 1:
            nodes = [[*range(first, first + ranks)] for first in range(0, replicas * ranks, ranks)]
            self._own_replica, _ = dist.new_subgroups_by_enumeration(nodes)

    def before_step(self) -> None:
        """Take the average of the exchange that ran during the gradient, if there is one."""
        self._finish_round()

    def after_step(self) -> None:
        """Exchange the updated weights."""
        self._start_round(self.round)
        self.round += 1
        if not self._overlap:
            self._finish_round()

    def _start_round(self, number: int) -> None:
        groups = self._rounds[number % len(self._rounds)]
        group = next(group for group in groups if self._replica in group)
        if len(group) == 1:
            return
        for bucket in self._buckets:
            bucket.fill()
        if len(group) == 2:
            (partner,) = set(group) - {self._replica}
            peer = partner * self._ranks_per_replica + self._slice
            messages = []
            for flat_slice, incoming in zip(self._slices, self._incoming, strict=True):
                messages.append(dist.P2POp(dist.isend, flat_slice, peer, group=self._pairs))
                messages.append(dist.P2POp(dist.irecv, incoming, peer, group=self._pairs))
            # As one batch: a send and a receive in turn would deadlock with NCCL.
            self._in_flight = _Exchange(dist.batch_isend_irecv(messages), group, self._incoming)
            return
        works = [
            dist.all_reduce(flat_slice, group=self._larger[group], async_op=True)
            for flat_slice in self._slices
        ]
        self._in_flight = _Exchange(works, group, [])

    @torch.no_grad()
    def _finish_round(self) -> None:
        """Overwrite the weights with the group's mean."""
        self.settle()
        exchange, self._in_flight = self._in_flight, None
        if exchange is None:
            return
        if exchange.incoming:
            torch._foreach_add_(self._slices, exchange.incoming)
        torch._foreach_div_(self._slices, len(exchange.group))
        for bucket, flat_slice in zip(self._buckets, self._slices, strict=True):
            if self._num_slices > 1:
                # A clone, because the slice is part of the buffer that is written to.
                torch_names.all_gather_single(
                    bucket.flat, flat_slice.clone(), group=self._own_replica
                )
            bucket.empty()

    def settle(self) -> None:
        """Wait for messages in flight; the weights do not change."""
        if self._in_flight is not None:
            for work in self._in_flight.works:
                work.wait()
            self._in_flight.works = []

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds begun; messages in flight are sent again from the weights."""
        return {"round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from loaded weights; every rank must call it.

        Args:
            state: Result of `state_dict`; round 0 if weights are equal on all ranks.
        """
        self.settle()
        self._in_flight = None
        self.round = state["round"]
        if self._overlap and self.round > 0:
            self._start_round(self.round - 1)
