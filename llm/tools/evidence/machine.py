"""Versions, devices and launcher of the ranks of a job, without names of users and hosts."""

import contextlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from llm.runtime.world import device_of, task_launcher, world_from_environment
from llm.tools.preflight import describe_rank

_PACKAGES = (
    *("accelerate", "transformers", "numpy", "torchao", "oneccl", "oneccl-bind-pt"),
    *("triton", "pytorch-triton-rocm", "pytorch-triton-xpu"),
)
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")
_SITE_VARIABLES = ("SLURM_CLUSTER_NAME", "NERSC_HOST", "LMOD_SYSTEM_NAME")


def print_process() -> None:
    """Print the description of this process as one line of JSON; every rank calls it."""
    sys.stdout.write(json.dumps(describe_process()) + "\n")


def describe_process() -> dict[str, Any]:
    """Return device, versions and host of this process. The host is only counted later."""
    import torch

    from llm.metrics.hardware import GIB, device_memory
    from llm.parallel.accelerator import default_precision

    device = device_of(world_from_environment())
    description = describe_rank(world_from_environment())
    memory = device_memory(device)
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    return {
        "device": kind,
        "card": _processor_name() if kind == "cpu" else description["kind"],
        "memory_gib": None if memory is None else round(memory / GIB, 1),
        "default_precision": default_precision(device)["mixed_precision"],
        "processor": platform.machine(),
        "versions": description["versions"] | _find_versions(device.type),
        "host": description["host"],
    }


def _find_versions(device_type: str) -> dict[str, str]:
    """Return the versions of the installed packages, of CUDA or ROCm, and of the driver."""
    import torch

    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    system_versions = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": _read_driver_version(device_type),
    }
    return versions | {name: text for name, text in system_versions.items() if text is not None}


def _read_driver_version(device_type: str) -> str | None:
    """Return the version of the device's driver; None if the system does not tell."""
    if device_type == "xpu":
        import torch

        version = getattr(torch.xpu.get_device_properties(), "driver_version", None)
        return None if version is None else str(version)
    for path, pattern in ((_NVIDIA_DRIVER, r" (\d+\.[\d.]+) "), (_AMD_DRIVER, r"(\S+)")):
        try:
            match = re.search(pattern, path.read_text(encoding="utf-8"))
        except OSError:
            continue
        if device_type == "cuda" and match is not None:
            return match[1]
    return None


def _processor_name() -> str:
    """Return the model of the processor, or its architecture if the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*: (.*)$", text, flags=re.MULTILINE)
    return platform.machine() if match is None else match[1].strip()


def describe_job(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the machine of a job: values of its ranks, and numbers of ranks and nodes.

    Args:
        descriptions: The description of each rank. A value that differs between ranks becomes the
            list of the different values.
    """
    job: dict[str, Any] = {
        "ranks": len(descriptions),
        "nodes": len({description["host"] for description in descriptions}),
        "launcher": _launcher_name(),
        "scheduler": _scheduler_name(os.environ),
    }
    for name in ("device", "card", "memory_gib", "default_precision", "processor", "versions"):
        values = []
        for description in descriptions:
            if description[name] not in values:
                values.append(description[name])
        job[name] = values[0] if len(values) == 1 else values
    return job


def _launcher_name() -> str:
    launcher = task_launcher(os.environ)
    if launcher is None and "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return launcher or "none"


def _scheduler_name(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environ:
        return "slurm"
    return "pbs" if "PBS_JOBID" in environ else "none"


def site_name(environ: Mapping[str, str]) -> str | None:
    """Return the name of the cluster that the system tells; None if it tells none."""
    names = (environ[name] for name in _SITE_VARIABLES if environ.get(name))
    return next(names, None)
