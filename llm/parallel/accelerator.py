"""Accelerate's process groups, in a precision that the device has."""

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, is_torchao_available
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from llm.errors import ParallelError
from llm.parallel.options import PrecisionOptions
from llm.runtime.float32 import has_half_products
from llm.runtime.logging import SAME_ON_ALL_RANKS
from llm.runtime.world import is_cpu_chosen, world_from_environment

CPU_BUCKET_MB = 25
"""Size of the gradients in one all-reduce, in MiB; torch's default."""
GPU_BUCKET_MB = 100
"""The same on accelerators. Their links need large messages to reach full bandwidth."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

logger = logging.getLogger("llm.parallel")


def check_gpus_visible(device: torch.device) -> None:
    """Refuse to train on the CPU if PyTorch does not see the machine's NVIDIA GPUs.

    Raises:
        ParallelError: Says what to install, and how to ask for the CPU.
    """
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or is_cpu_chosen()
    if device.type != "cpu" or hides_gpus or not NVIDIA_DRIVER.exists():
        return
    reason = f"reaches none of its GPUs: check that the driver supports CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        reason = "is built without CUDA: install the build for it from pytorch.org"
    raise ParallelError(
        f"This machine has an NVIDIA driver, but PyTorch {torch.__version__} {reason}. To train on "
        "the CPU all the same, set CUDA_VISIBLE_DEVICES to an empty string."
    )


def default_precision(device: torch.device) -> dict[str, Any]:
    """Return a device's default precision options, by name."""
    is_cuda = device.type == "cuda"
    has_bf16 = is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    return {"mixed_precision": "bf16" if has_bf16 else "no", "tf32": is_cuda}


def set_float32_precision(options: PrecisionOptions, device: torch.device) -> None:
    """Set the precision of float32 matrix products on a GPU.

    The newer setting, `torch.backends.cuda.matmul.fp32_precision`, is not used: the compiler of
    torch 2.13 reads the older one, which raises once the newer one has been set alone.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if options.tf32 else "highest")


def _has_float8_products(device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU that multiplies in float8."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def check_precision(options: PrecisionOptions, device: torch.device) -> None:
    """Refuse a precision that the device does not support.

    Raises:
        ParallelError: Names the precision, the device and an alternative.
    """
    precision = options.mixed_precision
    if precision == "fp8":
        _check_fp8_layers(device)
    if options.fp8_head:
        _check_fp8_head(device, precision)
    if precision in ("bf16", "fp16"):
        _warn_of_slow_products(device, precision)
    is_bf16_on_cuda = precision == "bf16" and device.type == "cuda"
    # PyTorch counts GPUs that emulate it, such as V100 and T4; they are many times slower than with
    # fp16.
    if is_bf16_on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ParallelError("--mixed_precision bf16 is not supported by this GPU; use fp16 or no.")
    if precision == "fp16" and device.type == "mps":
        raise ParallelError("--mixed_precision fp16 is not supported on mps; use bf16 or no.")


def _check_fp8_layers(device: torch.device) -> None:
    """Refuse linear layers in float8 without a GPU or a library for them."""
    if not _has_float8_products(device):
        raise ParallelError(
            f"--mixed_precision fp8 needs an NVIDIA GPU of compute capability 8.9 or more, and "
            f"this process runs on {device.type}; use bf16 or no."
        )
    if not is_torchao_available():
        raise ParallelError(
            "--mixed_precision fp8 needs a library with its kernels: pip install torchao."
        )


def _check_fp8_head(device: torch.device, precision: str | None) -> None:
    """Refuse an output head in float8 without a GPU for it, or after layers in float32 or fp16."""
    if not _has_float8_products(device):
        raise ParallelError(
            "--fp8_head needs an NVIDIA GPU of compute capability 8.9 or more, and this "
            f"process runs on {device.type}; leave it out."
        )
    if precision not in ("bf16", "fp8"):
        raise ParallelError(
            f"--fp8_head goes with --mixed_precision bf16 or fp8, not {precision}; leave it out."
        )


def _warn_of_slow_products(device: torch.device, precision: str) -> None:
    """Warn of `bf16` or `fp16` on a CPU that has no instructions for matrix products in it."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    if not has_half_products(device, dtype):
        alternative = "bf16" if precision == "fp16" and has_half_products(device) else "no"
        logger.warning(
            f"--mixed_precision {precision} takes many times as long as {alternative} on this CPU, "
            f"which has no instructions for {precision} matrix products; use {alternative}.",
            extra=SAME_ON_ALL_RANKS,
        )


def form_default_group(device: torch.device, *, timeout: timedelta) -> None:
    """Form the group of all ranks, unless it exists or there is one rank; all ranks call it.

    Accelerate would form a group with NCCL only and its default time-out of ten minutes, and the
    first `barrier` would guess the device of each rank. Gloo carries values on the host: each gloo
    group of all ranks costs a process one file descriptor per rank.
    """
    if dist.is_initialized() or world_from_environment().world_size == 1:
        return
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", device_id=device, timeout=timeout)
    unbind_unsplittable_group(device)


def unbind_unsplittable_group(device: torch.device) -> None:
    """Unbind the default group from its device if the backend of the device cannot split groups.

    PyTorch forms the groups of a mesh by a split of a default group that is bound to a device. Only
    NCCL (and RCCL) can: Intel's `xccl` raises an error (pytorch 186548). Without a bound device,
    PyTorch calls `new_group`, which every backend has. The binding has no other effect there:
    barriers use gloo, and collectives the device of their tensor.
    """
    group: Any = dist.group.WORLD
    if not group._get_backend(device).supports_splitting:
        group.bound_device_id = None


def ddp_settings(device: torch.device, options: PrecisionOptions) -> DistributedDataParallelKwargs:
    """Return how DistributedDataParallel sends gradients between devices of this kind."""
    has_bf16_messages = options.all_reduce_dtype == "bf16"
    kwargs_class = _Bf16AllReduceKwargs if has_bf16_messages else DistributedDataParallelKwargs
    return kwargs_class(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        bucket_cap_mb=CPU_BUCKET_MB if device.type == "cpu" else GPU_BUCKET_MB,
    )


class _Bf16AllReduceKwargs(DistributedDataParallelKwargs):  # type: ignore[misc]
    """Lets DistributedDataParallel all-reduce in bf16.

    PyTorch's hook for this refuses CPUs, and divides by the number of ranks after rounding.
    """

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        if model.process_group.size() > 1:  # a launcher may start one rank
            model.register_comm_hook(model.process_group, _all_reduce_in_bf16)


def _all_reduce_in_bf16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Return the mean over ranks of a bucket of gradients."""
    gradients: Tensor = bucket.buffer()
    bf16_gradients = gradients.div_(group.size()).to(torch.bfloat16)
    work = dist.all_reduce(bf16_gradients, group=group, async_op=True)

    def copy_back(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(future.value()[0])

    future: torch.futures.Future[Tensor] = work.get_future().then(copy_back)
    return future


def order_gradient_buckets(loss: nn.Module, device: torch.device) -> None:
    """Let DistributedDataParallel order its buckets of gradients now, by a backward pass.

    By default it does so after its first backward pass, in the order of arriving gradients. An
    all-reduce of more than two ranks adds gradients in an order that depends on their place in a
    bucket, so the first step of a resumed run would differ in the last bits from the original run.

    Args:
        loss: The prepared loss; nothing happens unless it is a DistributedDataParallel of more than
            two ranks.
        device: Device of the model.
    """
    if not isinstance(loss, DistributedDataParallel) or loss.process_group.size() <= 2:
        return
    ids = torch.zeros((1, 8), dtype=torch.long, device=device)
    with torch.compiler.set_stance("force_eager"):  # no graph for this shape
        objective, _ = loss(ids, ids)
        objective.backward()
    loss.zero_grad(set_to_none=True)


def make_accelerator(
    options: PrecisionOptions, *, device: torch.device, timeout: float = 600.0
) -> Accelerator:
    """Form the process groups, and return Accelerate's view of them; every rank must call it.

    Args:
        options: The precision; the accelerator stores it.
        device: Device of this process.
        timeout: Seconds that a step may take; 0: no limit. Collectives time out later, so that the
            watchdog names a hung rank first.
    """
    collective_timeout = (
        timedelta(seconds=3 * timeout, minutes=30) if timeout else timedelta(days=365)
    )
    for constant in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of groups formed later
        setattr(distributed_c10d, constant, collective_timeout)
    form_default_group(device, timeout=collective_timeout)
    set_float32_precision(options, device)
    is_cpu = device.type == "cpu"
    # By default DistributedDataParallel gets the local rank as its device. This is wrong if the
    # launcher shows each task just one GPU. Batches are already on the device.
    os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    is_fp16_on_cpu = is_cpu and options.mixed_precision == "fp16"
    accelerator = Accelerator(
        cpu=is_cpu,  # without it, Accelerate does not join the processes of a CPU
        mixed_precision="no" if is_fp16_on_cpu else options.mixed_precision or "no",
    )
    accelerator.ddp_handler = ddp_settings(device, options)
    if is_fp16_on_cpu:
        # Accelerate would silently train in float32: `AcceleratedStrategy` does this autocast.
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator
