"""Sums over the steps of a logging interval, kept on the device."""

from collections.abc import Callable
from typing import Any

import torch


class Meter:
    """Sums of the current logging interval and counts of the run, kept on the device.

    Nothing is read from the device until `read`. A step that was skipped because its
    gradient was not finite takes no part in the interval's loss.

    Args:
        device: Where the sums live.
        rank: Rank of this process.
    """

    _names = ("loss_sum", "num_tokens", "skipped_steps", "nan_steps", "grad_norm")
    """The numbers that a checkpoint takes along."""

    def __init__(self, device: torch.device, *, rank: int) -> None:
        self._rank = rank
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), dtype=dtype, device=device)
        self.num_tokens = torch.zeros((), dtype=dtype, device=device)
        self.skipped_steps = torch.zeros((), device=device)
        self.nan_steps = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)
        # Of steps that were not folded yet: whether this rank skipped them, and its norm was NaN.
        self._own: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        # Of steps that were not taken yet: whether any rank skipped them.
        self._flags: list[tuple[int, torch.Tensor]] = []

    def add(
        self,
        step: int,
        loss_sum: torch.Tensor,
        num_tokens: int,
        *,
        grad_norm: torch.Tensor,
        skipped: torch.Tensor,
    ) -> None:
        """Count one step.

        Args:
            step: Its number, counted from 0.
            loss_sum: Sum of this rank's token losses.
            num_tokens: Tokens of the step over all ranks.
            grad_norm: Norm of the step's gradient, of all ranks or of this rank's own.
            skipped: 1.0 if the step was skipped, else 0.0, on all ranks or on this one.
        """
        self.loss_sum += torch.where(skipped > 0, 0.0, loss_sum.to(self.loss_sum.dtype))
        self.num_tokens += num_tokens * (1.0 - skipped.to(self.num_tokens.dtype))
        self.grad_norm = grad_norm
        self._own.append((step, skipped, torch.isnan(grad_norm)))

    def pop_steps(self) -> list[tuple[int, bool]]:
        """The steps since the last call, after `all_reduce`, and whether any rank skipped them."""
        if not self._flags:
            return []
        steps, flags = zip(*self._flags, strict=True)
        self._flags = []
        return list(zip(steps, torch.stack(flags).tolist(), strict=True))

    def all_reduce(self, reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Bring the ranks' numbers together, so that they can be saved or read.

        The losses are summed on rank 0. Norms are averaged, and so are tokens: a rank that
        skipped a step alone leaves out its part of it. A step is skipped where any rank did so.

        Args:
            reduce_sum: Sums a tensor over all ranks.
        """
        dtype = self.loss_sum.dtype
        flags = [flag for _, skipped, nan in self._own for flag in (skipped, nan)]
        own = [torch.ones_like(self.loss_sum), self.loss_sum, self.num_tokens, self.grad_norm]
        total = reduce_sum(torch.stack([value.to(dtype) for value in [*own, *flags]]))
        ranks, loss_sum, num_tokens, grad_norm = total[:4]
        self.loss_sum = loss_sum if self._rank == 0 else torch.zeros_like(loss_sum)
        self.num_tokens = num_tokens / ranks
        self.grad_norm = (grad_norm / ranks).to(self.grad_norm.dtype)
        of_steps = total[4:].view(-1, 2) > 0
        self.skipped_steps += of_steps[:, 0].sum()
        self.nan_steps += of_steps[:, 1].sum()
        self._flags += [
            (step, flag) for (step, *_), flag in zip(self._own, of_steps[:, 0], strict=True)
        ]
        self._own = []

    def read(self) -> dict[str, float]:
        """The interval's loss and the run's counts, after `all_reduce`; starts a new interval."""
        values = torch.stack(
            [
                (self.loss_sum / self.num_tokens).double(),
                self.grad_norm.double(),
                self.skipped_steps.double(),
                self.nan_steps.double(),
            ]
        ).tolist()
        self.loss_sum = torch.zeros_like(self.loss_sum)
        self.num_tokens = torch.zeros_like(self.num_tokens)
        names = ("loss", "grad_norm", "skipped_steps", "nan_steps")
        return dict(zip(names, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The sums as plain numbers, after `all_reduce`."""
        return {name: float(getattr(self, name)) for name in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the sums that rank 0 saved."""
        for name in self._names:
            getattr(self, name).fill_(state[name])
        if self._rank != 0:
            self.loss_sum.zero_()
