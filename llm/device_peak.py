"""What a device can do at best, and how much memory a process takes: yardsticks for the log."""

import os
import re
import time
from pathlib import Path

import torch

PEAK_TFLOPS = {
    "A100": 312.0,
    "A10": 125.0,
    "A40": 150.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "L4": 121.0,
    "V100": 125.0,
    "MI250X": 191.5,
    "MI300X": 1307.0,
    "GPU Max 1550": 419.0,
}
"""Dense bf16 or fp16 TFLOP/s of one device (a die or tile, where torch counts those), from the
makers' data sheets."""

_SIZE = 1024
_SECONDS = 0.2


def peak_flops(device_name: str) -> float | None:
    """FLOP/s that a device can do at best in half precision, or None when unknown."""
    names = [
        name
        for name in PEAK_TFLOPS
        # As a whole word: an A4000 is no A40.
        if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", device_name, re.IGNORECASE)
    ]
    return PEAK_TFLOPS[max(names, key=len)] * 1e12 if names else None


def device_peak_flops(device: torch.device, mixed_precision: str) -> float:
    """FLOP/s of this process' device: the maker's figure in half precision, else measured.

    Args:
        device: Where the model is.
        mixed_precision: no, fp8, fp16 or bf16; the rate of fp8 is that of bf16, since only a part
            of the products is computed in it.
    """
    if device.type == "cuda" and mixed_precision != "no":
        known = peak_flops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    kinds = {"no": torch.float32, "fp16": torch.float16}
    return measured_flops(device, kinds.get(mixed_precision, torch.bfloat16))


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of products of 1024 x 1024 matrices, the best of as many as 0.2 s allow.

    Fewer are not enough: other programs make some of them slow.
    """
    one, other = (torch.ones(_SIZE, _SIZE, device=device, dtype=dtype) for _ in range(2))
    product = one @ other  # the first one also sets the library up
    best = 0.0
    began = time.perf_counter()
    while best == 0.0 or time.perf_counter() - began < _SECONDS:
        _wait(device)
        start = time.perf_counter()
        torch.mm(one, other, out=product)
        _wait(device)
        best = max(best, 2.0 * _SIZE**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_in_use(device: torch.device) -> int | None:
    """Bytes that this process has taken: the most on a GPU since the last call, or on the host.

    None where the system does not say.
    """
    backend = torch.get_device_module(device)
    if hasattr(backend, "max_memory_allocated"):
        peak: int = backend.max_memory_allocated(device)
        backend.reset_peak_memory_stats(device)
        return peak
    try:
        resident = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(resident) * os.sysconf("SC_PAGE_SIZE")
