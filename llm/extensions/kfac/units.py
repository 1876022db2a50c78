"""The weights of covered layers as units of whole matrices, and the owners of their updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.factors import Factor
from llm.extensions.kfac.layers import Layer
from llm.extensions.matrix_optim.matrix_owners import (
    MatrixOwners,
    Unit,
    Updates,
    batches,
    gradients_of,
    stacked,
)

Update = Callable[[Sequence[Layer], Tensor], Tensor]
"""Computes the updates of equal layers from their gradients, in the form of `Layer.matrix`, stacked
in a leading dimension."""


class CoveredUnits:
    """Each weight with its bias; all layers of a fused weight are updated together.

    Args:
        curvature: The covered layers' factors.
        matrix_owners: Sends gradients to the ranks that keep a layer's bases, and updates back, if
            weights are sharded. None if every rank holds whole weights.

    Attributes:
        layers: The layers of each unit.
    """

    def __init__(self, curvature: Curvature, matrix_owners: MatrixOwners | None = None) -> None:
        self._curvature = curvature
        self._matrix_owners = matrix_owners or MatrixOwners()
        by_weight: dict[Tensor, list[Layer]] = {}
        for layer in curvature.layers:
            by_weight.setdefault(layer.weight, []).append(layer)
        self.layers: dict[Unit, list[Layer]] = {}
        for layers in by_weight.values():
            parameters = layers[0].parameters
            unit = Unit(
                parameters=parameters,
                shapes=[p.shape for p in parameters],
                cost=sum(_num_elements(curvature, layer) for layer in layers),
                fusion=layers[0].fusion,
                owner=curvature.updater_of(layers[0]),
                # A stack of experts is already a batch of products.
                kind=layers[0].name if layers[0].is_stack else None,
            )
            self.layers[unit] = layers
        self._matrix_owners.assign(list(self.layers))

    def works_on(self, unit: Unit) -> bool:
        """Return whether this rank keeps the bases of a unit and computes its update."""
        return self._curvature.works_on(self.layers[unit][0])

    def batches(self) -> list[list[Unit]]:
        """Return the units of this rank, with equal units together."""
        return batches([unit for unit in self.layers if self.works_on(unit)])

    def parts_of(self, units: Sequence[Unit]) -> list[tuple[Layer, ...]]:
        """Return the layers of equal units: for each part, one layer per unit."""
        return list(zip(*(self.layers[unit] for unit in units), strict=True))

    def lay_bases_together(self) -> None:
        """Make the bases and eigenvalues of equal layers adjacent in memory, as stacks.

        Query, key and value share the factor of their input, which is moved once.
        """
        moved = set[Factor]()
        for units in self.batches():
            for layers in self.parts_of(units):
                for factors in zip(*map(self._curvature.factors_of, layers), strict=True):
                    _stack_bases([f for f in dict.fromkeys(factors) if f not in moved])
                    moved.update(factors)

    def updates(self, update: Update) -> Iterator[Updates]:
        """Yield the units that have gradients, with the updates of their parameters.

        Args:
            update: Called by the ranks that work on the units.
        """

        def compute(units: Sequence[Unit], gradients: list[Tensor]) -> list[Tensor]:
            matrices = {
                layers[0]: update(layers, layers[0].matrix(gradients))
                for layers in self.parts_of(units)
            }
            return _as_stored(units[0], matrices)

        yield from self._matrix_owners.updates(list(self.layers), compute)

    def inner_product(self, updates: Mapping[Unit, Sequence[Tensor]]) -> Tensor:
        """Return the sum over all units and ranks of the products of updates and gradients.

        Args:
            updates: As `updates` yields them; not empty.
        """
        products = [
            (update * gradient).sum()
            for unit, unit_updates in updates.items()
            for update, gradient in zip(
                unit_updates, gradients_of(unit.parameters) or (), strict=True
            )
        ]
        return self._matrix_owners.sum_over_ranks(torch.stack(products).sum())

    def all_finite(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return 1.0 if the gradients of parameters are finite on all ranks, else 0.0."""
        local = map(self._matrix_owners.local, parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in local if p.grad is not None])
        return torch.isfinite(self._matrix_owners.sum_over_ranks(norm)).float()


def joint_bases(factors: Sequence[Factor]) -> list[Tensor]:
    """Return the bases of equally wide factors, with corresponding blocks stacked."""
    if len(factors) == 1:
        return factors[0].bases
    return [stacked(blocks) for blocks in zip(*(factor.bases for factor in factors), strict=True)]


def joint_values(factors: Sequence[Factor]) -> Tensor:
    """Return the eigenvalues of equally wide factors, [factors, size]."""
    blocks = zip(*(factor.values for factor in factors), strict=True)
    return torch.cat([stacked(values) for values in blocks], dim=1)


def _stack_bases(factors: Sequence[Factor]) -> None:
    """Move the bases and eigenvalues of equally wide factors into one stack per block."""
    for lists in zip(*([f.bases, f.values] for f in factors), strict=True) if factors[1:] else ():
        for number, blocks in enumerate(zip(*lists, strict=True)):
            for blocks_of_factor, tensor in zip(lists, torch.stack(blocks).unbind(), strict=True):
                blocks_of_factor[number] = tensor


def _num_elements(curvature: Curvature, layer: Layer) -> int:
    """Return the elements of a layer's moments and factors; a shared A is the first layer's."""
    inputs, outputs = curvature.factors_of(layer)
    widths = outputs.widths + (inputs.widths if layer.input_name == layer.name else [])
    return 2 * layer.rows * layer.columns + sum(2 * width**2 for width in widths)


def _as_stored(unit: Unit, matrices: Mapping[Layer, Tensor]) -> list[Tensor]:
    """Return stacks of matrices as weights and biases store them: undo `matrix` of all layers."""
    stored = [layer.split(matrix) for layer, matrix in matrices.items()]
    dims = (1 + unit.fusion.dim, 1)  # of the outputs of weights and of biases
    names = [layer.part for layer in matrices]
    return [
        unit.fusion.join(dict(zip(names, parts, strict=True)), dim)
        for dim, *parts in zip(dims, *stored, strict=False)
    ]
