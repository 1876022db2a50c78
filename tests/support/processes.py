"""Processes that a test waits for, among them the trainer under torchrun, as a user starts it."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.faults import Fault, in_environment
from tests.support.ranks import free_port

_MARK = "LLM_TEST_LAUNCH"


class Launch:
    """`torchrun -m llm.trainers.gpt ...`, started.

    Args:
        argv: The trainer's arguments.
        ranks: Number of ranks.
        faults: What shall happen to them.
        launcher: More arguments of torchrun.
        port: Where the launchers of several nodes meet; a free one unless given.
        environment: More variables.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        ranks: int = 2,
        faults: Sequence[Fault] = (),
        launcher: Sequence[str] = (),
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self._mark = uuid.uuid4().hex
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
            "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{self.port}", *launcher,
            "-m", "llm.trainers.gpt", *argv,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                # Else ranks that are started again may find addresses of those that have died.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                **in_environment(faults),
                _MARK: self._mark,
                **(environment or {}),
            },
        )

    def send(self, number: signal.Signals) -> None:
        """Signal the launcher alone, which passes it on."""
        self.process.send_signal(number)

    def end(self, timeout: float = 600) -> str:
        """Wait for the launcher; returns what was printed. What is left is killed."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        finally:
            self.left = self.alive()
            for pid in self.left:
                os.kill(pid, signal.SIGKILL)
        return output

    def alive(self) -> list[int]:
        """Processes of this launch that have not ended."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def port_is_free(self) -> bool:
        """Whether the next launch can have the same port."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
            return True


def wait_until(true: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until something holds, and fail the test where it never does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_there(path: Path, timeout: float = 600, *, ranks: int = 1) -> None:
    """Wait for a file to which so many ranks have written that a fault happens."""
    end = time.monotonic() + timeout
    while not path.exists() or len(path.read_text(encoding="utf-8").splitlines()) < ranks:
        assert time.monotonic() < end, f"{path.name} is not reached"
        time.sleep(0.02)


def memory(line: str) -> int:
    """Bytes of this process by the name that Linux gives them."""
    found = next(x for x in Path("/proc/self/status").read_text().splitlines() if line in x)
    return 1024 * int(found.split()[1])
