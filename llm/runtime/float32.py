"""The precision of float32 matrix products, which TF32 lowers to that of ten bits."""

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
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
