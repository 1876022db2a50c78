"""Numbered tasks on several processes, none of which outlives the one that started them."""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from llm.errors import DataError

Work = Callable[[int, Callable[[Any], None]], None]

log = logging.getLogger("llm.data")


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bounded_workers(wanted: int | None, *, most: int | None = None) -> int:
    """The workers that a user asked for, or as many as are of use where that is less.

    Args:
        wanted: As asked for; None is all that are of use.
        most: How many are of use; None is the cores that this process may use.
    """
    most = most or num_cores()
    if wanted is None:
        return most
    if wanted > most:
        log.info(f"taking {most:,} workers, not {wanted:,}: there are {num_cores():,} cores")
    return min(wanted, most)


def run_tasks(
    tasks: list[int], work: Work, *, processes: int, on_message: Callable[[int, Any], None]
) -> None:
    """Does every task once, on forked processes that take the next one when they are free.

    Args:
        tasks: Their numbers.
        work: Does one task; told a function that sends a message home.
        processes: How many at most; 0 does all the work in this one.
        on_message: Receives (task, message) in this process. None is the message that the task
            is done.

    Raises:
        DataError: A worker was killed.
        Exception: The first that `work` raised; the other workers are stopped.
    """
    if processes == 0:
        for task in tasks:
            work(task, lambda message, task=task: on_message(task, message))  # type: ignore[misc]
            on_message(task, None)
        return
    # Forked, so that each has the tokenizer at once and without a copy.
    context = multiprocessing.get_context("fork")
    next_task = context.Value("q", 0)
    pipes = [context.Pipe(duplex=False) for _ in range(min(processes, len(tasks)))]
    workers = []
    for number, (_, sender) in enumerate(pipes):
        others = [end for other, pipe in enumerate(pipes) for end in pipe[: 1 + (other != number)]]
        worker = context.Process(
            target=_serve, args=(tasks, work, next_task, sender, others), daemon=True
        )
        workers.append(worker)
    sys.stdout.flush()
    sys.stderr.flush()
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    try:
        _listen({receiver for receiver, _ in pipes}, on_message)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _listen(receivers: set[Connection], on_message: Callable[[int, Any], None]) -> None:
    while receivers:
        for receiver in wait(list(receivers)):
            assert isinstance(receiver, Connection)
            try:
                task, message = receiver.recv()
            except EOFError as error:
                raise DataError(
                    "A worker was killed, perhaps because the memory ran out; start again with "
                    "fewer --workers: what is done is kept."
                ) from error
            if isinstance(message, BaseException):
                raise message
            if task is None:
                receivers.discard(receiver)
            else:
                on_message(task, message)


def _serve(
    tasks: list[int], work: Work, next_task: Any, sender: Connection, others: list[Connection]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # With these shut, writing home fails as soon as the first process is gone.
    for end in others:
        end.close()
    try:
        while True:
            with next_task.get_lock():
                position = next_task.value
                next_task.value += 1
            if position >= len(tasks):
                sender.send((None, None))
                return
            task = tasks[position]
            work(task, lambda message, task=task: sender.send((task, message)))  # type: ignore[misc]
            sender.send((task, None))
    except BrokenPipeError:
        os._exit(1)
    except BaseException as error:
        sender.send((None, _sendable(error)))


def _sendable(error: BaseException) -> BaseException:
    """The error, or what it says where it cannot travel between processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
