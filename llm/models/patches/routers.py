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
    """Runs the forward pass of a router's original class, its next base class, in float32."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the router returns for inputs in float32."""
        float32_args = [_cast_to_float32(value) for value in args]
        float32_kwargs = {name: _cast_to_float32(value) for name, value in kwargs.items()}
        hidden: Tensor = [*float32_args, *float32_kwargs.values()][0]
        with maybe_autocast(hidden.device.type, enabled=False):
            return super().forward(*float32_args, **float32_kwargs)


def route_in_float32(model: nn.Module) -> None:
    """Let the routers of a model compute in float32, by a change of their classes.

    In a run without mixed precision, the results stay the same.
    """
    for router in find_routers(model):
        router_class: Any = type(router)
        router.__class__ = _make_float32_class(router_class)


def float32_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers in a model, or in a part of it, that compute in float32."""
    return [module for module in model.modules() if isinstance(module, _Float32Router)]


@functools.cache
def _make_float32_class(router_class: Any) -> type[nn.Module]:
    """Return a subclass of a router's class that computes in float32, with the same name."""
    bases = (_Float32Router, router_class)
    return type(router_class.__name__, bases, {"__module__": router_class.__module__})


def _cast_to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
