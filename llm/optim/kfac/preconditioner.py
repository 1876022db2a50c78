"""K-FAC as a preconditioner: it changes the gradient, and any optimizer takes the step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from llm.optim.eigenbases import rotate, rotate_back
from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.layers import Layer


class Preconditioner:
    """Replaces the gradient dW [rows, columns] of each covered layer by (G + ..)^-1 dW (A + ..)^-1.

    With the method `eigen` one damping is added to each product of eigenvalues (George et al.
    2018, arXiv:1806.03884); with `cholesky` its root is split between both factors (Martens &
    Grosse 2015, arXiv:1503.05671). Damping is relative: to the mean eigenvalue of A times that of
    G, so that it means the same for all layers, losses and widths.

    Args:
        curvature: The covered layers' factors, with the method eigen or cholesky.
        parameters: All trained parameters; if any of their gradients is not finite, the step
            changes nothing.
        damping: For eigen, what `Curvature` takes for cholesky.
        kl_clip: Bound on the squared length of the whole update in the metric of the curvature;
            None: no bound.
        graft: Give each layer's result the norm of its gradient, for an optimizer such as AdamW
            that has a step length of its own.

    Attributes:
        curvature: As given.
        kl_scale: The factor by which the bound shortened the last update, a scalar of at most 1.
    """

    def __init__(
        self,
        curvature: Curvature,
        parameters: Iterable[nn.Parameter],
        *,
        damping: float = 0.001,
        kl_clip: float | None = 0.001,
        graft: bool = True,
    ) -> None:
        self.curvature = curvature
        self._parameters = list(parameters)
        self._damping = damping
        self._kl_clip = kl_clip
        self._graft = graft
        device = self._parameters[0].device
        self.kl_scale = torch.ones((), device=device)
        self._num_clipped = torch.zeros((), device=device)
        self._num_steps = 0

    @torch.no_grad()
    def precondition(self, *, learning_rate: float) -> None:
        """Replace the gradients of the covered layers; all ranks must call it.

        It is called between the backward passes and the clipping of the gradient, which must be
        averaged over ranks and unscaled. Only decompositions wait for the device.

        Args:
            learning_rate: Learning rate of this step, for the bound on the update.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        skipped = (~torch.isfinite(torch.nn.utils.get_total_norm(gradients))).float()
        self.curvature.update(skipped)
        layers = {}
        for layer in self.curvature.layers:
            gradient = layer.gradient()
            if gradient is None:
                continue
            if self.curvature.works_on(layer):
                result = self._result(layer, gradient)
            else:
                result = torch.empty_like(gradient)
            layers[layer] = (gradient, result)
        self.curvature.broadcast_updates({la.name: [result] for la, (_, result) in layers.items()})
        if not layers:
            return
        self.kl_scale = self._bound(list(layers.values()), learning_rate)
        for layer, (_, result) in layers.items():
            values = layer.split(result * self.kl_scale)
            for parameter, new in zip(layer.parameters, values, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(torch.where(skipped > 0, parameter.grad, new))
        self._num_clipped += (self.kl_scale < 1) * (1 - skipped)
        self._num_steps += 1

    def _result(self, layer: Layer, gradient: Tensor) -> Tensor:
        inputs, outputs = self.curvature.factors_of(layer)
        result = rotate(gradient, outputs.bases, inputs.bases)
        # With cholesky the bases are damped inverses, and this was all.
        if self.curvature.method != "cholesky":
            damping: Tensor | float = self._damping
            if not self.curvature.compat:
                damping = damping * inputs.mean_eigenvalue() * outputs.mean_eigenvalue()
            products = torch.outer(torch.cat(outputs.values), torch.cat(inputs.values))
            result = rotate_back(result / (products + damping), outputs.bases, inputs.bases)
        if self._graft:
            norms = torch.linalg.vector_norm(gradient), torch.linalg.vector_norm(result)
            result = result * (norms[0] / norms[1].clamp_min(1e-30))
        return result

    def _bound(self, layers: list[tuple[Tensor, Tensor]], learning_rate: float) -> Tensor:
        """Return the factor min(1, sqrt(kl_clip / (lr^2 sum <result, gradient>))) on all results.

        Args:
            layers: Gradient and result of each layer.
            learning_rate: Learning rate of this step.
        """
        if self._kl_clip is None:
            return torch.ones_like(self.kl_scale)
        products = [(result * gradient).sum() for gradient, result in layers]
        length = torch.stack(products).sum().abs()
        scale = (self._kl_clip / (learning_rate**2 * length).clamp_min(1e-30)).sqrt()
        return scale.clamp(max=1.0)

    def metrics(self) -> dict[str, Tensor]:
        """Return those of the curvature, the damping, and the fraction of steps that were clipped.

        The fraction is of the steps since the last call. All are on the device.
        """
        clipped = self._num_clipped / max(1, self._num_steps)
        self._num_clipped.zero_()
        self._num_steps = 0
        damping = torch.full_like(clipped, self._damping)
        return {**self.curvature.metrics(), "damping": damping, "clipped": clipped}

    def state_dict(self) -> dict[str, Any]:
        """Return the curvature's state, and the counts since the last call of `metrics`."""
        own = {"num_clipped": self._num_clipped, "num_steps": self._num_steps}
        return {**self.curvature.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.curvature.load_state_dict(state)
        self._num_clipped.copy_(state["num_clipped"])
        self._num_steps = int(state["num_steps"])
