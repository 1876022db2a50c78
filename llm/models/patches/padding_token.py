"""Embeddings that learn the token that a model's configuration calls padding."""

import inspect

from torch import nn


def train_padding_token(model: nn.Module) -> None:
    """Let embeddings treat the padding token as any other token.

    An embedding with `padding_idx` gives this token no gradient. A run has no padding, so the token
    occurs only as a part of the text. Only modules change: the configuration stays.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and not _computes_with_padding(module):
            module.padding_idx = None


def _computes_with_padding(embedding: nn.Embedding) -> bool:
    """Return whether the forward pass uses `padding_idx`, for instance as the first position."""
    forward = type(embedding).forward
    return forward is not nn.Embedding.forward and "padding_idx" in inspect.getsource(forward)
