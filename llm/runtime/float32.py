"""The precision of matrix products: full float32 where it counts, bf16 where it is fast."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


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


def may_use_tf32(device: torch.device) -> bool:
    """Return whether a device multiplies float32 matrices in TF32, as `--tf32` lets it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    allowed = torch.get_float32_matmul_precision() != "highest"
    return allowed and torch.cuda.get_device_capability(device) >= (8, 0)


def product_of_three(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b in float32, by three products in TF32, which are faster than one in float32.

    Each factor is split into the part that TF32 can hold and the rest; the product of both rests,
    2^-22 of the whole, is left out (3xTF32 of NVIDIA's CUTLASS). Where the device does not use
    TF32, the result is that of float32, more slowly.

    Args:
        a: [..., rows, n], fp32.
        b: [..., n, columns], fp32.
        out: Where to write the product.
    """
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    # The smallest first.
    return torch.add((a_low @ b_high).add_(a_high @ b_low), a_high @ b_high, out=out)


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 values rounded to the ten bits of mantissa that TF32 has, and the rest."""
    # Half of the last kept bit is added, and the 13 bits below it are cleared.
    high = (values.view(torch.int32) + (1 << 12)).bitwise_and_(-(1 << 13))
    rounded = high.view(torch.float32)
    return rounded, values - rounded


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
