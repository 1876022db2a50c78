"""Sums over the steps of a logging interval, kept on the device."""

from collections.abc import Callable
from typing import Any

import torch


class Meter:
    """Sums of the current logging interval and counts of the run, kept on the device.

    Nothing is read from the device until `read`. A step that was skipped because its gradient was
    not finite is left out of the interval's loss.

    Args:
        device: Device of the sums.
        rank: Rank of this process.
    """

    _names = ("loss_sum", "z_loss_sum", "num_tokens", "skipped_steps", "nan_steps", "grad_norm")
    """The numbers that a checkpoint holds."""

    def __init__(self, device: torch.device, *, rank: int) -> None:
        self._rank = rank
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), dtype=dtype, device=device)
        self.z_loss_sum = torch.zeros((), dtype=dtype, device=device)
        self.num_tokens = torch.zeros((), dtype=dtype, device=device)
        self.skipped_steps = torch.zeros((), device=device)
        self.nan_steps = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)
        # Steps before the next all-reduce: whether this rank skipped them, and its norm was NaN.
        self._own: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        # All-reduced steps before the next `pop_steps`: whether any rank skipped them.
        self._flags: list[tuple[int, torch.Tensor]] = []

    def add(
        self,
        step: int,
        loss_sum: torch.Tensor,
        num_tokens: int,
        *,
        grad_norm: torch.Tensor,
        skipped: torch.Tensor,
        z_loss_sum: torch.Tensor | None = None,
    ) -> None:
        """Count one step.

        Args:
            step: Number of the step, counted from 0.
            loss_sum: Sum of this rank's token losses.
            num_tokens: Tokens of the step over all ranks.
            grad_norm: Norm of the step's gradient, of all ranks or of this rank's own.
            skipped: 1.0 if the step was skipped, else 0.0, on all ranks or on this one.
            z_loss_sum: Sum of this rank's z-losses, if the run has them.
        """
        self.loss_sum += torch.where(skipped > 0, 0.0, loss_sum.to(self.loss_sum.dtype))
        if z_loss_sum is not None:
            self.z_loss_sum += torch.where(skipped > 0, 0.0, z_loss_sum.to(self.loss_sum.dtype))
        self.num_tokens += num_tokens * (1.0 - skipped.to(self.num_tokens.dtype))
        self.grad_norm = grad_norm
        self._own.append((step, skipped, torch.isnan(grad_norm)))

    def pop_steps(self) -> list[tuple[int, bool]]:
        """Return the all-reduced steps since the last call, and whether any rank skipped each."""
        if not self._flags:
            return []
        steps, flags = zip(*self._flags, strict=True)
        self._flags = []
        return list(zip(steps, torch.stack(flags).tolist(), strict=True))

    def all_reduce(self, reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """All-reduce the numbers in one message, so that they can be saved or read.

        The losses are summed on rank 0. Norms and tokens are averaged: a rank that skipped a step
        alone leaves out its own tokens only. A step counts as skipped if any rank skipped it.

        Args:
            reduce_sum: Sums a tensor over all ranks.
        """
        dtype = self.loss_sum.dtype
        flags = [flag for _, skipped, nan in self._own for flag in (skipped, nan)]
        losses = [self.loss_sum, self.z_loss_sum]
        own = [torch.ones_like(self.loss_sum), *losses, self.num_tokens, self.grad_norm]
        total = reduce_sum(torch.stack([value.to(dtype) for value in [*own, *flags]]))
        ranks, loss_sum, z_loss_sum, num_tokens, grad_norm = total[:5]
        self.loss_sum = loss_sum if self._rank == 0 else torch.zeros_like(loss_sum)
        self.z_loss_sum = z_loss_sum if self._rank == 0 else torch.zeros_like(z_loss_sum)
        self.num_tokens = num_tokens / ranks
        self.grad_norm = (grad_norm / ranks).to(self.grad_norm.dtype)
        of_steps = total[5:].view(-1, 2) > 0
        self.skipped_steps += of_steps[:, 0].sum()
        self.nan_steps += of_steps[:, 1].sum()
        self._flags += [
            (step, flag) for (step, *_), flag in zip(self._own, of_steps[:, 0], strict=True)
        ]
        self._own = []

    def read(self) -> dict[str, float]:
        """Return the interval's loss and the run's counts, and start a new interval.

        Call it after `all_reduce`. The host waits for the device here, once for all numbers.
        """
        values = torch.stack(
            [
                (self.loss_sum / self.num_tokens).double(),
                (self.z_loss_sum / self.num_tokens).double(),
                self.grad_norm.double(),
                self.skipped_steps.double(),
                self.nan_steps.double(),
            ]
        ).tolist()
        self.loss_sum = torch.zeros_like(self.loss_sum)
        self.z_loss_sum = torch.zeros_like(self.z_loss_sum)
        self.num_tokens = torch.zeros_like(self.num_tokens)
        names = ("loss", "z_loss", "grad_norm", "skipped_steps", "nan_steps")
        return dict(zip(names, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain numbers, after `all_reduce`."""
        return {name: float(getattr(self, name)) for name in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the sums that rank 0 saved."""
        for name in self._names:
            getattr(self, name).fill_(state.get(name, 0.0))  # older checkpoints lack some
        if self._rank != 0:  # else the next all-reduce would add rank 0's loss once for each rank
            self.loss_sum.zero_()
            self.z_loss_sum.zero_()
