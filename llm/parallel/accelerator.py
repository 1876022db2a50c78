"""Accelerate's process groups, in a precision that the device has."""

import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, is_fp8_available
from torch.distributed import distributed_c10d

from llm.errors import ParallelError

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

logger = logging.getLogger("llm.parallel")


def check_device(device: torch.device) -> None:
    """Refuse to train on the CPU of a machine whose NVIDIA GPUs PyTorch does not see.

    Raises:
        ParallelError: Says what to install, and how to ask for the CPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if device.type != "cpu" or hidden or not NVIDIA_DRIVER.exists():
        return
    reason = f"reaches none of its GPUs: check that the driver supports CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        reason = "is built without CUDA: install the build for it from pytorch.org"
    raise ParallelError(
        f"This machine has an NVIDIA driver, but PyTorch {torch.__version__} {reason}. To train on "
        "the CPU all the same, set CUDA_VISIBLE_DEVICES to an empty string."
    )


def check_precision(mixed_precision: str, device: torch.device) -> None:
    """Refuse a precision that the device cannot compute in.

    Raises:
        ParallelError: Names the precision, the device and an alternative.
    """
    if mixed_precision == "fp8":
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
    if mixed_precision in ("bf16", "fp16") and device.type == "cpu" and not _has_half_products():
        logger.warning(
            f"--mixed_precision {mixed_precision} takes several times as long as no on this CPU, "
            "which has no arithmetic for it."
        )
    # PyTorch counts GPUs that emulate it, such as V100 and T4, many times slower than fp16.
    if (
        mixed_precision == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ParallelError("--mixed_precision bf16 is not supported by this GPU; use fp16 or no.")
    if mixed_precision == "fp16" and device.type == "mps":
        raise ParallelError("--mixed_precision fp16 is not supported on mps; use bf16 or no.")


def _has_half_products() -> bool:
    """Whether the CPU multiplies matrices of half precision."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def make_accelerator(
    mixed_precision: str, *, device: torch.device, timeout: float = 600.0
) -> Accelerator:
    """Form the process groups.

    Accelerate has two ways of its own on a CPU: it joins several processes only when
    told to use the CPU, and trains fp16 as float32 without a word. The first is told
    here; the second is left to `AcceleratedStrategy`, which does that autocast itself.

    Args:
        mixed_precision: no, fp8, fp16 or bf16.
        device: Of this process.
        timeout: Seconds that a step may take, 0 for any number; messages may take longer, so that
            a rank that hangs is named first.
    """
    patience = timedelta(seconds=3 * timeout, minutes=30) if timeout else timedelta(days=365)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of groups made later
        setattr(distributed_c10d, name, patience)
    on_cpu = device.type == "cpu"
    # Else DistributedDataParallel is told the rank's number on its node as its device, which is
    # another one where a task sees its own GPU only. Batches are on the device already.
    os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    data_parallel = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True, broadcast_buffers=False
    )
    return Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if on_cpu and mixed_precision == "fp16" else mixed_precision,
        kwargs_handlers=[data_parallel, InitProcessGroupKwargs(timeout=patience)],
    )
