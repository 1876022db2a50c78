"""The precision of matrix products: full float32 where it counts, bf16 where it is fast."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in full float32, whatever precision is set outside.

    It is for products whose small entries count: comparisons, and bases in which an optimizer
    divides each entry by its own size. TF32 on GPUs, and bf16 on some CPUs, round by a thousandth
    of the largest entries. The setting is that of the process; the former one is restored.
    """
    # By the older of torch's two settings: its compiler, which may run inside, reads that one, and
    # raises where only the newer `fp32_precision` was changed.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
