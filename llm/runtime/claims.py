"""A claim, which one living process has, for file systems that have no locks.

    NAME-1   its process touches this file, which names it, every two seconds
    NAME-2   the claim of the process that replaces one that has died

They need atomic creation of files and nothing else. No two clocks are compared. On the same
machine, a dead process is replaced at once.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

BEAT_SECONDS = 2.0
"""Seconds between two signs of life."""
DEAD_SECONDS = 60.0
"""Seconds without a sign of life; caches of network file systems hide one for a while."""


class Claim:
    """A claim in a folder that several processes share.

    Args:
        folder: The folder.
        name: The beginning of its file names.
        on_loss: Called by a thread if another process has replaced this one, which it does if this
            one was stopped for `DEAD_SECONDS`.

    Attributes:
        has_rival: Whether another process has shown a sign of life while this one has waited.
    """

    def __init__(
        self, folder: Path, name: str, *, on_loss: Callable[[], None] = lambda: None
    ) -> None:
        self.has_rival = False
        self._folder = folder
        self._name = name
        self._on_loss = on_loss
        self._number = 0
        self._last_beat: tuple[int, int] | None = None
        self._last_beat_at = 0.0
        self._released = threading.Event()

    def try_acquire(self) -> bool:
        """Acquire the claim if no living process has it; call again until `has_rival`."""
        newest = self._find_newest()
        beat = newest, _read_time(self._claim_path(newest))
        if beat != self._last_beat:
            self.has_rival = newest > 0 and self._last_beat is not None
            self._last_beat, self._last_beat_at = beat, time.monotonic()
        is_recent = time.monotonic() - self._last_beat_at <= DEAD_SECONDS
        if newest > 0 and is_recent and not _names_dead_process(self._claim_path(newest)):
            return False
        try:
            with self._claim_path(newest + 1).open("x", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {_machine_identity()}")
        except (FileExistsError, FileNotFoundError):  # another was faster, or removed the folder
            return False
        self._number = newest + 1
        threading.Thread(
            target=self._send_heartbeats, name=f"{self._name}-beat", daemon=True
        ).start()
        return True

    def is_held(self) -> bool:
        """Return whether this process has the claim, and no other has replaced it."""
        return (
            self._claim_path(self._number).exists()
            and not self._claim_path(self._number + 1).exists()
        )

    def release(self) -> None:
        """Let another process acquire the claim at once."""
        self._released.set()
        # The newest first: a process that looks in between finds an old one, and waits.
        with contextlib.suppress(OSError):  # it dies with this process in any case
            for number in range(self._number, 0, -1):
                self._claim_path(number).unlink(missing_ok=True)

    def _find_newest(self) -> int:
        number = 0
        while self._claim_path(number + 1).exists():
            number += 1
        return number

    def _claim_path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number}"

    def _send_heartbeats(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            # An error of the storage says nothing about the claim.
            with contextlib.suppress(OSError):
                if self.is_held():
                    os.utime(self._claim_path(self._number))
                elif not self._released.is_set():
                    self._on_loss()
                    return


def _machine_identity() -> str:
    """Return what tells whether two processes may compare their process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # containers have namespaces of ids
    except OSError:
        return ""


def _names_dead_process(path: Path) -> bool:
    """Return whether a claim names a process of this machine that has ended."""
    try:
        number, _, machine = path.read_text(encoding="utf-8").partition(" ")
        if not machine or machine != _machine_identity():
            return False
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # it is just being written, or belongs to another user
        return False
    return False


def _read_time(path: Path) -> int:
    try:
        with path.open("rb") as file:  # opening makes network file systems look again
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0
