"""The weights of covered layers as units of whole matrices, and who computes their updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.layers import Layer
from llm.optim.whole import Unit, WholeMatrices, gradients_of

Update = Callable[[Unit, Layer, Tensor], Tensor]
"""From the gradient of a layer of a unit, as `Layer.matrix` returns it, to the update."""


class CoveredUnits:
    """Each weight with its bias; the layers of one weight, if it is fused, are updated together.

    Args:
        curvature: The covered layers' factors.
        whole: Brings gradients to the ranks that keep a layer's bases, and updates back, where
            weights are sharded. None where every rank holds whole weights.

    Attributes:
        layers: The layers of each unit.
    """

    def __init__(self, curvature: Curvature, whole: WholeMatrices | None = None) -> None:
        self._curvature = curvature
        self._whole = whole or WholeMatrices()
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
            )
            self.layers[unit] = layers
        self._whole.assign(list(self.layers))

    def works_on(self, unit: Unit) -> bool:
        """Return whether this rank keeps the bases of a unit and computes its update."""
        return self._curvature.works_on(self.layers[unit][0])

    def updates(self, update: Update) -> Iterator[tuple[Unit, list[Tensor]]]:
        """Yield the units that have gradients, with the updates of their parameters.

        Args:
            update: Called for each layer by the ranks that work on its unit.
        """

        def compute(unit: Unit, gradients: list[Tensor]) -> list[Tensor]:
            matrices = {
                layer: update(unit, layer, layer.matrix(gradients)) for layer in self.layers[unit]
            }
            return _as_stored(unit, matrices)

        yield from self._whole.updates(list(self.layers), compute)

    def inner_product(self, updates: Mapping[Unit, Sequence[Tensor]]) -> Tensor:
        """Return the sum over all units and ranks of the products of updates and gradients.

        Args:
            updates: As `updates` yields them; not empty.
        """
        products = [
            (update * gradient).sum()
            for unit, its in updates.items()
            for update, gradient in zip(its, gradients_of(unit.parameters) or (), strict=True)
        ]
        return self._whole.total(torch.stack(products).sum())

    def all_finite(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return 1.0 if the gradients of parameters are finite on all ranks, else 0.0."""
        local = map(self._whole.local, parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in local if p.grad is not None])
        return torch.isfinite(self._whole.total(norm)).float()


def _num_elements(curvature: Curvature, layer: Layer) -> int:
    """Return the elements of a layer's moments and factors; a shared A is the first layer's."""
    inputs, outputs = curvature.factors_of(layer)
    widths = outputs.widths + (inputs.widths if layer.input_name == layer.name else [])
    return 2 * layer.rows * layer.columns + sum(2 * width**2 for width in widths)


def _as_stored(unit: Unit, matrices: Mapping[Layer, Tensor]) -> list[Tensor]:
    """Return matrices as weight and bias store them: undo `matrix` of all layers of a unit."""
    stored = [layer.split(matrix) for layer, matrix in matrices.items()]
    dims = (unit.fusion.dim, 0)  # of the outputs of a weight and of a bias
    names = [layer.part for layer in matrices]
    return [
        unit.fusion.join(dict(zip(names, parts, strict=True)), dim)
        for dim, *parts in zip(dims, *stored, strict=False)
    ]
