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
        _LIBRARY.impl("_grouped_mm", functools.partial(_grouped_product, device_type, key), key)


def _grouped_product(
    device_type: str, key: str, lhs: Tensor, rhs: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):  # dispatch continues below autocast
        dtype = torch.get_autocast_dtype(device_type)
        lhs, rhs = lhs.to(dtype), rhs.to(dtype)
        product: Tensor = torch.ops.aten._grouped_mm(lhs, rhs, *args, **kwargs)
    return product
