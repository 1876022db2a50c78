"""The grouped matrix products of mixture-of-experts layers: under autocast and without values."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm.models.mixtures import find_experts
from llm.models.weight_casts import copy_once

_LIBRARY = torch.library.Library("aten", "IMPL")  # its kernels are registered while it lives


@functools.cache
def autocast_grouped_products() -> None:
    """Let autocast cast the operands of `torch.nn.functional.grouped_mm`, as for `mm`.

    PyTorch lacks this rule (pytorch/pytorch#174763): the experts' weights are float32, and
    transformers casts their inputs to float32.
    """
    for device_type in ("cpu", "cuda", "xpu"):
        key = f"Autocast{device_type.upper()}"
        _LIBRARY.impl("_grouped_mm", functools.partial(_grouped_product, device_type, key), key)


def _grouped_product(
    device_type: str, key: str, lhs: Tensor, rhs: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):  # dispatch continues below autocast
        dtype = torch.get_autocast_dtype(device_type)
        lhs, rhs = lhs.to(dtype), _cast_once(rhs, dtype)
        product: Tensor = torch.ops.aten._grouped_mm(lhs, rhs, *args, **kwargs)
    return product


def _cast_once(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a cast of expert weights, or of their transposed view; once per step, if allowed.

    Each call gets a new view, so that the cast is kept by the parameter. The local tensor of a
    DTensor is a view, too, but of a tensor without a gradient.
    """
    base = weights._base
    parameter = weights if base is None or base.requires_grad != weights.requires_grad else base
    is_plain = parameter.shape == weights.shape and parameter.stride() == weights.stride()
    transposed = parameter.mT if parameter.ndim >= 2 else parameter
    is_transposed = transposed.shape == weights.shape and transposed.stride() == weights.stride()
    if weights.dtype == dtype or not (is_plain or is_transposed):
        return weights.to(dtype)
    copy = copy_once(parameter, lambda: parameter.to(dtype))
    return copy if is_plain else copy.mT


@contextlib.contextmanager
def experts_on_meta(model: PreTrainedModel) -> Iterator[None]:
    """Let the experts of a model on the meta device run inside the context.

    There, grouped products refuse float32. Batched products copy the weights of each token's
    experts, which takes no memory without values. A model with values does not change.
    """
    has_values = model.device.type != "meta"
    configs: list[Any] = (
        [] if has_values else [experts.config for experts in find_experts(model).values()]
    )
    kernels = [config._experts_implementation for config in configs]
    for config in configs:
        config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        for config, kernel in zip(configs, kernels, strict=True):
            config._experts_implementation = kernel
