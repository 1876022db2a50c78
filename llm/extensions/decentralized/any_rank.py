"""Flags that any rank may set and all ranks see at the same call, without an all-reduce.

With an all-reduce per step, every rank would wait for all others, and messages would pass through
all ranks in sequence: on a slow network this would take longer than the step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class FlagReducer:
    """Spreads flags in rounds, as a dissemination barrier does (Hensgen, Finkel and Manber 1988).

    In round k of log2(ranks), a rank sends all flags that it knows to the rank 2^k further, and
    receives flags from the rank 2^k before. After the last round all ranks know all flags. Each
    call is one round, so a message has the time of a step to arrive.

    Attributes:
        delay: Maximum calls between a flag and its answer.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks; more than one.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._rounds = (world_size - 1).bit_length()
        self.delay = 2 * self._rounds - 1
        self._round = self._rounds
        self._next: torch.Tensor | None = None  # flags for the next exchange
        self._known: torch.Tensor | None = None  # flags of the current exchange
        self._incoming: torch.Tensor | None = None
        self._in_flight: list[Any] = []

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags of all ranks at the beginning of the exchange that ends with this call.

        Args:
            flags: The same number at each call; every rank must call it.

        Returns:
            The same on all ranks; all False at calls without the end of an exchange.
        """
        local = torch.tensor([float(flag) for flag in flags])
        self._next = local if self._next is None else torch.maximum(self._next, local)
        self.settle()
        if self._incoming is not None and self._known is not None:
            self._known = torch.maximum(self._known, self._incoming)
        answer = [False] * len(flags)
        if self._round == self._rounds:
            if self._known is not None:
                answer = [value > 0 for value in self._known.tolist()]
            # A flag set during an exchange waits for the next one: all ranks must see it at the
            # same time.
            self._known, self._next, self._round = self._next, None, 0
        assert self._known is not None
        distance = 2**self._round
        self._incoming = torch.empty_like(self._known)
        self._in_flight = [
            dist.isend(self._known, (self._rank + distance) % self._world_size),
            dist.irecv(self._incoming, (self._rank - distance) % self._world_size),
        ]
        self._round += 1
        return answer

    def settle(self) -> None:
        """Wait for messages in flight."""
        for work in self._in_flight:
            work.wait()
        self._in_flight = []
