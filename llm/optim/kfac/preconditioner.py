"""K-FAC as a preconditioner: gradients change, and any optimizer takes the step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from llm.optim.eigenbases import rotate, rotate_back
from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.layers import Layer


class Preconditioner:
    """Replaces the gradient dW of each covered layer by (G + ..)^-1 dW (A + ..)^-1.

    With the method `eigen` one damping is added to each product of eigenvalues (George et al.
    2018, arXiv:1806.03884); with `cholesky` its root is split between both factors (Martens &
    Grosse 2015, arXiv:1503.05671). Damping is relative: to the mean eigenvalue of A times that of
    G, so that it means the same for all layers, losses and widths.

    Args:
        curvature: The covered layers' factors, with the method eigen or cholesky.
        parameters: All that is trained; where any gradient is not finite, the step changes
            nothing.
        damping: For eigen, as `Curvature` has it for cholesky.
        kl_clip: Bound on the squared length of the whole update in the curvature's own measure;
            None: no bound.
        graft: Give each layer's result the norm of its gradient, for an optimizer such as AdamW
            that has a step length of its own.
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

        It belongs between the backward passes and the clipping of the gradient, which must be
        averaged over ranks and unscaled. Nothing in it waits for the device but decompositions.

        Args:
            learning_rate: Of this step, for the bound on the update.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        skipped = (~torch.isfinite(torch.nn.utils.get_total_norm(gradients))).float()
        self.curvature.update(skipped)
        before: dict[str, Tensor] = {}
        results: dict[str, Tensor] = {}
        for layer in self.curvature.layers:
            gradient = layer.gradient()
            if gradient is None:
                continue
            before[layer.name] = gradient
            if self.curvature.works_on(layer):
                results[layer.name] = self._result(layer, gradient)
            else:
                results[layer.name] = torch.empty_like(gradient)
        self.curvature.share_updates(results)
        if not results:
            return
        self.kl_scale = self._bound(before, results, learning_rate)
        for layer in self.curvature.layers:
            if layer.name in results:
                _replace(layer, results[layer.name] * self.kl_scale, skipped)
        self._num_clipped += (self.kl_scale < 1) * (1 - skipped)
        self._num_steps += 1

    def _result(self, layer: Layer, gradient: Tensor) -> Tensor:
        inputs, outputs = self.curvature.factors_of(layer)
        if self.curvature.method == "cholesky":
            result = rotate(gradient, outputs.bases, inputs.bases)
        else:
            damping: Tensor | float = self._damping
            if not self.curvature.compat:
                damping = damping * inputs.mean_eigenvalue() * outputs.mean_eigenvalue()
            products = torch.outer(torch.cat(outputs.values), torch.cat(inputs.values))
            rotated = rotate(gradient, outputs.bases, inputs.bases) / (products + damping)
            result = rotate_back(rotated, outputs.bases, inputs.bases)
        if self._graft:
            norms = torch.linalg.vector_norm(gradient), torch.linalg.vector_norm(result)
            result = result * (norms[0] / norms[1].clamp_min(1e-30))
        return result

    def _bound(
        self, before: dict[str, Tensor], results: dict[str, Tensor], learning_rate: float
    ) -> Tensor:
        """What to multiply all results by: min(1, sqrt(bound / (lr^2 sum <result, gradient>)))."""
        if self._kl_clip is None:
            return torch.ones_like(self.kl_scale)
        length = torch.stack([(results[name] * before[name]).sum() for name in results]).sum()
        scale = (self._kl_clip / (learning_rate**2 * length.abs()).clamp_min(1e-30)).sqrt()
        return scale.clamp(max=1.0)

    def metrics(self) -> dict[str, Tensor]:
        """Numbers for the log, on the device: those of the curvature, damping, clipped steps.

        The share of clipped steps is that since the last call.
        """
        share = self._num_clipped / max(1, self._num_steps)
        self._num_clipped.zero_()
        self._num_steps = 0
        own = {"damping": torch.full_like(share, self._damping), "clipped": share}
        return {**self.curvature.metrics(), **own}

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps and numbers depend on; see `Curvature`."""
        own = {"num_clipped": self._num_clipped, "num_steps": self._num_steps}
        return {**self.curvature.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.curvature.load_state_dict(state)
        self._num_clipped.copy_(state["num_clipped"])
        self._num_steps = int(state["num_steps"])


def _replace(layer: Layer, result: Tensor, skipped: Tensor) -> None:
    for parameter, part in zip(layer.parameters, layer.parts(result), strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(torch.where(skipped > 0, parameter.grad, part))
