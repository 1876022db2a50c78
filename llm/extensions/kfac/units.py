"""The weights of covered layers as units of whole matrices, and the owners of their updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.factors import Factor
from llm.extensions.kfac.layers import Layer
from llm.extensions.matrix_optim.matrix_owners import (
    MatrixOwners,
    Unit,
    Updates,
    batch_equal_units,
    gradients_of,
    stack_tensors,
)

ComputeUpdate = Callable[[Sequence[Layer], Tensor], Tensor]
"""Computes the updates of equal layers from their gradients, both stacked in a leading dimension as
`Layer.make_gradient_matrix` returns them."""


class CoveredUnits:
    """Each weight with its bias; all layers of a fused weight are updated together.

    Args:
        curvature: The covered layers' factors.
        matrix_owners: Sends gradients to the ranks that keep a layer's bases, and updates back, if
            weights are sharded. None if every rank holds whole weights.

    Attributes:
        layers_by_unit: The layers of each unit.
    """

    def __init__(self, curvature: Curvature, matrix_owners: MatrixOwners | None = None) -> None:
        self._curvature = curvature
        self._matrix_owners = matrix_owners or MatrixOwners()
        layers_by_weight: dict[Tensor, list[Layer]] = {}
        for layer in curvature.layers:
            layers_by_weight.setdefault(layer.weight, []).append(layer)
        self.layers_by_unit: dict[Unit, list[Layer]] = {}
        for layers in layers_by_weight.values():
            parameters = layers[0].parameters
            unit = Unit(
                parameters=parameters,
                shapes=[p.shape for p in parameters],
                cost=sum(_count_state_elements(curvature, layer) for layer in layers),
                fusion=layers[0].fusion,
                owner=curvature.updater_of(layers[0]),
                # A stack of experts is already a batch of products.
                kind=layers[0].name if layers[0].is_stack else None,
            )
            self.layers_by_unit[unit] = layers
        self._matrix_owners.assign(list(self.layers_by_unit))

    def computes_update(self, unit: Unit) -> bool:
        """Return whether this rank keeps the bases of a unit and computes its update."""
        return self._curvature.computes_update(self.layers_by_unit[unit][0])

    def batches(self) -> list[list[Unit]]:
        """Return the units of this rank, with equal units together."""
        return batch_equal_units(
            [unit for unit in self.layers_by_unit if self.computes_update(unit)]
        )

    def layers_by_part(self, units: Sequence[Unit]) -> list[tuple[Layer, ...]]:
        """Return the layers of equal units, for each matrix of a fused weight one per unit."""
        return list(zip(*(self.layers_by_unit[unit] for unit in units), strict=True))

    def make_bases_adjacent(self) -> None:
        """Make the bases and eigenvalues of equal layers adjacent in memory, as stacks.

        Query, key and value share the factor of their input, which is moved once.
        """
        moved_factors = set[Factor]()
        for units in self.batches():
            for layers in self.layers_by_part(units):
                for factors in zip(*map(self._curvature.factors_of, layers), strict=True):
                    _stack_bases(
                        [factor for factor in dict.fromkeys(factors) if factor not in moved_factors]
                    )
                    moved_factors.update(factors)

    def compute_updates(self, compute_update: ComputeUpdate) -> Iterator[Updates]:
        """Yield the units that have gradients, with the updates of their parameters.

        Args:
            compute_update: Called by the ranks that compute the units' updates.
        """
        compute_unit_updates = partial(self._compute_unit_updates, compute_update)
        yield from self._matrix_owners.compute_updates(
            list(self.layers_by_unit), compute_unit_updates
        )

    def _compute_unit_updates(
        self, compute_update: ComputeUpdate, units: Sequence[Unit], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Return the stacked updates of the weights and biases of equal units.

        Args:
            compute_update: Returns the updates of equal layers, [units, rows, columns].
            units: Equal units.
            gradients: The stacked gradients of their weights and biases.
        """
        update_by_layer = {}
        for layers in self.layers_by_part(units):
            first_layer = layers[0]
            update_by_layer[first_layer] = compute_update(
                layers, first_layer.make_gradient_matrix(gradients)
            )
        return _join_updates(units[0], update_by_layer)

    def compute_inner_product(self, updates: Mapping[Unit, Sequence[Tensor]]) -> Tensor:
        """Return the sum over all units and ranks of the products of updates and gradients.

        Args:
            updates: As `compute_updates` yields them; not empty.
        """
        products = []
        for unit, unit_updates in updates.items():
            gradients = gradients_of(unit.parameters) or ()
            for update, gradient in zip(unit_updates, gradients, strict=True):
                products.append((update * gradient).sum())
        return self._matrix_owners.sum_over_ranks(torch.stack(products).sum())

    def all_finite(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return 1.0 if the gradients of parameters are finite on all ranks, else 0.0."""
        local = map(self._matrix_owners.local, parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in local if p.grad is not None])
        return torch.isfinite(self._matrix_owners.sum_over_ranks(norm)).float()


def stack_bases(factors: Sequence[Factor]) -> list[Tensor]:
    """Return the bases of equally wide factors, with corresponding blocks stacked."""
    if len(factors) == 1:
        return factors[0].bases
    return [
        stack_tensors(blocks) for blocks in zip(*(factor.bases for factor in factors), strict=True)
    ]


def stack_eigenvalues(factors: Sequence[Factor]) -> Tensor:
    """Return the eigenvalues of equally wide factors, [factors, size]."""
    blocks = zip(*(factor.eigenvalues for factor in factors), strict=True)
    return torch.cat([stack_tensors(values) for values in blocks], dim=1)


def _stack_bases(factors: Sequence[Factor]) -> None:
    """Move the bases and eigenvalues of equally wide factors into one stack per block."""
    if len(factors) <= 1:
        return
    bases_by_factor = [factor.bases for factor in factors]
    eigenvalues_by_factor = [factor.eigenvalues for factor in factors]
    for blocks_by_factor in (bases_by_factor, eigenvalues_by_factor):
        for block_index, blocks in enumerate(zip(*blocks_by_factor, strict=True)):
            stack = torch.stack(blocks)
            for factor_blocks, block in zip(blocks_by_factor, stack.unbind(), strict=True):
                factor_blocks[block_index] = block


def _count_state_elements(curvature: Curvature, layer: Layer) -> int:
    """Return the number of elements of a layer's moments and factors.

    A shared A counts for the first of its layers.
    """
    inputs, outputs = curvature.factors_of(layer)
    widths = outputs.widths + (inputs.widths if layer.input_name == layer.name else [])
    return 2 * layer.rows * layer.columns + sum(2 * width**2 for width in widths)


def _join_updates(unit: Unit, update_by_layer: Mapping[Layer, Tensor]) -> list[Tensor]:
    """Return the updates of a unit's weight and bias from the updates of its matrices.

    Undoes `Layer.make_gradient_matrix` for stacks of equal units.

    Args:
        unit: One of the units.
        update_by_layer: The updates of the matrices, [units, rows, columns].
    """
    # For each matrix its updates of weight and bias; without a bias there is only the former.
    weights_and_biases = [layer.split(update) for layer, update in update_by_layer.items()]
    output_dims = (1 + unit.fusion.dim, 1)  # of weights, and of biases
    part_names = [layer.part for layer in update_by_layer]
    updates = []
    for output_dim, *parts in zip(output_dims, *weights_and_biases, strict=False):
        part_by_name = dict(zip(part_names, parts, strict=True))
        updates.append(unit.fusion.join(part_by_name, output_dim))
    return updates
