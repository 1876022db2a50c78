"""The tanh form of GELU in one kernel."""

import torch
from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation


class FusedTanhGELU(nn.Module):
    """GELU in its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415) as one kernel, not eight.

    The backward pass needs the input alone, where autograd keeps every intermediate result of
    the formula that transformers spells out.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Any shape to the same shape."""
        return nn.functional.gelu(values, approximate="tanh")


def fuse_gelu(model: nn.Module) -> None:
    """Compute the tanh forms of GELU (gelu_new, gelu_fast) of a model in one kernel each."""
    for module in model.modules():
        # Exactly these: a subclass may compute something else. They have no parameters, so that
        # another class in place is all it takes.
        if type(module) in (NewGELUActivation, FastGELUActivation):
            module.__class__ = FusedTanhGELU
