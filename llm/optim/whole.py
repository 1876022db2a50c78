"""Matrices that an optimizer updates as a whole, and which rank does so."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llm.optim.adamw import adamw_state, adamw_step
from llm.optim.fused import Fusion


@dataclass(eq=False, kw_only=True)
class Unit:
    """Parameters that one rank updates together: a matrix, with K-FAC also its bias.

    Attributes:
        parameters: The matrix first. Where weights are sharded, this rank's shards.
        shapes: Their whole shapes.
        fusion: How the weight divides into matrices.
        cost: What owners are balanced by: elements of the state, with which the work grows.
        owner: The rank that keeps the state and computes the update; None if every rank does.
    """

    parameters: list[nn.Parameter]
    shapes: list[torch.Size]
    fusion: Fusion
    cost: float
    owner: int | None = None

    @property
    def weight(self) -> nn.Parameter:
        """Return the matrix, or this rank's shard of it."""
        return self.parameters[0]


Compute = Callable[[Unit, list[Tensor]], list[Tensor]]
"""From whole gradients of a unit's parameters to the whole updates."""


@dataclass(frozen=True, kw_only=True)
class FactorRanks:
    """The ranks that share the factors of some layers.

    Attributes:
        rank: Number of this rank among them.
        size: Number of ranks.
        is_first: Whether this is the first of the ranks that count the same failures.
        group: Their process group; None for the default one, or one rank.
        num_replicas: Number of such groups that keep the same factors.
        replicas: This rank and those of the same number in these; None for one.
    """

    rank: int
    size: int
    is_first: bool
    group: dist.ProcessGroup | None = None
    num_replicas: int = 1
    replicas: dist.ProcessGroup | None = None


class WholeMatrices:
    """Every rank holds whole matrices and computes all updates.

    The layouts that shard weights have a subclass of their own, in `llm.parallel.matrices`.

    Attributes:
        factor_ranks: Where K-FAC sums and keeps its factors; None for the default group.
    """

    factor_ranks: FactorRanks | None = None

    def assign(self, units: Sequence[Unit]) -> None:
        """Give each unit an owner."""

    def owns(self, unit: Unit) -> bool:
        """Return whether this rank keeps the state of a unit."""
        return True

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of values over the ranks that share the units, of which one has each."""
        return values

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of values over all ranks that hold different parameters or shards."""
        return values

    def local(self, parameter: Tensor) -> Tensor:
        """Return what the optimizer updates of a parameter of the model."""
        return parameter

    def updates(
        self, units: Sequence[Unit], compute: Compute, *, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[Unit, list[Tensor]]]:
        """Yield the units that have gradients, with the updates of their parameters.

        Args:
            units: The units; the same on all ranks, in the same order.
            compute: Called by the owner.
            dtype: Type of the updates, where they are sent.
        """
        for unit in units:
            gradients = gradients_of(unit.parameters)
            if gradients is not None:
                yield unit, compute(unit, gradients)


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer that updates some matrices as a whole, and trains the rest by fused AdamW.

    Like torch's fused optimizers it reads `found_inf` on the device, where it is set: where it is
    1, weights and state stay as they are.

    Attributes:
        units: The matrices.
        found_inf: 1.0 where the next step is skipped, else 0.0; None: no step is.
    """

    units: list[Unit]
    found_inf: Tensor | None = None

    def _add_adamw_state(self) -> None:
        """Add the state of all parameters that have none."""
        self.state.update({p: adamw_state(p) for p in groups_of(self) if p not in self.state})

    def _step_adamw(self) -> None:
        """Update all parameters that are in no unit."""
        matrices = {p for unit in self.units for p in unit.parameters}
        for group in self.param_groups:
            others = [p for p in group["params"] if p not in matrices]
            adamw_step(group, others, self.state, self.found_inf)

    def _overwrite(self, tensor: Tensor, values: Tensor) -> None:
        """Copy new values into a weight or a state, but where the step is skipped."""
        if self.found_inf is not None:
            values = torch.where(self.found_inf > 0, tensor, values)
        tensor.copy_(values)


def units_of(optimizer: torch.optim.Optimizer) -> Sequence[Unit]:
    """Return the units whose state an optimizer keeps whole, at their owners; most have none."""
    return optimizer.units if isinstance(optimizer, MatrixOptimizer) else ()


def groups_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Return the group of each parameter."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the gradients of a weight and its bias, zeros if the bias has none.

    Returns:
        None if the weight has no gradient.
    """
    if parameters[0].grad is None:
        return None
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
