"""Sums over the steps of a logging interval, kept on the device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_COUNTS = ("num_tokens", "skipped_steps", "nan_steps", "grad_norm")
"""The numbers in a checkpoint, except the sums."""


class Meter:
    """Sums of the current logging interval and counts of the run, kept on the device.

    Nothing is read from the device until `read`. Steps skipped because of an infinite gradient or
    NaN do not count in the interval's loss.

    Args:
        device: Device of the sums.
        rank: Rank of this process.
        sources: Names of the data sources for per-source sums.
        z_loss: Whether the run has a z-loss.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rank: int,
        sources: Sequence[str] = (),
        z_loss: bool = False,
    ) -> None:
        self._rank, self._sources, self._z_loss = rank, sources, z_loss
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # Sums of token losses and z-losses, then per-source token losses and labels.
        self.sums = torch.zeros(2 + 2 * len(sources), dtype=dtype, device=device)
        self.num_tokens = torch.zeros((), dtype=dtype, device=device)
        self.skipped_steps = torch.zeros((), device=device)
        self.nan_steps = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)
        # Steps since the last all-reduce: whether this rank skipped the step, whether its norm was
        # NaN, its sum of token losses, and the tokens of all ranks.
        self._own: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, int]] = []
        # All-reduced steps since the last `pop_steps`: whether any rank skipped the step, and its
        # loss.
        self._steps: list[tuple[int, torch.Tensor]] = []

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
            loss_sum: Sum of this rank's token losses; with sources, per-source sums and numbers of
                labels [2, num_sources].
            num_tokens: Tokens of the step over all ranks.
            grad_norm: Norm of the step's gradient, global or on this rank.
            skipped: 1.0 if the step was skipped, else 0.0; global or on this rank.
            z_loss_sum: Sum of this rank's z-losses, if the run has them.
        """
        total = loss_sum[0].sum() if self._sources else loss_sum
        sums = torch.stack([total, torch.zeros_like(total) if z_loss_sum is None else z_loss_sum])
        if self._sources:
            sums = torch.cat([sums, loss_sum.T.flatten()])
        self.sums += torch.where(skipped > 0, 0.0, sums.to(self.sums.dtype))
        self.num_tokens += num_tokens * (1.0 - skipped.to(self.num_tokens.dtype))
        self.grad_norm = grad_norm
        self._own.append((step, skipped, torch.isnan(grad_norm), total, num_tokens))

    def pop_steps(self) -> list[tuple[int, bool, float]]:
        """Return the all-reduced steps since the last call.

        Returns:
            For each step its number, whether any rank skipped it, and its mean loss per token.
        """
        if not self._steps:
            return []
        steps, values = zip(*self._steps, strict=True)
        self._steps = []
        read = torch.stack(values).tolist()
        return [
            (step, skipped > 0, loss) for step, (skipped, loss) in zip(steps, read, strict=True)
        ]

    def all_reduce(self, reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """All-reduce the numbers so that they can be saved or read.

        Losses are summed on rank 0. Norms and tokens are averaged: if only one rank skipped a step,
        only its tokens are left out. A step counts as skipped if any rank skipped it. The losses of
        single steps follow in a second message.

        Args:
            reduce_sum: Sums a tensor over all ranks.
        """
        dtype = self.sums.dtype
        flags = [flag for _, skipped, nan, *_ in self._own for flag in (skipped, nan)]
        own = [torch.ones_like(self.num_tokens), *self.sums, self.num_tokens, self.grad_norm]
        total = reduce_sum(torch.stack([value.to(dtype) for value in [*own, *flags]]))
        ranks, sums, means, of_steps = total.split([1, len(self.sums), 2, len(flags)])
        self.sums = sums if self._rank == 0 else torch.zeros_like(sums)
        self.num_tokens, grad_norm = means / ranks
        self.grad_norm = grad_norm.to(self.grad_norm.dtype)
        of_steps = of_steps.view(-1, 2) > 0
        self.skipped_steps += of_steps[:, 0].sum()
        self.nan_steps += of_steps[:, 1].sum()
        if self._own:
            # A separate message: together with other values, the sums above could round
            # differently.
            losses = [loss_sum.to(dtype) / num_tokens for *_, loss_sum, num_tokens in self._own]
            values = torch.stack([of_steps[:, 0].to(dtype), reduce_sum(torch.stack(losses))], dim=1)
            self._steps += [
                (step, row) for (step, *_), row in zip(self._own, values.unbind(), strict=True)
            ]
        self._own = []

    def read(self) -> dict[str, float]:
        """Return the interval's loss and the run's counts, and start a new interval.

        Call it after `all_reduce`. The host waits for the device here, once for all numbers.
        Sources without samples are left out.
        """
        numbers = torch.stack([self.grad_norm, self.skipped_steps, self.nan_steps])
        values = torch.cat([self.sums[:2] / self.num_tokens, numbers, self.sums[2:]]).tolist()
        self.sums = torch.zeros_like(self.sums)
        self.num_tokens = torch.zeros_like(self.num_tokens)
        names = ("loss", "z_loss", "grad_norm", "skipped_steps", "nan_steps")
        result = dict(zip(names, values, strict=False))
        if not self._z_loss:
            del result["z_loss"]
        for source, loss, labels in zip(self._sources, values[5::2], values[6::2], strict=True):
            if labels:
                result[f"loss/{source}"] = loss / labels
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain numbers, after `all_reduce`."""
        loss_sum, z_loss_sum, *by_source = self.sums.tolist()
        state: dict[str, Any] = {"loss_sum": loss_sum, "z_loss_sum": z_loss_sum}
        state |= {name: float(getattr(self, name)) for name in _COUNTS}
        if self._sources:
            state["by_source"] = {
                source: by_source[2 * number : 2 * number + 2]
                for number, source in enumerate(self._sources)
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the sums that rank 0 saved."""
        for name in _COUNTS:
            getattr(self, name).fill_(state[name])
        self.sums.zero_()
        if self._rank != 0:
            return  # otherwise the next all-reduce would add rank 0's sums once per rank
        # Missing if the previous start did not have the option, or had other sources.
        saved = state.get("by_source", {})
        by_source = [value for name in self._sources for value in saved.get(name, (0.0, 0.0))]
        sums = [state["loss_sum"], state["z_loss_sum"], *by_source]
        self.sums.copy_(torch.tensor(sums, dtype=self.sums.dtype))
