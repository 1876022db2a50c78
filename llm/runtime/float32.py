"""The precision of matrix products (float32 for accuracy, bf16 for speed) and of long sums."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in full float32, regardless of the precision set outside.

    Use it if small entries of a product matter: for comparisons, and in a basis where an optimizer
    divides each entry by its size. TF32 on GPUs, and bf16 on some CPUs, have rounding errors of a
    thousandth of the largest entries. The setting applies to the whole process and is restored
    afterwards.
    """
    # torch has two settings. Its compiler, which may run inside, reads the older one and raises if
    # only the newer `fp32_precision` was changed.
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def has_half_products(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether a device has instructions that multiply matrices of a 16-bit type.

    A CPU without them takes at least ten times as long as for float32.

    Args:
        device: The device.
        dtype: bfloat16 or float16; many CPUs have instructions for the first only.
    """
    if device.type != "cpu":
        return True
    if dtype == torch.float16:
        mkldnn = torch.backends.mkldnn.is_available()
        return mkldnn and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def sums_dtype(device: torch.device) -> torch.dtype:
    """Return the type of sums of float32 values that are nearly exact in any order."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
