"""Settings of the process: allocators, idle threads, open files, deterministic kernels, its end."""

import atexit
import contextlib
import logging
import os
import platform
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from llm.errors import ParallelError
from llm.runtime.world import ranks_per_node, world_from_environment

TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # huge pages, by madvise: one page fault per 2 MiB instead of 4 KiB
    "glibc.malloc.trim_threshold": 8 * 2**30,  # keep freed memory
    # Map only larger blocks: gradients of large matrices, which would leave holes in the heap.
    "glibc.malloc.mmap_threshold": 24 * 2**20,
}

_ACCELERATOR_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel", "/dev/dxg")
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_NUM_LOAD_SAMPLES, _LOAD_SAMPLE_SECONDS = 5, 0.01

logger = logging.getLogger("llm")


class ProcessEnd:
    """Ends the process after the exit handlers, before the interpreter frees its objects.

    A thread of gloo may have to free the last tensor that it has sent, which takes the lock of the
    interpreter. While the interpreter shuts down, this aborts the process, with another exit code.
    And a thread that is joined while the lock is held never ends.

    Make it before other libraries are imported: exit handlers run in reverse order.

    Attributes:
        exit_code: The exit code; None, and the interpreter frees its objects as usual.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.exit_code is None:
            return
        logging.shutdown()  # its own handler comes later
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, missing
                stream.flush()
        os._exit(self.exit_code)


def restart_with_kept_memory() -> None:
    """Restart this process with glibc's `TUNABLES`, if they help and the user has set no others.

    Each step frees its activations, and the next one allocates the same sizes. glibc returns this
    memory to the kernel, which maps it again page by page. glibc reads its settings only when a
    process starts.

    The process keeps its id, its arguments and its environment, so the launcher does not notice.
    Does nothing on a machine with an accelerator, without glibc, or if the user has chosen an
    allocator or settings.
    """
    if not _restart_helps(os.environ):
        return
    tunables = [f"{name}={value}" for name, value in TUNABLES.items()]
    user_tunables = os.environ.get("GLIBC_TUNABLES")
    if user_tunables:
        tunables.insert(0, user_tunables)
    os.environ["GLIBC_TUNABLES"] = ":".join(tunables)
    # exec drops the contents of the buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _restart_helps(environment: Mapping[str, str]) -> bool:
    """Return whether glibc allocates the activations, and the user has chosen no settings."""
    if any(Path(device).exists() for device in _ACCELERATOR_DEVICES):
        return False  # the activations are in the accelerator's memory
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False  # the user's settings, or ours from before the restart
    if any(allocator in environment.get("LD_PRELOAD", "") for allocator in _OTHER_ALLOCATORS):
        return False
    return bool(sys.executable) and platform.libc_ver()[0] == "glibc"


def limit_spin_wait() -> None:
    """Let idle OpenMP threads sleep early if others use the cores; call before torch loads.

    By default they spin while they wait for each other. If the machine has nothing else to do, a
    small model trains 10 % faster this way; as soon as another process needs a core, it takes twice
    as long.
    """
    if _are_cores_shared():
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _are_cores_shared() -> bool:
    """Return whether other processes run on this machine in each of several samples of the load."""
    if ranks_per_node(os.environ, world_from_environment().world_size) > 1:
        return True
    for _ in range(_NUM_LOAD_SAMPLES):
        try:
            num_running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        except OSError:
            return True
        if int(num_running) <= 1:  # only this process runs
            return False
        time.sleep(_LOAD_SAMPLE_SECONDS)
    return True


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one; call before process groups form.

    The soft limit is 1,024 on most systems. Each gloo group and the store on rank 0 keep one
    connection to every rank, so about 500 ranks would exhaust it.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses an unlimited number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expand_segments() -> None:
    """Let segments of GPU memory grow, unless the user has set the allocator up; call before CUDA.

    Once a segment has grown, its free blocks can hold larger tensors too. Less memory is lost to
    gaps when shapes change, for example between training, evaluation and saving.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def allocator_settings() -> str:
    """Return the allocator's settings, reading the variables in torch's order."""
    settings = (os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ)
    return next(settings, "defaults")


_COMPILE_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_private_compile_cache() -> None:
    """Keep compiled code in a folder that only this user can open, unless the user has chosen one.

    Call it before anything is compiled. PyTorch runs and unpickles what it finds in
    /tmp/torchinductor_USER, and another user of the node may have made that folder first.

    Raises:
        OSError: The folder of temporary files cannot be written.
    """
    temporary_root = Path(tempfile.gettempdir())
    default_prefix = str(temporary_root / "torchinductor_")
    # Once torch is imported, the variable names its default, and child processes inherit it.
    if not os.environ.get(_COMPILE_CACHE_VARIABLE, default_prefix).startswith(default_prefix):
        return
    folder = temporary_root / f"llm_compiled_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private_folder(folder):
        folder = _make_temporary_cache(folder)
    os.environ[_COMPILE_CACHE_VARIABLE] = str(folder)


def _make_temporary_cache(shared_folder: Path) -> Path:
    """Return a folder for this process instead of one that others may have written in."""
    folder = Path(tempfile.mkdtemp(prefix=f"{shared_folder.name}_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning(
        f"Users other than you may have written in {shared_folder}, so compiled code is kept "
        f"in {folder} instead, which this process removes at its end. Remove {shared_folder}, "
        f"or export {_COMPILE_CACHE_VARIABLE} with a folder that only you can write."
    )
    return folder


def _is_private_folder(path: Path) -> bool:
    """Return whether a path is a folder, not a link, that only this user can open."""
    status = path.lstat()
    is_closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return is_closed and status.st_uid == os.geteuid()


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Choose deterministic kernels; enter it before the first matrix product on a GPU.

    Some kernels add atomically, in an order that differs from run to run: the backward passes of
    flash attention and of embeddings, and cuBLAS when streams share its workspace.

    Raises:
        ParallelError: An operation has no deterministic kernel.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a workspace for each stream
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers
    torch.use_deterministic_algorithms(True)
    # Otherwise every new tensor is filled first, which does not change a correct program's results.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise ParallelError(
            f"--deterministic: {str(error).split(',')[0]} on this device; leave the option out, or "
            "choose another --attention_implementation or model."
        ) from error
