"""Accelerate's process groups, in a precision that the device has."""

import logging
import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, is_fp8_available
from torch.distributed import distributed_c10d

from llm.errors import ParallelError
from llm.parallel.options import PrecisionOptions

logger = logging.getLogger("llm.parallel")


def check_precision(options: PrecisionOptions, device: torch.device) -> None:
    """Refuse a precision that the device cannot compute in.

    Raises:
        ParallelError: Names the precision, the device and an alternative.
    """
    precision = options.mixed_precision
    if precision == "fp8":
        capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        if not capable:
            raise ParallelError(
                f"--mixed_precision fp8 needs an NVIDIA GPU of compute capability 8.9 or more, and "
                f"this process runs on {device.type}; use bf16 or no."
            )
        if not is_fp8_available():
            raise ParallelError(
                "--mixed_precision fp8 needs a library that has its kernels: "
                "pip install torchao, or transformer-engine[pytorch]."
            )
    has_half_matmul = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if precision in ("bf16", "fp16") and device.type == "cpu" and not has_half_matmul:
        logger.warning(
            f"--mixed_precision {precision} takes several times as long as no on this CPU, "
            "which has no arithmetic for it."
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ParallelError("--mixed_precision bf16 is not supported by this GPU; use fp16 or no.")
    if precision == "fp16" and device.type == "mps":
        raise ParallelError("--mixed_precision fp16 is not supported on mps; use bf16 or no.")


def make_accelerator(
    options: PrecisionOptions, *, device: torch.device, timeout: float = 600.0
) -> Accelerator:
    """Form the process groups; every rank must call it.

    Args:
        options: The precision, which the accelerator holds from here on.
        device: Of this process.
        timeout: Seconds that a step may take; 0: no limit. Collectives time out later than that,
            so that the watchdog names a hung rank first.
    """
    patience = timedelta(seconds=3 * timeout, minutes=30) if timeout else timedelta(days=365)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of groups made later
        setattr(distributed_c10d, name, patience)
    on_cpu = device.type == "cpu"
    # By default DistributedDataParallel is given the local rank as its device, which is wrong
    # where the job's launcher shows each task its own GPU only. Batches are on the device already.
    os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    data_parallel = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True, broadcast_buffers=False
    )
    fp16_on_cpu = on_cpu and options.mixed_precision == "fp16"
    accelerator = Accelerator(
        cpu=on_cpu,  # without it, Accelerate does not join the processes of a CPU
        mixed_precision="no" if fp16_on_cpu else options.mixed_precision,
        kwargs_handlers=[data_parallel, InitProcessGroupKwargs(timeout=patience)],
    )
    if fp16_on_cpu:
        # Accelerate would silently train in float32: `AcceleratedStrategy` does this autocast.
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator
