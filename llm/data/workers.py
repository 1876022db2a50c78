"""How many processes or threads prepare data."""

import logging
import os

logger = logging.getLogger("llm.data")


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # a batch system may give a job some of them only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_workers(requested_workers: int | None, *, max_workers: int | None = None) -> int:
    """Return the requested number of workers, limited to a useful number.

    Args:
        requested_workers: The number that the user asks for; None takes all that are useful.
        max_workers: How many are useful; None is the cores that this process may use.
    """
    max_workers = max_workers or num_cores()
    if requested_workers is None:
        return max_workers
    if requested_workers > max_workers:
        logger.info(
            f"taking {max_workers:,} workers, not {requested_workers:,}: there are {num_cores():,} "
            "cores"
        )
    return min(requested_workers, max_workers)
