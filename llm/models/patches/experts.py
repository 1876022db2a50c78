"""Autocast for the grouped matrix products of mixture-of-experts layers."""

import functools
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")  # its kernels are registered while it lives


@functools.cache
def autocast_grouped_products() -> None:
    """Let autocast cast the operands of `torch.nn.functional.grouped_mm`, as for `mm`.

    PyTorch lacks this rule (pytorch/pytorch#174763): the experts' weights are float32, and
    transformers casts their inputs to float32.
    """
    for device_type in ("cpu", "cuda", "xpu"):
        key = f"Autocast{device_type.upper()}"
        _LIBRARY.impl("_grouped_mm", functools.partial(_multiply, device_type, key), key)


def _multiply(
    device_type: str, key: str, left: Tensor, right: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):  # dispatch continues below autocast
        dtype = torch.get_autocast_dtype(device_type)
        left, right = left.to(dtype), right.to(dtype)
        product: Tensor = torch.ops.aten._grouped_mm(left, right, *args, **kwargs)
    return product
