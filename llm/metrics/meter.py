"""Sums over the steps of a logging interval, kept on the device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from llm.runtime.float32 import sums_dtype

_SAVED_COUNTERS = ("num_tokens", "skipped_steps", "nan_steps", "grad_norm")
"""The numbers in a checkpoint, except the sums."""


class _LocalStep(NamedTuple):
    """A step on this rank.

    Attributes:
        step: Number of the step, counted from 0.
        is_skipped: 1.0 if this rank skipped the step, else 0.0.
        is_nan: Whether the norm of its gradient was NaN.
        loss_sum: Its sum of token losses.
        num_tokens: Tokens of the step over all ranks.
    """

    step: int
    is_skipped: torch.Tensor
    is_nan: torch.Tensor
    loss_sum: torch.Tensor
    num_tokens: int


class Meter:
    """Sums of the current logging interval and counts of the run, kept on the device.

    Nothing is read from the device until `read`. Steps skipped because of an infinite gradient or
    NaN do not count in the interval's loss.

    Args:
        device: Device of the sums.
        names: Names of the sums of a step, the loss first. A sum NAME is divided by the sum #NAME
            if there is one, else by the tokens of the interval.
        rank: Rank of this process.
    """

    def __init__(
        self, device: torch.device, names: Sequence[str] = ("loss",), *, rank: int
    ) -> None:
        self._rank, self._names = rank, names
        self._names_with_count = [name for name in names if f"#{name}" in names]
        dtype = sums_dtype(device)
        self.sums = torch.zeros(len(names), dtype=dtype, device=device)
        self.num_tokens = torch.zeros((), dtype=dtype, device=device)
        self.skipped_steps = torch.zeros((), device=device)
        self.nan_steps = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)
        # Steps since the last all-reduce.
        self._local_steps: list[_LocalStep] = []
        # All-reduced steps since the last `pop_steps`: whether any rank skipped the step, and its
        # loss.
        self._reduced_steps: list[tuple[int, torch.Tensor]] = []

    def add(
        self,
        step: int,
        sums: torch.Tensor,
        num_tokens: int,
        *,
        grad_norm: torch.Tensor,
        skipped: torch.Tensor,
    ) -> None:
        """Add the sums and the gradient norm of one step.

        Args:
            step: Number of the step, counted from 0.
            sums: This rank's sums, by name.
            num_tokens: Tokens of the step over all ranks.
            grad_norm: Norm of the step's gradient, global or on this rank.
            skipped: 1.0 if the step was skipped, else 0.0; global or on this rank.
        """
        self.sums += torch.where(skipped > 0, 0.0, sums.to(self.sums.dtype))
        self.num_tokens += num_tokens * (1.0 - skipped.to(self.num_tokens.dtype))
        self.grad_norm = grad_norm
        self._local_steps.append(
            _LocalStep(
                step=step,
                is_skipped=skipped,
                is_nan=torch.isnan(grad_norm),
                loss_sum=sums[0],
                num_tokens=num_tokens,
            )
        )

    def pop_steps(self) -> list[tuple[int, bool, float]]:
        """Return and forget the all-reduced steps since the last call.

        Returns:
            For each step its number, whether any rank skipped it, and its mean loss per token.
        """
        if not self._reduced_steps:
            return []
        steps, step_values = zip(*self._reduced_steps, strict=True)
        self._reduced_steps = []
        skipped_and_losses = torch.stack(step_values).tolist()  # one wait for the device
        return [
            (step, num_skipped > 0, loss)
            for step, (num_skipped, loss) in zip(steps, skipped_and_losses, strict=True)
        ]

    def all_reduce(self, reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """All-reduce the sums and counts, so that they can be saved or read.

        Losses are summed on rank 0. Norms and tokens are averaged: if only one rank skipped a step,
        only its tokens are left out. A step counts as skipped if any rank skipped it. The losses of
        single steps follow in a second message.

        Args:
            reduce_sum: Sums a tensor over all ranks.
        """
        dtype = self.sums.dtype
        flags = [flag for step in self._local_steps for flag in (step.is_skipped, step.is_nan)]
        # All numbers are sent as one tensor; the ones add up to the number of ranks.
        rank_count = torch.ones_like(self.num_tokens)
        message_parts = [rank_count, *self.sums, self.num_tokens, self.grad_norm, *flags]
        totals = reduce_sum(torch.stack([value.to(dtype) for value in message_parts]))
        num_ranks, sums, mean_totals, step_flags = totals.split([1, len(self.sums), 2, len(flags)])
        self.sums = sums if self._rank == 0 else torch.zeros_like(sums)
        self.num_tokens, grad_norm = mean_totals / num_ranks
        self.grad_norm = grad_norm.to(self.grad_norm.dtype)
        step_flags = step_flags.view(-1, 2) > 0
        self.skipped_steps += step_flags[:, 0].sum()
        self.nan_steps += step_flags[:, 1].sum()
        if self._local_steps:
            self._reduce_step_losses(reduce_sum, is_skipped=step_flags[:, 0])
        self._local_steps = []

    def _reduce_step_losses(
        self, reduce_sum: Callable[[torch.Tensor], torch.Tensor], *, is_skipped: torch.Tensor
    ) -> None:
        """All-reduce the losses of single steps, for `pop_steps`.

        This is a separate message: together with other values, their sums could round differently.

        Args:
            reduce_sum: Sums a tensor over all ranks.
            is_skipped: Whether any rank skipped each step, bool [num_steps].
        """
        dtype = self.sums.dtype
        local_losses = [step.loss_sum.to(dtype) / step.num_tokens for step in self._local_steps]
        losses = reduce_sum(torch.stack(local_losses))
        flags_and_losses = torch.stack([is_skipped.to(dtype), losses], dim=1)
        steps = [local_step.step for local_step in self._local_steps]
        self._reduced_steps += zip(steps, flags_and_losses.unbind(), strict=True)

    def read(self) -> dict[str, float]:
        """Return the means of the logging interval and the counts of the run; begin a new interval.

        Call it after `all_reduce`. The host waits for the device here, once for all numbers. Means
        of nothing, such as the loss of a source without samples, are left out.
        """
        run_values = torch.stack([self.grad_norm, self.skipped_steps, self.nan_steps])
        values = torch.cat([run_values, self.sums / self.num_tokens, self.sums]).tolist()
        grad_norm, skipped_steps, nan_steps, *means_and_sums = values
        self.sums = torch.zeros_like(self.sums)
        self.num_tokens = torch.zeros_like(self.num_tokens)
        num_names = len(self._names)
        mean_by_name = dict(zip(self._names, means_and_sums[:num_names], strict=True))
        sum_by_name = dict(zip(self._names, means_and_sums[num_names:], strict=True))
        self._divide_by_counts(mean_by_name, sum_by_name)
        return {
            **mean_by_name,
            "grad_norm": grad_norm,
            "skipped_steps": skipped_steps,
            "nan_steps": nan_steps,
        }

    def _divide_by_counts(
        self, mean_by_name: dict[str, float], sum_by_name: Mapping[str, float]
    ) -> None:
        """Replace the means of sums with a count, such as `loss/web`, by the sum per count.

        Args:
            mean_by_name: Means per token of the interval; changed. Counts, and means of nothing,
                are removed.
            sum_by_name: The sums and the counts, which are named `#loss/web`.
        """
        for name in self._names_with_count:
            count = sum_by_name[f"#{name}"]
            del mean_by_name[f"#{name}"]
            if count:
                mean_by_name[name] = sum_by_name[name] / count
            else:
                del mean_by_name[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain numbers, after `all_reduce`.

        A sum with a count is saved with it in `by_source`, others as NAME_sum.
        """
        sums = dict(zip(self._names, self.sums.tolist(), strict=True))
        by_source = {
            _source_name(name): [sums.pop(name), sums.pop(f"#{name}")]
            for name in self._names_with_count
        }
        state: dict[str, Any] = {f"{name}_sum": value for name, value in sums.items()}
        state |= {name: float(getattr(self, name)) for name in _SAVED_COUNTERS}
        return state | ({"by_source": by_source} if by_source else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the sums that rank 0 saved."""
        for name in _SAVED_COUNTERS:
            getattr(self, name).fill_(state[name])
        self.sums.zero_()
        if self._rank != 0:
            return  # otherwise the next all-reduce would add rank 0's sums once per rank
        # Missing if the previous start had other sums.
        sums = {name: state.get(f"{name}_sum", 0.0) for name in self._names}
        by_source = state.get("by_source", {})
        for name in self._names_with_count:
            sums[name], sums[f"#{name}"] = by_source.get(_source_name(name), (0.0, 0.0))
        self.sums.copy_(torch.tensor([*sums.values()], dtype=self.sums.dtype))


def _source_name(name: str) -> str:
    """Return the key in a checkpoint of a sum with a count: of loss/web it is web."""
    return name.removeprefix("loss/")
