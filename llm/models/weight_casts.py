"""One cast of the weights for all micro-batches of a step."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class _Copies:
    """The copies made since `cast_weights_once` began, by weight; None outside it."""

    by_tensor: dict[Tensor, Tensor] | None = None


_copies = _Copies()


@contextlib.contextmanager
def cast_weights_once(device: torch.device) -> Iterator[None]:
    """Let forward passes under autocast share copies of the weights. The weights must not change.

    Gradients stay the same bit for bit: a cast's autograd node saves no tensors, so it can serve
    several backward passes, and each adds its gradient to the weight's in float32.

    Args:
        device: The device of the weights.
    """
    _copies.by_tensor = {}
    try:
        # Autocast keeps its copies until the outermost context ends, which is this one; it has no
        # other effect.
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _copies.by_tensor = None


def copy_once(weight: Tensor, copy: Callable[[], Tensor]) -> Tensor:
    """Return `copy` of a weight; inside `cast_weights_once` it is called once per weight."""
    if _copies.by_tensor is None or torch.compiler.is_compiling():
        return copy()
    if weight not in _copies.by_tensor:
        _copies.by_tensor[weight] = copy()
    return _copies.by_tensor[weight]
