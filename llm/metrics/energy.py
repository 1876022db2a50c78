"""The energy that the devices of a start have used, from the counters of NVIDIA GPUs."""

import math
from typing import Any

import torch
import torch.distributed as dist


class EnergyCounter:
    """Joules that the devices of all ranks have used since the counters were made.

    The counter is NVML's, which the package nvidia-ml-py reads; GPUs have it from Volta on, parts
    of a GPU (MIG) have none. Reading it does not wait for the device.

    Args:
        device: Device of this process.
        world_size: Number of ranks; each has a counter.
    """

    def __init__(self, device: torch.device, *, world_size: int) -> None:
        self._world_size = world_size
        self._has_gpu = device.type == "cuda"
        self._nvml_and_handle = _open_nvml_device(device) if self._has_gpu else None
        self._start_joules = self._read()

    def total_joules(self) -> float | None:
        """Return the joules of all ranks in this start, or None if a rank cannot measure them.

        Every rank calls it: an all-reduce on the host, by gloo.
        """
        if not self._has_gpu:
            return None
        joules = torch.tensor(self._read() - self._start_joules, dtype=torch.float64)
        if self._world_size > 1:
            dist.all_reduce(joules)
        return joules.item() if math.isfinite(joules.item()) else None

    def _read(self) -> float:
        """Return the joules since the driver was loaded; NaN if they are unknown."""
        if self._nvml_and_handle is None:
            return math.nan
        pynvml, handle = self._nvml_and_handle
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
        except pynvml.NVMLError:
            return math.nan


def _open_nvml_device(device: torch.device) -> tuple[Any, Any] | None:
    """Return the module pynvml and its handle of a GPU; None without NVML or without the GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # The order of NVML's indices differs from CUDA's; UUIDs are the same.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except (pynvml.NVMLError, AttributeError):  # no driver, a slice of a GPU, or an AMD GPU
        return None
