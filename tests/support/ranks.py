"""Runs a function on several gloo ranks, each a process of its own.

The processes are forked from a server that has imported the heavy libraries once,
so that a start costs a tenth of a second rather than five.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "transformers.models.auto.modeling_auto", "tests.support.preload"]
)


@dataclass
class Outcome:
    """What a rank returned or raised, and what it printed."""

    value: Any
    error: str | None
    output: str


def free_port() -> int:
    """A free port for rank 0, not of those that systems give away by themselves meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Ranks:
    """Ranks that were started: processes to signal, kill and wait for.

    Attributes:
        processes: By rank.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        self.processes = []
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **(environment or {}),
            }
            process = CONTEXT.Process(
                target=_work, args=(rank, variables, Path(self._folder.name), function, args)
            )
            process.start()
            self.processes.append(process)

    def wait_for_death(self, timeout: float = 120) -> float:
        """Wait until one of the ranks has ended; returns `time.monotonic` of then."""
        assert wait([process.sentinel for process in self.processes], timeout), "none has ended"
        return time.monotonic()

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        path = Path(self._folder.name) / str(rank)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """Kill what is left of them, stopped ones too."""
        for process in self.processes:
            process.kill()

    def outcomes(self, timeout: float = 120) -> list[Outcome]:
        """Wait for all ranks; one that takes longer is killed after it printed its stacks."""
        found = []
        for rank, process in enumerate(self.processes):
            process.join(timeout)
            late = ""
            if process.is_alive():
                late = f" when it was killed after {timeout} s"
                os.kill(process.pid, signal.SIGUSR2)
                process.join(1)
                process.kill()
                process.join()
            result = Path(self._folder.name) / f"{rank}.result"
            value, error = None, f"ended with code {process.exitcode}{late}"
            if result.exists():
                value, error = pickle.loads(result.read_bytes())
            found.append(Outcome(value, error, self.output(rank)))
        self._folder.cleanup()
        return found


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    environment: dict[str, str] | None = None,
    timeout: float = 120,
) -> list[Outcome]:
    """Call `function(*args)` on every rank; a rank that raises does not fail the caller."""
    return Ranks(function, world_size, *args, environment=environment).outcomes(timeout)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails the test with the traceback of one that raised."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}\n{outcome.output}"
    return [outcome.value for outcome in outcomes]


def _work(
    rank: int,
    variables: dict[str, str],
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(variables)
    with (folder / str(rank)).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, file=2)
    import torch

    torch.set_num_threads(1)
    try:
        value, error = function(*args), None
    except BaseException:
        value, error = None, traceback.format_exc()
    # By way of a file: a pipe that nobody reads yet would block on a large value.
    partial = folder / f"{rank}.partial"
    partial.write_bytes(pickle.dumps((value, error)))
    partial.rename(folder / f"{rank}.result")
