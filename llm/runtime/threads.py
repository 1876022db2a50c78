"""How long idle threads spin before they sleep."""

import os
import time
from pathlib import Path

from llm.runtime.launcher import ranks_per_node
from llm.runtime.world import world_from_environment

_LOOKS, _LOOK_SECONDS = 5, 0.01


def limit_spin_wait() -> None:
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
