"""Run functions on all ranks: an error on one rank is raised on every rank, and none waits for it.

Before process groups form, ranks exchange values through the launcher's store. It waits as long as
a rank prepares data, and a signal can interrupt the wait. Anybody who reaches the store can write
to it, so the values are JSON, which executes no code. Later ranks use gloo.
"""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from llm import errors
from llm.errors import LLMError, ParallelError, PeerLostError, explain_system_error, one_line
from llm.runtime.world import world_from_environment

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store

T = TypeVar("T")

PATIENCE = 3600.0
"""Seconds that ranks wait for each other before process groups form."""
_NOTICE_SECONDS = 40.0
"""Seconds until a rank says for whom it waits."""
_POLL_SECONDS = 0.005, 0.5  # at first, and at most
_LOST = (
    "A rank that this one waits for has ended or does not respond: look for its error above, and "
    "in the launcher's log."
)

_HOW_ALONE = (
    "If no other rank was started, as in the shell of `srun -n 4 --pty bash`, put RANK=0 "
    "WORLD_SIZE=1 before the command: then one process works alone."
)
_MOST_NAMED = 5
"""Ranks that a message names."""

_exchanges = itertools.count()

logger = logging.getLogger("llm")


def on_all_ranks(
    action: Callable[[], T], *, group: "ProcessGroup | None" = None, patience: float = PATIENCE
) -> T:
    """Call a function on every rank; return this rank's result when all ranks have finished.

    Calls may be nested. After an error between two inner calls, the next inner call of the other
    ranks raises it.

    Args:
        action: The function.
        group: The ranks that call this; by default all ranks.
        patience: Seconds to wait for the others before process groups form.

    Raises:
        LLMError: The error of the first rank that failed, on all ranks.
        PeerLostError: Another rank has ended or does not respond.
    """
    try:
        result = action()
    except Exception as error:
        # The other ranks would not receive the news that a rank is lost.
        if not (is_shared(error) or isinstance(error, PeerLostError)):
            _exchange_values(None, error, group, patience)
        raise
    _exchange_values(None, None, group, patience)
    return result


def on_rank0(action: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank; every rank calls this.

    Raises:
        LLMError: The error of rank 0, on all ranks.
    """
    result = on_all_ranks(lambda: action() if _rank_of_process() == 0 else None)
    shared: T = gather(result)[0]  # type: ignore[assignment]
    return shared


def gather(value: T, *, group: "ProcessGroup | None" = None) -> list[T]:
    """Return the values of all ranks, by rank; every rank calls this.

    Args:
        value: This rank's value; before process groups form, one that JSON can hold.
        group: The ranks that call this; by default all ranks.

    Raises:
        LLMError: Another rank failed within `on_all_ranks`.
    """
    return _exchange_values(value, None, group, PATIENCE)


def is_shared(error: BaseException) -> bool:
    """Return whether all ranks raise this error: rank 0 reports it for all of them."""
    return getattr(error, "shared", False)


def leave_together(seconds: float) -> None:
    """Wait for the other ranks before an exit: a launcher kills all ranks as soon as one ends."""
    if _world_size() > 1:
        try:
            _gather_by_store(None, seconds)
        except (PeerLostError, RuntimeError):  # another rank has already ended
            return


def _exchange_values(
    value: Any, error: Exception | None, group: "ProcessGroup | None", patience: float
) -> list[Any]:
    """Return the values of all ranks, or raise the error of the first rank that has one."""
    if _world_size() == 1:
        if error is not None:
            raise error
        return [value]
    report = None
    if isinstance(error, LLMError):
        report = type(error).__name__, str(error)
    elif error is not None:
        reason = explain_system_error(error) or f"{type(error).__name__}: {one_line(error)}."
        report = "ParallelError", f"Rank {_rank_of_process()} has failed: {reason}"
    reports = _gather_values((value, report), group, patience)
    failed = next(
        (rank for rank, (_, rank_report) in enumerate(reports) if rank_report is not None), None
    )
    if failed is None:
        return [rank_value for rank_value, _ in reports]
    raised: Any = error
    if error is None or failed != _rank_of_process():
        kind, message = reports[failed][1]
        raised = getattr(errors, kind)(message)
    raised.shared = True
    raise raised


def _gather_values(value: Any, group: "ProcessGroup | None", patience: float) -> list[Any]:
    import torch.distributed as dist

    if not dist.is_initialized():
        return _gather_by_store(value, patience)
    values = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:  # gloo has lost its connection
        raise PeerLostError(_LOST) from error
    return values


def _gather_by_store(value: Any, patience: float) -> list[Any]:
    rank, world_size = _rank_of_process(), _world_size()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep its store
    key = f"llm/agreement/{restart}/{next(_exchanges)}"
    keys = [f"{key}/{peer}" for peer in range(world_size)]
    deadline = time.monotonic() + patience

    def wait_for_all(name: str, *, wait: bool = True) -> None:
        if store.add(f"{key}/{name}", 1) == world_size:
            store.set(f"{key}/{name}/all", "")
        pause, longest = _POLL_SECONDS
        notice_time = time.monotonic() + _NOTICE_SECONDS
        while wait and not store.check([f"{key}/{name}/all"]):
            if time.monotonic() > deadline:
                raise PeerLostError(_LOST)
            if time.monotonic() > notice_time:
                _log_late_ranks(store, keys, rank)
                notice_time = math.inf
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    try:
        store = _launch_store()
        store.set(keys[rank], json.dumps(value))
        wait_for_all("written")
        values = [_read_value(text, sender) for sender, text in enumerate(store.multi_get(keys))]
        wait_for_all("read", wait=rank == 0)  # rank 0 may serve the store and fail
    except RuntimeError as error:  # rank 0 has ended, and the store with it
        raise PeerLostError(_LOST) from error
    return values


def _log_late_ranks(store: "Store", keys: list[str], rank: int) -> None:
    """Log which ranks have not sent their value; the lowest of the others does."""
    late = [peer for peer, key in enumerate(keys) if not store.check([key])]
    if not late or rank != next(peer for peer in range(len(keys)) if peer not in late):
        return
    names = [str(peer) for peer in late]
    if len(late) > _MOST_NAMED:
        names = [*names[:_MOST_NAMED], f"{len(late) - _MOST_NAMED:,} others"]
    logger.warning(
        f"Rank {rank} waits for rank {', '.join(names)} to finish this part of the start, or to "
        f"start. {_HOW_ALONE}"
    )


def _read_value(text: bytes, sender: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParallelError(
            f"Rank {sender} has sent a value that this version of llm does not read: install the "
            "same version on all nodes."
        ) from error


def _rank_of_process() -> int:
    return world_from_environment().rank


def _world_size() -> int:
    return world_from_environment().world_size


@functools.cache
def _launch_store() -> "Store":
    """Return the store that process groups will use; rank 0 or torchrun serves it.

    It is kept until the process ends. Otherwise rank 0 would close the store that it serves while
    faster ranks have already connected again to form their process groups.
    """
    from torch.distributed.rendezvous import rendezvous

    with _log_long_connection():
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=PATIENCE))))[0]
    return store


@contextlib.contextmanager
def _log_long_connection() -> Iterator[None]:
    """Log which ranks do not connect if the context takes long."""
    rank = _rank_of_process()
    missing_ranks = "rank 0" if rank else f"the other {_world_size() - 1:,} ranks"
    place = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
    sentence = f"Rank {rank} waits for {missing_ranks} at {place}. {_HOW_ALONE}"
    timer = threading.Timer(_NOTICE_SECONDS, logger.warning, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
