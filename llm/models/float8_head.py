"""The output head's products in float8: the logits, and the gradient of the hidden states.

Values are scaled per tensor, so that the largest is the largest of the format (Micikevicius et al.
2022, arXiv:2209.05433, section 3): weights and hidden states in E4M3, which has more mantissa, and
gradients of logits in E5M2, which has more range. The gradient of the weight stays in half
precision, with sums in float32.
"""

import torch
from torch import Tensor

SIZE_MULTIPLE = 16
"""Width and columns must be a multiple of this."""

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST_ABSOLUTE = 1e-12
"""Lower bound of the largest absolute value, against a division by zero."""
_GRADIENT_SCALE = 2.0**15
"""Factor for gradients of logits, which are between -1 and 1, slightly more with a z-loss: E5M2
ends at 57,344."""


class Float8Weight:
    """The head's weight in float8.

    Args:
        weight: [columns, width], both multiples of 16.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._scale = _to_e4m3(weight)
        self._transposed = self._weight.t().contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden @ weight.T in float8; [rows, columns] in the dtype of `hidden`."""
        float8_hidden, scale = _to_e4m3(hidden)
        # The sums are short, so that the faster, less precise accumulation loses little.
        return torch._scaled_mm(
            float8_hidden,
            self._weight.t(),
            scale_a=scale,
            scale_b=self._scale,
            out_dtype=hidden.dtype,
            use_fast_accum=True,
        )

    def compute_hidden_gradient(self, grad_logits: Tensor) -> Tensor:
        """Compute grad_logits @ weight in float8, [rows, width] in the dtype of `grad_logits`.

        Args:
            grad_logits: [rows, columns], the gradient of a sum of token losses, between -1.75 and
                1.75.
        """
        inverse_scale = torch.full((), 1 / _GRADIENT_SCALE, device=grad_logits.device)
        return torch._scaled_mm(
            (grad_logits * _GRADIENT_SCALE).to(_E5M2),
            self._transposed.t(),
            scale_a=inverse_scale,
            scale_b=self._scale,
            out_dtype=grad_logits.dtype,
            use_fast_accum=False,
        )


def _to_e4m3(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor divided by its scale, in E4M3, and the scale, a scalar in float32."""
    largest = tensor.abs().amax().float().clamp(min=_SMALLEST_ABSOLUTE)
    scale = largest / torch.finfo(_E4M3).max
    return (tensor.float() / scale).to(_E4M3), scale
