"""The C library's memory allocator, told to keep what a training step will ask for again.

A step frees its activations and asks for the same sizes in the next one. glibc gives such memory
back to the kernel and faults it in again page by page. Its settings can only be given before a
process begins.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # huge pages, by madvise: a fault for 2 MiB in place of 4 KiB
    "glibc.malloc.trim_threshold": 8 * 2**30,  # keep what is freed
    "glibc.malloc.mmap_threshold": 24 * 2**20,  # only what is larger comes from the kernel and
    # goes back to it: gradients of large matrices, which would leave holes
}

_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel", "/dev/dxg")
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def restart_with_kept_memory() -> None:
    """Start this process anew with the settings above, where they help and nothing forbids it.

    The process keeps its number, its arguments and its environment, so that a launcher does not
    notice. Does nothing on a machine with an accelerator, without glibc, or where the user has
    chosen an allocator or settings.
    """
    if not _helps(os.environ):
        return
    settings = [f"{name}={value}" for name, value in TUNABLES.items()]
    others = os.environ.get("GLIBC_TUNABLES")
    os.environ["GLIBC_TUNABLES"] = ":".join([*([others] if others else []), *settings])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _helps(environment: Mapping[str, str]) -> bool:
    if any(Path(device).exists() for device in _ACCELERATORS):
        return False  # the activations live there
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False  # the user's, or ours from before the restart
    if any(name in environment.get("LD_PRELOAD", "") for name in _OTHER_ALLOCATORS):
        return False
    return bool(sys.executable) and _has_glibc()


def _has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):
        return False
