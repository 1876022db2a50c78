"""Tasks on several processes, none of which outlives the one that started them."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from llm.errors import DataError

_WATCH_SECONDS = 1.0

_work: Callable[[int], Any]  # of a worker, which has it from the process that it was forked from

log = logging.getLogger("llm.data")


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bounded_workers(wanted: int | None, *, most: int | None = None) -> int:
    """The workers that a user asked for, but no more than are useful.

    Args:
        wanted: As asked for; None is all that are useful.
        most: How many are useful; None is the cores that this process may use.
    """
    most = most or num_cores()
    if wanted is None:
        return most
    if wanted > most:
        log.info(f"taking {most:,} workers, not {wanted:,}: there are {num_cores():,} cores")
    return min(wanted, most)


def run_in_processes(
    work: Callable[[int], object],
    tasks: list[int],
    *,
    processes: int,
    watch: Callable[[], None],
) -> None:
    """Calls a function once for every task, on forked processes.

    The processes share the memory of this one as it is now, so what the function needs (texts, a
    tokenizer) is there at once and is neither copied nor pickled. Threads do not survive a fork:
    a library that has started some may wait for them for ever.

    Args:
        work: Called with each task.
        tasks: Numbers, begun in this order.
        processes: How many.
        watch: Called about once a second, and at the end.

    Raises:
        DataError: A process was killed.
        Exception: The first that `work` raised; the processes are ended.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(work,))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pending = {pool.submit(_call, task) for task in tasks}
        while pending:
            done, pending = wait(pending, _WATCH_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            watch()
    except BrokenProcessPool as error:
        raise DataError(
            "A worker was killed, perhaps because the memory ran out; start again with fewer "
            "--workers: what is done is kept."
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[int], object]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(task: int) -> None:
    _work(task)
