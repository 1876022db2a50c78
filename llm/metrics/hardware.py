"""Peak FLOP/s of a device, and the memory that a process uses."""

import logging
import math
import os
import re
import time
from pathlib import Path

import torch

GIB = 2**30

PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 150.0,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "MI355X": 2516.0,
    "MI325X": 1307.0,
    "MI300X": 1307.0,
    "MI300A": 980.6,
    "MI250X": 191.5,
    "GPU Max 1550": 419.0,
}
"""Dense bf16 or fp16 TFLOP/s of one device, from the makers' data sheets, without sparsity and with
sums in fp32. Devices are counted like in torch: a die of an MI250X, a tile of a GPU Max."""

_CPU_MATRIX_SIZES = (512, 1024, 2048)
_ACCELERATOR_MATRIX_SIZES = (2048, 4096, 8192)  # smaller products would measure kernel launches
_SECONDS_PER_SIZE = 0.1
_MAX_PRODUCT_SECONDS = 0.5

logger = logging.getLogger("llm")


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of a device in half precision, or None when unknown."""
    names = [
        name
        for name in PEAK_TFLOPS
        # Match whole words: an A4000 is not an A40.
        if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", device_name, re.IGNORECASE)
    ]
    return PEAK_TFLOPS[max(names, key=len)] * 1e12 if names else None


def device_peak_flops(device: torch.device, mixed_precision: str) -> float:
    """Return the peak FLOP/s of this process' device: the maker's figure, or a measured one.

    Args:
        device: The device of the model.
        mixed_precision: no, fp8, fp16 or bf16. fp8 has the peak of bf16, because only some of the
            matrix products are computed in fp8.
    """
    if device.type in ("cuda", "xpu") and mixed_precision != "no":
        flops = peak_flops(torch.get_device_module(device).get_device_name(device))
        if flops is not None:
            return flops
    dtype = {"no": torch.float32, "fp16": torch.float16}.get(mixed_precision, torch.bfloat16)
    measured_peak = measure_flops(device, dtype)
    logger.info(
        f"peak: at least {measured_peak / 1e12:.3g} TFLOP/s per device, which matrix products in "
        f"{dtype} reach; MFU is the share of that"
    )
    return measured_peak


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best FLOP/s of square matrix products, each size repeated for 0.1 s.

    The sizes grow while larger products are faster and take less than 0.5 s. Other programs slow
    the products down, so the result is a lower bound.
    """
    best_flops = 0.0
    for size in _CPU_MATRIX_SIZES if device.type == "cpu" else _ACCELERATOR_MATRIX_SIZES:
        if best_flops and 2.0 * size**3 / best_flops > _MAX_PRODUCT_SECONDS:
            break
        # One block, so that the C library returns it to the system when it is freed.
        matrices = torch.ones(3, size, size, device=device, dtype=dtype)
        flops = 2.0 * size**3 / _time_fastest_product(matrices)
        if flops <= best_flops:
            break
        best_flops = flops
    return best_flops


def _time_fastest_product(matrices: torch.Tensor) -> float:
    """Return the shortest time of a product of two matrices, repeated for 0.1 s.

    Args:
        matrices: Two factors, and memory for their product [3, size, size].
    """
    factor, second_factor, product = matrices
    fastest_seconds = math.inf
    timing_start = product_end = time.perf_counter()
    while product_end - timing_start < _SECONDS_PER_SIZE:
        synchronize_device(matrices.device)
        product_start = time.perf_counter()
        torch.mm(factor, second_factor, out=product)
        synchronize_device(matrices.device)
        product_end = time.perf_counter()
        fastest_seconds = min(fastest_seconds, product_end - product_start)
    return fastest_seconds


def synchronize_device(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device, or of the machine for a CPU; None if unknown."""
    if device.type == "cpu":
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
    device_module = torch.get_device_module(device)
    if not (hasattr(device_module, "get_device_properties") and device_module.is_available()):
        return None
    memory: int = device_module.get_device_properties(device).total_memory
    return memory


def num_multiprocessors(device: torch.device) -> int | None:
    """Return the number of multiprocessors of a device; None if it does not report one."""
    backend = torch.get_device_module(device)
    if not (hasattr(backend, "get_device_properties") and backend.is_available()):
        return None
    return getattr(backend.get_device_properties(device), "multi_processor_count", None)


def memory_in_use(device: torch.device) -> int | None:
    """Return the bytes that this process uses; None if the system does not report them.

    On a GPU this is the peak since the last call, elsewhere the process's resident memory.
    """
    device_module = torch.get_device_module(device)
    if hasattr(device_module, "max_memory_allocated"):
        peak: int = device_module.max_memory_allocated(device)
        device_module.reset_peak_memory_stats(device)
        return peak
    return resident_memory()


def resident_memory() -> int | None:
    """Return the bytes of this process in the host's memory; None if they are unknown."""
    try:
        resident_pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that the device's memory is full."""
    # torch.OutOfMemoryError comes from torch's allocators; NCCL and MPS raise other classes.
    return "out of memory" in str(error).lower()
