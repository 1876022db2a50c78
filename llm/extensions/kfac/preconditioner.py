"""K-FAC as a preconditioner: it changes the gradient, and any optimizer takes the step."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.layers import Layer
from llm.extensions.kfac.units import CoveredUnits, stack_bases, stack_eigenvalues
from llm.extensions.matrix_optim.eigenbases import rotate, rotate_back
from llm.extensions.matrix_optim.matrix_owners import MatrixOwners


class Preconditioner:
    """Replaces the gradient dW [rows, columns] of each covered layer by (G + ..)^-1 dW (A + ..)^-1.

    The damping is added to each product of eigenvalues (George et al. 2018, arXiv:1806.03884). It
    is relative to the product of the mean eigenvalues of A and G, so it means the same for all
    layers, losses and widths. Each layer's result is scaled to the norm of its gradient, for
    optimizers such as AdamW that set the step length.

    Args:
        curvature: The covered layers' factors, with the method eigen.
        parameters: All trained parameters; if any of their gradients is not finite, the step
            changes nothing.
        damping: Relative damping.
        kl_clip: Bound on the squared length of the whole update in the metric of the curvature;
            None: no bound.
        matrix_owners: As for `CoveredUnits`.

    Attributes:
        curvature: The factors.
        kl_scale: Factor on the last update due to the bound, a scalar of at most 1.
    """

    def __init__(
        self,
        curvature: Curvature,
        parameters: Iterable[nn.Parameter],
        *,
        damping: float = 0.001,
        kl_clip: float | None = 0.001,
        matrix_owners: MatrixOwners | None = None,
    ) -> None:
        self.curvature = curvature
        self._covered_units = CoveredUnits(curvature, matrix_owners)
        self._covered_units.make_bases_adjacent()
        self._parameters = list(parameters)
        self._damping = damping
        self._kl_clip = kl_clip
        device = self._parameters[0].device
        self.kl_scale = torch.ones((), device=device)
        self._num_clipped = torch.zeros((), device=device)
        self._num_steps = 0

    @torch.no_grad()
    def precondition(self, *, learning_rate: float) -> None:
        """Replace the gradients of the covered layers; all ranks must call it.

        Call it between the backward passes and gradient clipping. The gradient must be averaged
        over ranks and unscaled. Only decompositions wait for the device.

        Args:
            learning_rate: Learning rate of this step, for the bound on the update.
        """
        is_skipped = 1.0 - self._covered_units.all_finite(self._parameters)
        self.curvature.update(is_skipped)
        updates_by_unit = dict(
            itertools.chain.from_iterable(
                self._covered_units.compute_updates(self._precondition_layers)
            )
        )
        if not updates_by_unit:
            return
        inner_product = self._covered_units.compute_inner_product(updates_by_unit)
        self.kl_scale = self._compute_kl_scale(inner_product, learning_rate)
        for unit, unit_updates in updates_by_unit.items():
            for parameter, update in zip(unit.parameters, unit_updates, strict=True):
                if (gradient := parameter.grad) is not None:
                    gradient.copy_(torch.where(is_skipped > 0, gradient, update * self.kl_scale))
        self._num_clipped += (self.kl_scale < 1) * (1 - is_skipped)
        self._num_steps += 1

    def _precondition_layers(self, layers: Sequence[Layer], gradients: Tensor) -> Tensor:
        """Return the preconditioned gradients of equal layers, stacked like the gradients."""
        input_factors, output_factors = zip(*map(self.curvature.factors_of, layers), strict=True)
        row_bases, column_bases = stack_bases(output_factors), stack_bases(input_factors)
        row_values = stack_eigenvalues(output_factors)
        column_values = stack_eigenvalues(input_factors)
        damping = self._damping * row_values.mean(dim=1) * column_values.mean(dim=1)
        damped_products = row_values.unsqueeze(2) * column_values.unsqueeze(1) + damping.view(
            -1, 1, 1
        )
        if gradients.ndim > 3:  # a stack of experts, with the same factors
            damped_products = damped_products.unsqueeze(1)
        rotated_gradients = rotate(gradients, row_bases, column_bases)
        return _graft_norms(
            rotate_back(rotated_gradients / damped_products, row_bases, column_bases), gradients
        )

    def _compute_kl_scale(self, inner_product: Tensor, learning_rate: float) -> Tensor:
        """Return min(1, sqrt(kl_clip / (lr^2 sum <update, gradient>))), the factor on updates."""
        if self._kl_clip is None:
            return torch.ones_like(self.kl_scale)
        kl_estimate = learning_rate**2 * inner_product.abs()
        scale = (self._kl_clip / kl_estimate.clamp_min(1e-30)).sqrt()
        return scale.clamp(max=1.0)

    def metrics(self) -> dict[str, Tensor]:
        """Return the curvature's metrics, the damping, and the fraction of clipped steps.

        The fraction covers the steps since the last call. All values are on the device.
        """
        clipped_fraction = self._num_clipped / max(1, self._num_steps)
        self._num_clipped.zero_()
        self._num_steps = 0
        damping = torch.full_like(clipped_fraction, self._damping)
        return {**self.curvature.metrics(), "damping": damping, "clipped": clipped_fraction}

    def state_dict(self) -> dict[str, Any]:
        """Return the curvature's state, and the counts since the last call of `metrics`."""
        counts = {"num_clipped": self._num_clipped, "num_steps": self._num_steps}
        return {**self.curvature.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.curvature.load_state_dict(state)
        self._num_clipped.copy_(state["num_clipped"])
        self._num_steps = int(state["num_steps"])


def _graft_norms(results: Tensor, gradients: Tensor) -> Tensor:
    """Scale the result of each layer to the norm of its gradient; both are stacks of layers."""
    gradient_norms, result_norms = (
        torch.linalg.vector_norm(stack.flatten(1), dim=1) for stack in (gradients, results)
    )
    ratios = gradient_norms / result_norms.clamp_min(1e-30)
    grafted: Tensor = results * ratios.view(-1, *[1] * (gradients.ndim - 1))
    return grafted
