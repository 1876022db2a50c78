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
        dispatch_key = f"Autocast{device_type.upper()}"
        kernel = functools.partial(_autocast_grouped_product, device_type, dispatch_key)
        _LIBRARY.impl("_grouped_mm", kernel, dispatch_key)


def _autocast_grouped_product(
    device_type: str, dispatch_key: str, inputs: Tensor, weights: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute a grouped matrix product in the dtype of autocast on a device type."""
    autocast_keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
    with torch._C._ExcludeDispatchKeyGuard(autocast_keys):  # dispatch continues below autocast
        dtype = torch.get_autocast_dtype(device_type)
        inputs, weights = inputs.to(dtype), _cast_weights(weights, dtype)
        product: Tensor = torch.ops.aten._grouped_mm(inputs, weights, *args, **kwargs)
    return product


def _cast_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the weights of experts, or a transposed view of them, to another dtype.

    Inside `cast_weights_once`, a parameter is cast once. The cast is stored by parameter because
    each call gets a new view. The local tensor of a DTensor is a view, too, but of a tensor without
    a gradient.
    """
    parameter, view_base = weights, weights._base
    if view_base is not None and view_base.requires_grad == weights.requires_grad:
        parameter = view_base
    is_parameter = _has_same_layout(weights, parameter)
    is_transposed = parameter.ndim >= 2 and _has_same_layout(weights, parameter.mT)
    if weights.dtype == dtype or not (is_parameter or is_transposed):
        return weights.to(dtype)
    cast_parameter = copy_once(parameter, lambda: parameter.to(dtype))
    return cast_parameter if is_parameter else cast_parameter.mT


def _has_same_layout(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have equal shapes and strides."""
    return first.shape == second.shape and first.stride() == second.stride()


@contextlib.contextmanager
def experts_on_meta(model: PreTrainedModel) -> Iterator[None]:
    """Let the experts of a model on the meta device run inside the context.

    On that device, grouped products refuse float32, so the experts compute batched products. These
    copy the weights of each token's experts, but on the meta device this takes no memory. A model
    on another device does not change.
    """
    expert_configs: list[Any] = []
    if model.device.type == "meta":
        expert_configs = [experts.config for experts in find_experts(model).values()]
    implementations = [expert_config._experts_implementation for expert_config in expert_configs]
    for expert_config in expert_configs:
        expert_config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        for expert_config, implementation in zip(expert_configs, implementations, strict=True):
            expert_config._experts_implementation = implementation
