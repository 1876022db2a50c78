"""How many processes or threads prepare data."""

import logging
import os

log = logging.getLogger("llm.data")


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # a batch system may give a job some of them only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bounded_workers(wanted: int | None, *, most: int | None = None) -> int:
    """Return the requested number of workers, limited to a useful number.

    Args:
        wanted: The number asked for; None takes all that are useful.
        most: How many are useful; None is the cores that this process may use.
    """
    most = most or num_cores()
    if wanted is None:
        return most
    if wanted > most:
        log.info(f"taking {most:,} workers, not {wanted:,}: there are {num_cores():,} cores")
    return min(wanted, most)
