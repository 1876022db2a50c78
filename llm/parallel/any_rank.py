"""Flags that any rank may set and all hear of at the same call, told from rank to rank.

An all-reduce would have each rank wait for every other one in each step, over as many messages in
a row as there are ranks: on a slow network it would take longer than the step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class FlagReducer:
    """Spreads flags in turns, as in a dissemination barrier (Hensgen, Finkel and Manber 1988).

    In turn k of log2(ranks), a rank tells the one 2^k further what it has heard of, and listens to
    the one 2^k before: after the last turn all have heard of all. Each call is a turn, so that a
    message has the time of a step to arrive.

    Attributes:
        delay: The most calls between a flag and its answer.

    Args:
        rank: Of this process.
        world_size: Number of ranks; more than one.
        group: Of all ranks, for tensors on the host.
    """

    def __init__(self, *, rank: int, world_size: int, group: Any) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._turns = (world_size - 1).bit_length()
        self.delay = 2 * self._turns - 1
        self._turn = self._turns
        self._asked: torch.Tensor | None = None
        self._heard: torch.Tensor | None = None
        self._incoming: torch.Tensor | None = None
        self._under_way: list[Any] = []

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags any rank had set when the exchange began that ends with this call.

        Args:
            flags: Always as many; every rank must call it.

        Returns:
            The same on all ranks; none are set where no exchange ends.
        """
        own = torch.tensor([float(flag) for flag in flags])
        self._asked = own if self._asked is None else torch.maximum(self._asked, own)
        self._listen()
        answer = [False] * len(flags)
        if self._turn == self._turns:
            if self._heard is not None:
                answer = [value > 0 for value in self._heard.tolist()]
            self._heard, self._asked, self._turn = self._asked, None, 0
        self._tell()
        return answer

    def settle(self) -> None:
        """Wait for messages that are under way."""
        for work in self._under_way:
            work.wait()
        self._under_way = []

    def _listen(self) -> None:
        """Take in what the last call's message says."""
        self.settle()
        if self._incoming is not None and self._heard is not None:
            self._heard = torch.maximum(self._heard, self._incoming)

    def _tell(self) -> None:
        assert self._heard is not None
        distance = 2**self._turn
        self._incoming = torch.empty_like(self._heard)
        self._under_way = [
            dist.isend(self._heard, (self._rank + distance) % self._world_size, self._group),
            dist.irecv(self._incoming, (self._rank - distance) % self._world_size, self._group),
        ]
        self._turn += 1
