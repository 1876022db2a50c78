"""The precision of matrix products: full float32 if accuracy matters, bf16 on fast hardware."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


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
    """Return a @ b in float32 from three TF32 products, which are faster than one in float32.

    Each factor is split into a TF32 part and a remainder. The product of both remainders, 2^-22 of
    the whole, is left out (3xTF32 of NVIDIA's CUTLASS). On a device without TF32, the result is a
    float32 product, computed more slowly.

    Args:
        a: [..., rows, n], fp32.
        b: [..., n, columns], fp32.
        out: Tensor that receives the product.
    """
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    # Add the smallest terms first.
    return torch.add((a_low @ b_high).add_(a_high @ b_low), a_high @ b_high, out=out)


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 values rounded to the ten bits of mantissa that TF32 has, and the rest."""
    # Add half of the last kept bit, then clear the 13 bits below it.
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
