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
        delay: Maximum number of calls until a flag of one rank is returned on all ranks.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks; more than one.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._num_rounds = (world_size - 1).bit_length()
        self.delay = 2 * self._num_rounds - 1
        self._round_index = self._num_rounds
        self._next_flags: torch.Tensor | None = None  # flags for the next exchange
        self._known_flags: torch.Tensor | None = None  # flags of the current exchange
        self._incoming_flags: torch.Tensor | None = None
        self._messages: list[Any] = []

    def reduce_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags of all ranks at the beginning of the exchange that ends with this call.

        Args:
            flags: The same number at each call; every rank must call it.

        Returns:
            The same on all ranks; all False at calls without the end of an exchange.
        """
        local_flags = torch.tensor([float(flag) for flag in flags])
        if self._next_flags is None:
            self._next_flags = local_flags
        else:
            self._next_flags = torch.maximum(self._next_flags, local_flags)
        self.wait_for_messages()
        if self._incoming_flags is not None and self._known_flags is not None:
            self._known_flags = torch.maximum(self._known_flags, self._incoming_flags)
        common_flags = [False] * len(flags)
        if self._round_index == self._num_rounds:
            if self._known_flags is not None:
                common_flags = [value > 0 for value in self._known_flags.tolist()]
            # A flag set during an exchange waits for the next one: all ranks must see it at the
            # same time.
            self._known_flags, self._next_flags, self._round_index = self._next_flags, None, 0
        self._start_round()
        return common_flags

    def _start_round(self) -> None:
        """Send the known flags to the rank of this round, and receive from another."""
        assert self._known_flags is not None
        distance = 2**self._round_index
        self._incoming_flags = torch.empty_like(self._known_flags)
        self._messages = [
            dist.isend(self._known_flags, (self._rank + distance) % self._world_size),
            dist.irecv(self._incoming_flags, (self._rank - distance) % self._world_size),
        ]
        self._round_index += 1

    def wait_for_messages(self) -> None:
        """Wait for messages in flight."""
        for message in self._messages:
            message.wait()
        self._messages = []
