"""A claim, which one living process holds, for file systems that have no locks.

    NAME-1   its process touches this file, which names it, every two seconds
    NAME-2   the claim of the process that replaces one that has died

The number is the generation of the claim. A claim needs atomic creation of files and nothing else.
No two clocks are compared to acquire it. On the same machine, a dead process is replaced at once.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

HEARTBEAT_SECONDS = 2.0
"""Seconds between two heartbeats."""
HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Seconds without a heartbeat until a process counts as dead; network file systems delay them."""
_MAX_OBSERVED_SECONDS = 5.0
"""Time between two looks that counts as silence at most."""
EXPIRY_SECONDS = 300.0
"""Age of the last heartbeat, by the clocks of two machines, after which a claim is ignored."""


class Claim:
    """A claim in a folder that several processes share.

    Args:
        folder: The folder.
        name: The beginning of its file names.
        on_loss: Called by a thread if another process has replaced this one, which happens if this
            one was stopped for `HEARTBEAT_TIMEOUT_SECONDS`.

    Attributes:
        has_rival: Whether another process has sent a heartbeat while this one has waited.
    """

    def __init__(
        self, folder: Path, name: str, *, on_loss: Callable[[], None] = lambda: None
    ) -> None:
        self.has_rival = False
        self._folder = folder
        self._name = name
        self._on_loss = on_loss
        self._generation = 0
        self._text = ""
        self._last_heartbeat: tuple[int, int] | None = None  # generation, nanoseconds
        self._observed_at = 0.0
        self._silent_seconds = 0.0
        self._is_released = threading.Event()

    def try_acquire(self) -> bool:
        """Acquire the claim if no living process holds it; call again until `has_rival`."""
        generation = self._newest_generation()
        if self._may_be_held(generation):
            return False
        # The second line tells the claim from a later one of the same name.
        self._text = f"{os.getpid()} {_read_pid_namespace()}\n{secrets.token_hex(8)}\n"
        try:
            with self._claim_path(generation + 1).open("x", encoding="utf-8") as file:
                file.write(self._text)
        except (FileExistsError, FileNotFoundError):  # another was faster, or removed the folder
            return False
        self._generation = generation + 1
        threading.Thread(
            target=self._send_heartbeats, name=f"{self._name}-beat", daemon=True
        ).start()
        return True

    def may_be_held(self) -> bool:
        """Return whether a process may hold the claim; call again until `has_rival`."""
        return self._may_be_held(self._newest_generation())

    def _may_be_held(self, generation: int) -> bool:
        """Return whether the process of the newest claim may be alive; observes its heartbeats."""
        self._observe_heartbeat(generation)
        is_recent = self._silent_seconds <= HEARTBEAT_TIMEOUT_SECONDS
        return generation > 0 and is_recent and not _has_dead_owner(self._claim_path(generation))

    def _observe_heartbeat(self, generation: int) -> None:
        """Record how long the newest claim has not changed, and whether another changed it."""
        heartbeat = generation, _modification_time_ns(self._claim_path(generation))
        now = time.monotonic()
        if heartbeat != self._last_heartbeat:
            self.has_rival = generation > 0 and self._last_heartbeat is not None
            self._last_heartbeat, self._silent_seconds = heartbeat, 0.0
        else:
            # A file system that hangs for minutes hides the heartbeats of a living process.
            self._silent_seconds += min(now - self._observed_at, _MAX_OBSERVED_SECONDS)
        self._observed_at = now

    def is_held(self) -> bool:
        """Return whether this process holds the claim, and no other has replaced it.

        Raises:
            OSError: The file system fails.
        """
        try:
            content = self._claim_path(self._generation).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return False
        # An empty file is a claim that another process is writing, or one that a server has lost.
        is_replaced = content not in (self._text.encode(), b"")
        return not is_replaced and not self._claim_path(self._generation + 1).exists()

    def release(self) -> None:
        """Let another process acquire the claim at once, unless it has replaced this one."""
        self._is_released.set()
        # The newest first: a process that looks in between finds an old one, and waits.
        with contextlib.suppress(OSError):  # it dies with this process in any case
            if self.is_held():
                for generation in range(self._generation, 0, -1):
                    self._claim_path(generation).unlink(missing_ok=True)

    def _newest_generation(self) -> int:
        """Return the generation of the newest claim in the folder; 0 if there is none."""
        generation = 0
        while self._claim_path(generation + 1).exists():
            generation += 1
        return generation

    def _claim_path(self, generation: int) -> Path:
        return self._folder / f"{self._name}-{generation}"

    def _send_heartbeats(self) -> None:
        """Touch the claim until it is released or lost; runs in a thread."""
        while not self._is_released.wait(HEARTBEAT_SECONDS):
            # An error of the storage says nothing about the claim.
            with contextlib.suppress(OSError):
                if self.is_held():
                    os.utime(self._claim_path(self._generation))
                elif not self._is_released.is_set():
                    self._on_loss()
                    return


def read_live_claim_age(folder: Path, name: str) -> dict[Path, float]:
    """Return the age of the newest claim in a folder, unless its process is known to be dead.

    A process is known to be dead if it has ended on this machine, or if its last heartbeat is older
    than `EXPIRY_SECONDS`.

    Args:
        folder: The folder, which need not exist.
        name: The beginning of the claim's file names.

    Returns:
        The seconds since the last heartbeat, at least 0, by the claim's path; empty without a
        claim.
    """
    claim_paths = sorted(folder.glob(f"{name}-[0-9]*"), key=lambda path: (len(path.name), path))
    if not claim_paths:
        return {}
    newest_path = claim_paths[-1]  # it has replaced the others
    modified_at = _modification_time_ns(newest_path) / 1e9
    age = max(0.0, time.time() - modified_at) if modified_at else 0.0
    if age > EXPIRY_SECONDS or _has_dead_owner(newest_path):
        return {}
    return {newest_path: age}


def _read_pid_namespace() -> str:
    """Return the boot and the namespace of this process's id; empty if they are unknown.

    The ids of two processes can be compared if both strings are equal: a container has a separate
    namespace.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_dead_owner(claim_path: Path) -> bool:
    """Return whether a claim names a process of this machine that has ended."""
    try:
        owner = claim_path.read_text(encoding="utf-8").partition("\n")[0]
        process_id, _, namespace = owner.partition(" ")
        if not namespace or namespace != _read_pid_namespace():
            return False
        os.kill(int(process_id), 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # it is just being written, or belongs to another user
        return False
    return False


def _modification_time_ns(path: Path) -> int:
    """Return when a file was last modified, in nanoseconds; 0 if it cannot be read."""
    try:
        with path.open("rb") as file:  # opening makes network file systems look again
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0
