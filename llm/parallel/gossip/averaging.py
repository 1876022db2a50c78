"""Gossip: ranks average their weights with a few others in each step, and with others in the next.

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

from llm.parallel.gossip.buckets import BUCKET_BYTES, Bucket, make_buckets
from llm.parallel.gossip.rounds import Round


@dataclass
class _Exchange:
    """Messages that are under way; for each bucket, the buffer that the partner's part comes to."""

    works: list[Any]
    group: tuple[int, ...]
    incoming: list[Tensor]


class GossipAverager:
    """Mixes weights by rounds; every rank makes one and calls it at the same steps.

    What averages are replicas of the model. One may be spread over several ranks, those of a node,
    that hold the same weights at all times: each of them then exchanges an equal part with its
    counterparts, so that the weights cross the network between nodes once, and collects the rest
    inside its node. If they are divided over the node's ranks, each
    exchanges its part. Messages take memory for one more copy of the weights, and where pairs
    average for another one of what comes in.

    Attributes:
        round: Number of rounds that were begun.

    Args:
        tensors: The weights, in an order that is the same on all ranks.
        rounds: Who averages with whom: numbers of replicas.
        rank: Rank of this process.
        ranks_per_replica: How many ranks in a row hold the same weights.
        divided: Whether each of these holds a part of the weights, in place of all of them.
        overlap: Whether an exchange goes on until the next step.
        bucket_bytes: About how much a message holds.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        rounds: Sequence[Round],
        rank: int,
        ranks_per_replica: int = 1,
        divided: bool = False,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.round = 0
        self._rounds = rounds
        self._replica, self._part = divmod(rank, ranks_per_replica)
        self._ranks_per_replica = ranks_per_replica
        self._shared_out = 1 if divided else ranks_per_replica
        self._overlap = overlap
        self._under_way: _Exchange | None = None
        replicas = sum(map(len, rounds[0]))
        self._buckets: list[Bucket] = []
        if replicas == 1:
            return
        self._buckets = make_buckets(
            tensors, bucket_bytes=bucket_bytes, multiple_of=self._shared_out
        )
        part = 0 if divided else self._part
        self._parts = [bucket.flat.chunk(self._shared_out)[part] for bucket in self._buckets]
        self._incoming: list[Tensor] = []
        if any(len(group) == 2 for groups in rounds for group in groups):
            self._incoming = [torch.empty_like(part) for part in self._parts]
        self._make_groups(replicas)

    def _make_groups(self, replicas: int) -> None:
        """Process groups of their own: what they send waits for nothing else. All ranks join in."""
        each = self._ranks_per_replica
        self._pairs = dist.new_group()
        # A group's first message shall not be one that only some of its ranks take part in.
        dist.all_reduce(torch.zeros(1, device=self._buckets[0].flat.device), group=self._pairs)
        self._larger: dict[tuple[int, ...], Any] = {}
        for group in {group: None for groups in self._rounds for group in groups}:
            if len(group) <= 2:
                continue
            for part in range(each):
                made = dist.new_group([replica * each + part for replica in group])
                if part == self._part and self._replica in group:
                    self._larger[group] = made
        if self._shared_out > 1:
            for replica in range(replicas):
                made = dist.new_group(list(range(replica * each, (replica + 1) * each)))
                if replica == self._replica:
                    self._own_replica = made

    def before_step(self) -> None:
        """Take the averages of the exchange that ran beside the gradient, if there was one."""
        self._finish()

    def after_step(self) -> None:
        """Exchange the weights that a step has left."""
        self._begin(self.round)
        self.round += 1
        if not self._overlap:
            self._finish()

    def _begin(self, number: int) -> None:
        groups = self._rounds[number % len(self._rounds)]
        group = next(group for group in groups if self._replica in group)
        if len(group) == 1:
            return
        for bucket in self._buckets:
            bucket.fill()
        if len(group) == 2:
            (other,) = set(group) - {self._replica}
            works = self._exchange(other * self._ranks_per_replica + self._part)
            self._under_way = _Exchange(works, group, self._incoming)
            return
        works = [
            dist.all_reduce(part, group=self._larger[group], async_op=True) for part in self._parts
        ]
        self._under_way = _Exchange(works, group, [])

    def _exchange(self, peer: int) -> list[Any]:
        messages = []
        for part, incoming in zip(self._parts, self._incoming, strict=True):
            messages.append(dist.P2POp(dist.isend, part, peer, group=self._pairs))
            messages.append(dist.P2POp(dist.irecv, incoming, peer, group=self._pairs))
        works: list[Any] = dist.batch_isend_irecv(messages)
        return works

    @torch.no_grad()
    def _finish(self) -> None:
        """Put the group's mean in the place of the weights."""
        self.settle()
        exchange, self._under_way = self._under_way, None
        if exchange is None:
            return
        if exchange.incoming:
            torch._foreach_add_(self._parts, exchange.incoming)
        torch._foreach_div_(self._parts, len(exchange.group))
        for bucket, part in zip(self._buckets, self._parts, strict=True):
            if self._shared_out > 1:
                dist.all_gather_into_tensor(bucket.flat, part.clone(), group=self._own_replica)
            bucket.empty()

    def settle(self) -> None:
        """Wait for messages that are under way; the weights stay as they are."""
        if self._under_way is not None:
            for work in self._under_way.works:
                work.wait()
            self._under_way.works = []

    def state_dict(self) -> dict[str, Any]:
        """The number of rounds begun. What is under way can be sent again from the weights."""
        return {"round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from loaded weights; every rank must call it.

        Args:
            state: What `state_dict` gave; round 0 for weights that are equal on all ranks.
        """
        self.settle()
        self._under_way = None
        self.round = state["round"]
        if self._overlap and self.round > 0:
            self._begin(self.round - 1)
