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


def has_half_products(device: torch.device) -> bool:
    """Return whether a device multiplies bf16 and fp16 matrices by instructions of its own.

    A CPU without them takes about ten times as long as for float32.
    """
    if device.type != "cpu":
        return True
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
