"""Casts of weights that all micro-batches of a step share."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class _CastCache:
    """The copies of weights inside `cast_weights_once`, by weight; None outside it."""

    copy_by_weight: dict[Tensor, Tensor] | None = None


_cast_cache = _CastCache()


@contextlib.contextmanager
def cast_weights_once(device: torch.device) -> Iterator[None]:
    """Let forward passes under autocast share copies of the weights. The weights must not change.

    Gradients stay the same bit for bit: a cast's autograd node saves no tensors, so it can serve
    several backward passes, and each adds its gradient to the weight's in float32.
    """
    _cast_cache.copy_by_weight = {}
    try:
        # Autocast keeps its copies until the outermost context ends, which is this one; it has no
        # other effect.
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _cast_cache.copy_by_weight = None


def copy_once(weight: Tensor, make_copy: Callable[[], Tensor]) -> Tensor:
    """Return a copy of a weight; inside `cast_weights_once`, make it once per weight."""
    if _cast_cache.copy_by_weight is None or torch.compiler.is_compiling():
        return make_copy()
    if weight not in _cast_cache.copy_by_weight:
        _cast_cache.copy_by_weight[weight] = make_copy()
    return _cast_cache.copy_by_weight[weight]
