"""The memory that a part of a run takes at its peak, and the memory that a process may use."""

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch

from llm.errors import ConfigError
from llm.metrics.hardware import device_memory, resident_memory

_HOST_SHARE = 0.8
"""Usable fraction of the host's memory; libraries, the text and the page cache take the rest."""
_DEVICE_SHARE = 0.9
"""Usable fraction of a device's memory; the rest is for gaps between tensors of different sizes."""


def usable_memory(device: torch.device, *, ranks_on_host: int) -> int:
    """Return the bytes that this process may use for tensors; on a CPU, for everything.

    Args:
        device: The device of the process.
        ranks_on_host: Processes that share the host's memory.

    Raises:
        ConfigError: The system reports neither the memory nor a process's peak use of it.
    """
    memory, usable_share = None, _DEVICE_SHARE
    device_module = torch.get_device_module(device)
    if device.type == "cpu":
        memory, usable_share = host_memory(), _HOST_SHARE / ranks_on_host
    elif hasattr(device_module, "max_memory_allocated"):
        memory = device_memory(device)
        with contextlib.suppress(AttributeError, RuntimeError):  # some drivers do not report it
            # The memory of the context, of collectives, and of other processes is not free.
            memory = device_module.mem_get_info(device)[0] + device_module.memory_reserved(device)
    if memory is not None:
        return int(usable_share * memory)
    raise ConfigError(
        f"--per_device_train_batch_size auto cannot measure the memory of {device.type}; give a "
        "number. `llm-trainers plan` with auto computes one."
    )


def allocated_memory(device: torch.device) -> int:
    """Return the bytes of the tensors on a device; on a CPU, the process's resident memory.

    0 if the system does not report it; a peak then includes the memory before it.
    """
    if device.type != "cpu":
        allocated: int = torch.get_device_module(device).memory_allocated(device)
        return allocated
    return resident_memory() or 0


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` report only what follows, if the system allows it."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the present memory
    else:
        torch.get_device_module(device).reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that `allocated_memory` has reached since `reset_peak_memory`.

    If the system cannot reset the peak of a process, it is the peak since the process started.
    """
    if device.type != "cpu":
        peak: int = torch.get_device_module(device).max_memory_allocated(device)
        return peak
    with contextlib.suppress(OSError):
        high_water_mark = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if high_water_mark is not None:
            return int(high_water_mark[1]) * 1024
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit


def host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory, limited by this process's control groups (cgroups).

    Args:
        root: The folder that contains `proc` and `sys`.
    """
    limits = [device_memory(torch.device("cpu"))]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2 has one line without names
                limits += _read_memory_limits(root / "sys/fs/cgroup", controllers, Path(group))
    return min((limit for limit in limits if limit is not None), default=None)


def _read_memory_limits(cgroup_folder: Path, controllers: str, group: Path) -> list[int]:
    """Return the memory limits in bytes of a control group and the groups around it.

    Args:
        cgroup_folder: Where control groups are mounted.
        controllers: "memory" for version 1; "" for version 2.
        group: Absolute path of the group below the mount.
    """
    file_name = "memory.limit_in_bytes" if controllers else "memory.max"
    limits = []
    # In a container the path may belong to the host; the container's path is then the root.
    for path in (group, *group.parents):
        limit_path = cgroup_folder / controllers / path.relative_to("/") / file_name
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            limits.append(int(limit_path.read_text()))
    return limits
