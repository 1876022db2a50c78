"""The tanh form of GELU in one kernel."""

import torch
from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation


class FusedTanhGELU(nn.Module):
    """GELU in its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415) as one kernel, not eight.

    The backward pass only needs the input. For the formula in transformers, autograd keeps every
    intermediate result.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return nn.functional.gelu(values, approximate="tanh")


def fuse_gelu(model: nn.Module) -> None:
    """Replace the tanh forms of GELU (gelu_new, gelu_fast) in a model by one kernel each."""
    for module in model.modules():
        # Exactly these classes, because a subclass may compute something else. They have no
        # parameters, so setting a new class is enough.
        if type(module) in (NewGELUActivation, FastGELUActivation):
            module.__class__ = FusedTanhGELU
