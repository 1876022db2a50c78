"""Settings that make training on a CPU faster: glibc's allocator and the spinning of threads."""

import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from llm.runtime.world import ranks_per_node, world_from_environment

TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # huge pages, by madvise: one page fault per 2 MiB instead of 4 KiB
    "glibc.malloc.trim_threshold": 8 * 2**30,  # keep freed memory
    # Map only larger blocks: gradients of large matrices, which would leave holes in the heap.
    "glibc.malloc.mmap_threshold": 24 * 2**20,
}

_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel", "/dev/dxg")
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_LOOKS, _LOOK_SECONDS = 5, 0.01


def restart_with_kept_memory() -> None:
    """Restart this process with the settings above, if they help and nothing forbids it.

    Each step frees its activations, and the next one allocates the same sizes. glibc returns this
    memory to the kernel, which maps it again page by page. glibc reads its settings only when a
    process starts.

    The process keeps its id, its arguments and its environment, so the launcher does not notice.
    Does nothing on a machine with an accelerator, without glibc, or if the user has chosen an
    allocator or settings.
    """
    if not _helps(os.environ):
        return
    settings = [f"{name}={value}" for name, value in TUNABLES.items()]
    others = os.environ.get("GLIBC_TUNABLES")
    os.environ["GLIBC_TUNABLES"] = ":".join([*([others] if others else []), *settings])
    # exec drops the contents of the buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _helps(environment: Mapping[str, str]) -> bool:
    if any(Path(device).exists() for device in _ACCELERATORS):
        return False  # the activations are in the accelerator's memory
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False  # the user's settings, or ours from before the restart
    if any(name in environment.get("LD_PRELOAD", "") for name in _OTHER_ALLOCATORS):
        return False
    return bool(sys.executable) and platform.libc_ver()[0] == "glibc"


def limit_spin_wait() -> None:
    """Let idle OpenMP threads sleep early if others use the cores; call before torch loads.

    By default they spin while they wait for each other. If the machine has nothing else to do, a
    small model trains 10 % faster this way; as soon as another process needs a core, it takes twice
    as long.
    """
    if _others_run():
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _others_run() -> bool:
    """Return whether other processes run on this machine in every one of several samples."""
    if ranks_per_node(os.environ, world_from_environment().world_size) > 1:
        return True
    for _ in range(_LOOKS):
        try:
            running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        except OSError:
            return True
        if int(running) <= 1:  # this process
            return False
        time.sleep(_LOOK_SECONDS)
    return True
