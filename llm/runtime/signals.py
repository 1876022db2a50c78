"""Requests to stop: signals, a time limit, the death of the launcher."""

import os
import signal
import threading
import time
from types import FrameType

from llm.runtime.world import is_launched

EXIT_PREEMPTED = 75
"""Exit code of a run that saved its state on a signal and wants to be started again."""
SAME_REQUEST_SECONDS = 3.0
_LAUNCHER_SECONDS = 1.0
_launcher: int | None = None  # its process id, once `watch_launcher` knows it


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
