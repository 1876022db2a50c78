"""Starts programs on all ranks of a job, one at a time, each with a time limit.

Each rank of the job is a process that only starts others, so that a program that crashes or hangs
ends without the next ones. Rank 0 posts what to start on a board in the store of the job.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm.errors import ParallelError
from llm.runtime.world import World, ignore_ranks
from llm.tools.preflight import Board

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0
"""Seconds for the other ranks to end and to say why, after a rank has failed."""
_REPLY_SECONDS = 30.0
"""Seconds for the other ranks to report the end of a program after its time limit."""
_MAX_OUTPUT_BYTES = 6000
"""Bytes of the end of a program's output that a rank sends to rank 0."""
_FIRST_PORT, _NUM_PORTS = 20000, 10000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended on one rank.

    Attributes:
        code: Exit code; None if it was stopped at its time limit or did not report.
        output: The end of its output.
    """

    code: int | None
    output: str


class RankPrograms:
    """Starts programs on the ranks of a job. Rank 0 calls `run` and `finish`, the others `serve`.

    Args:
        world: Rank and world size of this process.
        board: Board of all ranks; None for one rank.
        folder: Folder for the output of programs, which all ranks share.
    """

    def __init__(self, world: World, board: Board | None, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self._board = board
        self._num_programs = 0
        self._num_requests = 0  # equal on all ranks

    def run(
        self,
        arguments: Sequence[str],
        *,
        seconds: float,
        is_alone: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Start Python on all ranks, or on rank 0 alone; return the outcomes by rank.

        Args:
            arguments: Arguments of Python, such as `-m llm preflight`.
            seconds: Time limit.
            is_alone: Whether the program runs on rank 0 only, as one process.
            environment: Environment variables for the program.
        """
        self._num_programs += 1
        request = {
            "arguments": list(arguments),
            "environment": {**(environment or {}), "MASTER_PORT": str(_free_port())},
            "seconds": seconds,
        }
        if is_alone or self._board is None:
            return [_run_program(request, self._log_path("alone"))]
        name = self._next_request_name()
        self._board.set_global(name, json.dumps(request))
        self._run_requested(name, request)
        self._board.wait(f"{name}/end", time.monotonic() + _REPLY_SECONDS)
        reports = self._board.get_all(f"{name}/end")
        silent = Outcome(code=None, output="this rank did not answer")
        ranks = range(self.world.world_size)
        return [Outcome(**reports[rank]) if rank in reports else silent for rank in ranks]

    def serve(self, *, deadline: float) -> None:
        """Start what rank 0 posts, until it has finished.

        Args:
            deadline: Time on the monotonic clock after which rank 0 counts as dead.

        Raises:
            ParallelError: Rank 0 posts nothing more.
        """
        assert self._board is not None
        while True:
            self._num_programs += 1
            name = self._next_request_name()
            posted = self._board.get_global(name, deadline)
            if posted is None:
                raise ParallelError(f"Rank 0 does not answer rank {self.world.rank}.")
            request = json.loads(posted)
            if request is None:
                self._board.set("finished", True)
                return
            self._run_requested(name, request)

    def finish(self) -> None:
        """End `serve` on the other ranks; rank 0 ends last because it may serve the store."""
        if self._board is not None:
            self._board.set_global(self._next_request_name(), json.dumps(None))
            self._board.set("finished", True)
            self._board.wait("finished", time.monotonic() + _REPLY_SECONDS)

    def _next_request_name(self) -> str:
        """Return the key of the next program of all ranks."""
        self._num_requests += 1
        return f"program-{self._num_requests}"

    def _run_requested(self, name: str, request: Mapping[str, Any]) -> None:
        """Run a program of all ranks, and report how it ended on this one."""
        assert self._board is not None
        outcome = _run_program(
            request, self._log_path(str(self.world.rank)), board=self._board, name=name
        )
        self._board.set(f"{name}/end", {"code": outcome.code, "output": outcome.output})

    def _log_path(self, suffix: str) -> Path:
        return self.folder / f"program-{self._num_programs}-{suffix}.log"


def _run_program(
    request: Mapping[str, Any], log_path: Path, *, board: Board | None = None, name: str = ""
) -> Outcome:
    """Run a program on this rank until it ends, is late, or another rank has failed.

    Without a board it runs alone, as one process.
    """
    deadline = time.monotonic() + request["seconds"]
    environment = _make_child_environment(is_alone=board is None) | request["environment"]
    process = start_program([sys.executable, *request["arguments"]], environment, log_path)
    try:
        while (code := process.poll()) is None and time.monotonic() < deadline:
            if board is not None and board.get_global(f"{name}/failed") is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including child processes
    if code not in (0, None) and board is not None:
        board.set_global(f"{name}/failed", "")
    output = log_path.read_bytes()[-_MAX_OUTPUT_BYTES:].decode(errors="replace")
    return Outcome(code=code, output=output)


def start_program(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    """Start a program in a new process group; its output goes into a file."""
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _make_child_environment(*, is_alone: bool) -> dict[str, str]:
    """Return the environment of a program on this rank, or of a process without ranks."""
    environment = dict(os.environ)
    if is_alone:
        ignore_ranks(environment)
        environment.pop("LOCAL_WORLD_SIZE", None)
    # The program makes a new store, and ends if this process dies.
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    environment.setdefault("TORCHELASTIC_RUN_ID", "evidence")
    return environment | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _free_port() -> int:
    """Return a port of this host that no program uses.

    Rank 0 opens it seconds later, so it is none of those that systems choose for other programs.
    """
    while True:
        port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def describe_failure(outcomes: Sequence[Outcome], *, seconds: float) -> str | None:
    """Return how a program failed, and the last lines of a rank below; None if it ended well."""
    failed_ranks = [rank for rank, outcome in enumerate(outcomes) if outcome.code != 0]
    if not failed_ranks:
        return None
    # Ranks that were stopped waited for those that failed.
    first_failed = min(failed_ranks, key=lambda rank: (outcomes[rank].code is None, rank))
    outcome = outcomes[first_failed]
    rank_name = f"rank {first_failed}" if len(outcomes) > 1 else "the program"
    ending = f"ended with code {outcome.code}"
    if outcome.code is None:
        ending = f"had not ended after {seconds:.0f} s"
    lines = [line for line in outcome.output.splitlines() if line.strip()][-12:]
    return "\n".join([f"{rank_name} {ending}", *lines])
