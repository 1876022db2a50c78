"""Processes that a test waits for."""

import time
from collections.abc import Callable
from pathlib import Path


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
