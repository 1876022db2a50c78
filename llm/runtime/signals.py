"""Requests to stop: signals, a time limit, the death of the launcher."""

import math
import os
import signal
import threading
import time
from types import FrameType

from llm.runtime.world import is_launched

EXIT_PREEMPTED = 75
"""Exit code of a run that saved its state on a signal and must be started again."""
SAME_REQUEST_SECONDS = 3.0
_LAUNCHER_POLL_SECONDS = 1.0
_launcher_pid: int | None = None  # the process id, once `watch_launcher` was called
_caller_pid: int | None = None

CALLER_VARIABLE = "LLM_CALLER_PID"
"""Variable with the id of the Python process that has started this one by a function."""


def watch_launcher() -> None:
    """Stop this rank if its launcher dies, since nothing else would.

    Before training, the process then ends as on SIGTERM; during training, `Interruption` stops it.
    A process that was started by hand may outlive its shell.

    A Python process that has started this one by `llm.train` counts as a launcher.
    """
    global _launcher_pid, _caller_pid
    if is_launched():
        _launcher_pid = os.getppid()
    caller = os.environ.get(CALLER_VARIABLE, "")
    if caller.isdigit():
        _caller_pid = int(caller)
    if _launcher_pid is not None or _caller_pid is not None:
        threading.Thread(target=_end_if_orphaned, name="launcher-watch", daemon=True).start()


def _is_orphaned() -> bool:
    """Return whether the launcher or the caller that `watch_launcher` recorded is dead."""
    if _caller_pid is not None:
        try:
            os.kill(_caller_pid, 0)  # only asks whether it exists
        except OSError:  # it does not, or the number belongs to somebody else's process now
            return True
    return _launcher_pid is not None and os.getppid() != _launcher_pid


def _end_if_orphaned() -> None:
    """Wait until the launcher is dead, then end this process; runs in a thread."""
    while not _is_orphaned():
        time.sleep(_LAUNCHER_POLL_SECONDS)
    # Once `Interruption` handles SIGTERM, the training loop reads `reason` and saves.
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)


class StopRequest(Exception):
    """Raised on all ranks to end an evaluation at once, because the run is asked to stop."""


class Interruption:
    """A request to stop: a signal, a time limit, or the launcher's death.

    Schedulers send a signal before the time limit, and a terminal that closes sends SIGHUP. The
    first signal is recorded, and the training loop reads it between two steps; a second one ends
    the process at once. A scheduler may signal both the processes and their launcher, which
    forwards the signal: signals within seconds of the first count as the same request.

    Args:
        time_limit: Seconds until it stops without a signal; None: no limit.
    """

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self, *, time_limit: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self._exit_code: int | None = None
        self._first_received_at = 0.0
        self._deadline = time.monotonic() + (math.inf if time_limit is None else time_limit)

    @property
    def reason(self) -> str | None:
        """Why this process should stop, such as the name of a signal; None if it should not."""
        if self.received is not None:
            return self.received.name
        if _is_orphaned():
            return "the death of its launcher"
        return "--exit_after" if time.monotonic() >= self._deadline else None

    def watch(self) -> None:
        """Install the signal handlers; call from the main thread."""
        for signal_number in self.signals:
            # A background job of a script ignores Ctrl-C, which is meant for the foreground job.
            # Under torchrun it must not ignore it: torchrun forwards Ctrl-C and kills ranks that do
            # not exit.
            if is_launched() or signal.getsignal(signal_number) != signal.SIG_IGN:
                signal.signal(signal_number, self._record_signal)

    def keep_exit_code(self) -> None:
        """Let a further signal end the process with `EXIT_PREEMPTED`: everything is saved."""
        self._exit_code = EXIT_PREEMPTED

    def ignore(self) -> None:
        """Ignore signals from here on; call before the end of the program.

        Python restores the default handlers when it shuts down, which may take half a second: a
        signal would then replace the exit code.
        """
        for signal_number in self.signals:
            signal.signal(signal_number, signal.SIG_IGN)

    def _record_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Record the first signal; end the process at another request."""
        received_at = time.monotonic()
        if self.received is None:
            self.received, self._first_received_at = signal.Signals(signal_number), received_at
        elif received_at - self._first_received_at > SAME_REQUEST_SECONDS:
            # sys.exit would run atexit handlers, which may wait for a collective that hangs.
            os._exit(128 + signal_number if self._exit_code is None else self._exit_code)


class SaveTimer:
    """Decides when to save a checkpoint by the minutes since the last one.

    Args:
        minutes: Minutes between checkpoints; None: never.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = math.inf if minutes is None else 60 * minutes
        self.restart()

    def restart(self) -> None:
        """Count from now, as after every checkpoint."""
        self._due_at = time.monotonic() + self._seconds

    def is_due(self) -> bool:
        """Return whether to save; true once per checkpoint: the ranks agree one step later."""
        is_due = time.monotonic() >= self._due_at
        if is_due:
            self._due_at = math.inf
        return is_due
