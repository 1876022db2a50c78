"""Routers of mixtures of experts in float32, also under autocast.

In bf16 the scores of experts tie, and some tokens are sent to others. Several classes convert the
operands of their product to float32, but autocast converts them back.
"""

import functools
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from llm.models.mixtures import find_routers


class _Float32Router(nn.Module):
    """Runs the forward pass of the next class in float32."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the router returns for inputs in float32."""
        inputs = [_as_float32(value) for value in args]
        options = {name: _as_float32(value) for name, value in kwargs.items()}
        hidden: Tensor = [*inputs, *options.values()][0]
        with maybe_autocast(hidden.device.type, enabled=False):
            return super().forward(*inputs, **options)


def route_in_float32(model: nn.Module) -> None:
    """Let the routers of a model compute in float32; their classes change in place.

    The results of a run in float32 stay the same.
    """
    for router in find_routers(model):
        kind: Any = type(router)
        router.__class__ = _float32_class(kind)


def float32_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers in a model, or in a part of it, that compute in float32."""
    return [module for module in model.modules() if isinstance(module, _Float32Router)]


@functools.cache
def _float32_class(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (_Float32Router, kind), {"__module__": kind.__module__})


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
