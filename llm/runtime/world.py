"""What a process knows about itself: its rank, its signals, its randomness, its log.

Nothing here imports torch at the top: a command is refused, and data prepared,
before it is needed.
"""

import hashlib
import logging
import logging.handlers
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from llm.runtime.launcher import ranks_of, ranks_per_node

if TYPE_CHECKING:
    import torch

EXIT_PREEMPTED = 75
"""Exit code of a run that saved its state on a signal and wants to be started again."""


SAME_REQUEST_SECONDS = 3.0

_LOOKS, _LOOK_SECONDS = 5, 0.01

_LAUNCHER_SECONDS = 1.0
_launcher: int | None = None  # its process id, once `watch_launcher` knows it


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among all processes of the job."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0


def world_from_environment() -> World:
    """Read rank and world size as torchrun, `accelerate launch`, srun and mpiexec set them."""
    told = {**ranks_of(os.environ), **os.environ}
    return World(
        rank=int(told.get("RANK", "0")),
        local_rank=int(told.get("LOCAL_RANK", "0")),
        world_size=int(told.get("WORLD_SIZE", "1")),
    )


def launch_id() -> str | None:
    """A name that all processes of one launch share; a later launch may have it again.

    None when the process was started alone.
    """
    if world_from_environment().world_size == 1:
        return None
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "PBS_JOBID",
    )
    return ":".join(os.environ.get(name, "") for name in names)


def draw_seed() -> int:
    """A seed that nobody chose, equal on all processes of one launch."""
    launch = launch_id()
    source = os.urandom(8) if launch is None else launch.encode()
    return int.from_bytes(hashlib.blake2b(source, digest_size=4).digest(), "little")


def seed_step(*, seed: int, step: int, rank: int) -> None:
    """Start every generator anew for one step.

    Dropout and every other draw of a step depend on (seed, step, rank) alone, so
    there is no generator state to save, and a resumed step draws what it would have.

    Args:
        seed: Seed of the run.
        step: Number of the step, or a negative number outside of training.
        rank: The same for processes that compute one token's numbers together.
    """
    import numpy as np

    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    seed_torch(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def seed_torch(key: int) -> None:
    """Start torch's own generators anew, on the host and on the devices in use.

    `torch.manual_seed` would also note, with a traceback, what devices that nobody has touched
    shall be seeded with one day: milliseconds in each step.
    """
    import torch

    torch.default_generator.manual_seed(key)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed_all(key)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(key)


def is_launched() -> bool:
    """Whether torchrun, `accelerate launch`, srun or mpiexec started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or bool(ranks_of(os.environ))


def watch_launcher() -> None:
    """Notice when the launcher of this rank dies, after which nobody else would end the rank.

    Before training, the process then ends as on SIGTERM; in training, `Interruption` stops it. A
    process that was started by hand may outlive its shell.
    """
    global _launcher
    if is_launched():
        _launcher = os.getppid()
        threading.Thread(target=_end_if_orphaned, name="launcher-watch", daemon=True).start()


def _is_orphaned() -> bool:
    return _launcher is not None and os.getppid() != _launcher


def _end_if_orphaned() -> None:
    while not _is_orphaned():
        time.sleep(_LAUNCHER_SECONDS)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)


class Interruption:
    """Remembers a request to stop: SIGTERM, SIGINT or SIGUSR1; the launcher's death is one too.

    Schedulers send one of them before the time limit. The first is remembered and
    read between two steps; a second one ends the process at once. A scheduler that
    signals a launcher and its processes alike makes one request arrive twice, so what
    comes within seconds of the first is the same request.

    Args:
        after: Seconds from now after which to stop without a signal; None is never.
    """

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, *, after: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self._first = 0.0
        self._deadline = None if after is None else time.monotonic() + after

    @property
    def reason(self) -> str | None:
        """Why this process shall stop: a signal's name, or in words; None if it shall not."""
        if self.received is not None:
            return self.received.name
        if _is_orphaned():
            return "the death of its launcher"
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return "--exit_after" if late else None

    def watch(self) -> None:
        """Start to remember the signals (from the main thread)."""
        for number in self.signals:
            # A script's background job ignores Ctrl-C, which is meant for the foreground. torchrun
            # does not: it passes Ctrl-C on and soon kills ranks that ignore it.
            if is_launched() or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._first = signal.Signals(number), now
        elif now - self._first > SAME_REQUEST_SECONDS:
            os._exit(128 + number)


class SaveTimer:
    """Asks for a checkpoint once so many minutes have passed since the last one.

    Args:
        minutes: How many; None never asks.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else 60 * minutes
        self.restart()

    def restart(self) -> None:
        """A checkpoint was saved."""
        self._since = time.monotonic()
        self._asked = False

    def is_due(self) -> bool:
        """Whether to ask now; true once for every checkpoint, since the answer takes a step."""
        late = self._seconds is not None and time.monotonic() - self._since >= self._seconds
        due = late and not self._asked
        self._asked = self._asked or due
        return due


class _ConsoleHandler(logging.Handler):
    """Writes log lines to standard output without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        # Who has not imported it shows no bar, and need not wait for the import.
        bars = sys.modules.get("tqdm")
        write = print if bars is None else bars.tqdm.write
        write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


def set_up_logging(*, rank: int) -> None:
    """Send the package's log to the console: everything from rank 0, warnings from all.

    Lines are kept in memory too, until `log_to_file` knows where the run's folder is.
    """
    logging.raiseExceptions = False  # a log file on a full disk is no reason for tracebacks
    logger = logging.getLogger("llm")
    console = _ConsoleHandler()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    console.setFormatter(logging.Formatter(prefix + "%(message)s"))
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    waiting = logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)
    logger.handlers = [console, waiting]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_to_file(path: Path) -> None:
    """Send the package's log, from its first line on, to a file as well."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger("llm")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.setTarget(file)
            handler.close()
            logger.removeHandler(handler)
    logger.addHandler(file)


def calm_threads() -> None:
    """Let idle threads sleep soon where others want the cores; before torch is imported.

    By default they spin while they wait for one another. Alone on the machine, that makes steps of
    a small model a tenth shorter; as soon as another process wants one of the cores, it makes
    them twice as long.
    """
    if _others_run():
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _others_run() -> bool:
    """Whether other processes run on this machine, at several looks in a row."""
    if ranks_per_node(os.environ, world_from_environment().world_size) > 1:
        return True
    for _ in range(_LOOKS):
        try:
            running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        except OSError:
            return True
        if int(running) <= 1:  # this one
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def quiet_libraries() -> None:
    """Keep the libraries' hints out of the run's log; call before importing torch."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Otherwise torch prints C++ stack traces when the store of a dead rank has gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def device_of(world: World) -> "torch.device":
    """The device that this process trains on."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", world.local_rank % torch.cuda.device_count())
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.device("xpu", world.local_rank % torch.xpu.device_count())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
