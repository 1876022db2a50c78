"""Ownership of whole matrices in optimizers."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llm.extensions.matrix_optim.fused import Fusion
from llm.optim.adamw_and_sgd import adamw_state, adamw_step


@dataclass(eq=False, kw_only=True)
class Unit:
    """Parameters that one rank updates together: a matrix, and with K-FAC its bias.

    Attributes:
        parameters: The parameters, or this rank's shards; the matrix comes first.
        shapes: Shapes of the whole parameters.
        fusion: How the weight divides into matrices.
        cost: Number of state elements; owners are balanced by it because work grows with it.
        owner: The rank that keeps the state and computes the update; None if every rank does.
        kind: Distinguishes units of equal shapes in an optimizer.
        is_divisible: Whether the weight is a stack of matrices [matrices, rows, columns] that do
            not need each other: a rank with some of them whole updates these by itself.
    """

    parameters: list[nn.Parameter]
    shapes: list[torch.Size]
    fusion: Fusion
    cost: float
    owner: int | None = None
    kind: Hashable = None
    is_divisible: bool = False

    @property
    def weight(self) -> nn.Parameter:
        """Return the matrix, or this rank's shard of it."""
        return self.parameters[0]


ComputeUpdates = Callable[[Sequence[Unit], list[Tensor]], list[Tensor]]
"""Computes whole updates of equal units from the whole gradients [units, ...] of their first,
second, ... parameters, stacked in the same way."""

Updates = list[tuple[Unit, list[Tensor]]]
"""Units with the updates of their parameters, or with this rank's shards of these."""


@dataclass(frozen=True, kw_only=True)
class FactorRanks:
    """The ranks that share the factors of some layers.

    Attributes:
        rank: Number of this rank among them.
        size: Number of ranks.
        counts_failures: Whether this is the first of the ranks that count the same failures.
        group: Their process group; None for the default group, or one rank.
        num_replicas: Number of such groups that keep the same factors.
        replicas: This rank and the ranks with the same number in these groups; None for one group.
    """

    rank: int
    size: int
    counts_failures: bool
    group: dist.ProcessGroup | None = None
    num_replicas: int = 1
    replicas: dist.ProcessGroup | None = None


class MatrixOwners:
    """Every rank holds whole matrices and computes all updates.

    Where weights are sharded, `llm.extensions.matrix_optim.matrices` gives each one an owner.

    Attributes:
        factor_ranks: Ranks that sum and keep K-FAC's factors; None for the default group.
    """

    factor_ranks: FactorRanks | None = None

    def assign(self, units: Sequence[Unit]) -> None:
        """Give each unit an owner."""

    def owns(self, unit: Unit) -> bool:
        """Return whether this rank keeps the state of a unit."""
        return True

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Replace the parameters of the model in all units by this rank's shards of them."""

    def shard_of(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor with the shape of a parameter of the model."""
        return tensor

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this rank adds its shard to `sum_over_shards`, so that each counts once.

        Args:
            parameter: Of the model.
        """
        return True

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the sum of values over the ranks that share the units; one rank has each unit."""
        return values

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of values over all ranks that hold different parameters or shards."""
        return values

    def local(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a model parameter."""
        return parameter

    def compute_updates(
        self, units: Sequence[Unit], compute: ComputeUpdates, *, dtype: torch.dtype = torch.float32
    ) -> Iterator[Updates]:
        """Yield the units that have gradients, with the updates of their parameters.

        Args:
            units: The units; the same on all ranks, in the same order.
            compute: Called by the owner.
            dtype: Dtype of updates in messages.
        """
        for equal_units in batch_equal_units(
            [unit for unit in units if unit.weight.grad is not None]
        ):
            gradients = [gradients_of(unit.parameters) or [] for unit in equal_units]
            yield compute_unit_updates(equal_units, gradients, compute, equal_units[0].weight.dtype)


def min_batch_cost(device: torch.device) -> float:
    """Return the minimum cost of units updated together, unless fewer are equal.

    On a GPU, a product of small matrices takes less time than its launch and does not fill the
    device; the bound limits the memory. On a CPU units are computed one at a time: there are no
    launches to save, stacks leave the caches, and sums then do not depend on the owners.
    """
    return 0 if device.type == "cpu" else 1 << 26


def batch_equal_units(units: Sequence[Unit]) -> list[list[Unit]]:
    """Divide units into batches of equal units that cost about `min_batch_cost`."""
    unit_batches, open_batches = list[list[Unit]](), dict[Hashable, list[Unit]]()
    for unit in units:
        fusion = unit.fusion
        batch_key = (*unit.shapes, *fusion.sizes.items(), fusion.groups, fusion.dim, unit.kind)
        min_cost = min_batch_cost(unit.weight.device)
        if batch_key not in open_batches or len(open_batches[batch_key]) * unit.cost >= min_cost:
            open_batches[batch_key] = []
            unit_batches.append(open_batches[batch_key])
        open_batches[batch_key].append(unit)
    return unit_batches


def compute_unit_updates(
    units: Sequence[Unit],
    gradients: Sequence[Sequence[Tensor]],
    compute: ComputeUpdates,
    dtype: torch.dtype,
) -> Updates:
    """Return the updates of equal units, computed from stacks of their gradients."""
    gradient_stacks = [stack_tensors(tensors) for tensors in zip(*gradients, strict=True)]
    update_stacks = [stack.to(dtype).unbind() for stack in compute(units, gradient_stacks)]
    updates_by_unit = zip(*update_stacks, strict=True)
    return [(unit, list(updates)) for unit, updates in zip(units, updates_by_unit, strict=True)]


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors to [number, ...]; a view if they are adjacent in memory."""
    first_tensor = tensors[0]
    if len(tensors) == 1:
        return first_tensor.unsqueeze(0)
    storage, num_elements = first_tensor.untyped_storage()._cdata, first_tensor.numel()
    memory_positions = [
        (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.is_contiguous())
        for tensor in tensors
    ]
    first_offset = first_tensor.storage_offset()
    offsets = range(first_offset, first_offset + len(tensors) * num_elements, num_elements)
    if memory_positions == [(storage, offset, True) for offset in offsets]:
        return first_tensor.as_strided(
            (len(tensors), *first_tensor.shape), (num_elements, *first_tensor.stride())
        )
    return torch.stack(list(tensors))


def make_adjacent(states: Sequence[dict[str, Tensor]]) -> None:
    """Move equal states into one stack per key, so that `stack_tensors` does not copy."""
    for key in states[0] if len(states) > 1 else ():
        stack = torch.stack([state[key] for state in states])
        for state, tensor in zip(states, stack.unbind(), strict=True):
            state[key] = tensor


@contextlib.contextmanager
def stacked_state(states: Sequence[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the states of equal matrices as stacks, which may be changed in place."""
    stacks = {key: stack_tensors([state[key] for state in states]) for key in states[0]}
    yield stacks
    for key, stack in stacks.items():
        # Write back copies only; views are already updated.
        if stack.untyped_storage()._cdata != states[0][key].untyped_storage()._cdata:
            torch._foreach_copy_([state[key] for state in states], list(stack.unbind()))


def num_elements(unit: Unit) -> int:
    """Return the number of elements of a unit's parameters."""
    return sum(shape.numel() for shape in unit.shapes)


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer that updates some matrices as a whole, and the rest with fused AdamW.

    Like torch's fused optimizers, it reads `found_inf` on the device, if set: if it is 1, weights
    and state do not change.

    Attributes:
        units: The matrices.
        found_inf: 1.0 to skip the next step, else 0.0; None: no step is skipped.
    """

    units: list[Unit]
    found_inf: Tensor | None = None

    def _add_adamw_state(self) -> None:
        """Create the state of all parameters without one."""
        self.state.update({p: adamw_state(p) for p in groups_of(self) if p not in self.state})

    def _make_state_adjacent(self, matrix_owners: MatrixOwners) -> None:
        """Make the states of this rank's equal units adjacent in memory, as stacks."""
        owned_units = [unit for unit in self.units if matrix_owners.owns(unit)]
        for units in batch_equal_units(owned_units):
            make_adjacent([self.state[unit.weight] for unit in units])

    def _step_adamw(self) -> None:
        """Update all parameters outside of units."""
        matrices = {p for unit in self.units for p in unit.parameters}
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p not in matrices]
            adamw_step(group, parameters, self.state, self.found_inf)

    def _overwrite_state(self, tensor: Tensor, values: Tensor) -> None:
        """Copy new values into a state, unless the step is skipped."""
        if self.found_inf is not None:
            values = torch.where(self.found_inf > 0, tensor, values)
        tensor.copy_(values)

    def _add_updates(self, updates: Updates, get_update_factor: Callable[[Unit], float]) -> None:
        """Decay weights and add updates; updates are zero if the step is skipped."""
        updates_by_factors: dict[tuple[float, float], list[tuple[Tensor, Tensor]]] = {}
        groups = groups_of(self)
        for unit, (update,) in updates:
            group = groups[unit.weight]
            decay_and_factor = 1 - group["lr"] * group["weight_decay"], get_update_factor(unit)
            updates_by_factors.setdefault(decay_and_factor, []).append((unit.weight, update))
        for (decay, factor), weights_and_updates in updates_by_factors.items():
            weights, weight_updates = map(list, zip(*weights_and_updates, strict=True))
            if self.found_inf is None:
                torch._foreach_mul_(weights, decay)
            else:
                torch._foreach_mul_(weights, torch.where(self.found_inf > 0, 1.0, decay))
            torch._foreach_add_(weights, weight_updates, alpha=factor)


def units_of(optimizer: torch.optim.Optimizer) -> Sequence[Unit]:
    """Return the units with whole state at their owners; empty for most optimizers."""
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
