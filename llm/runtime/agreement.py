"""Run functions on all ranks: an error on one rank is raised on every rank, and none waits for it.

Before process groups form, ranks exchange values through the store of the launcher. A rank can then
wait while another one prepares data, and a signal can interrupt it. Anybody who reaches the store
can write to it, so the values are JSON, which executes no code. Later, ranks use gloo.
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
from llm.errors import LLMError, ParallelError, PeerLostError, explain_wrapped_os_error, one_line
from llm.runtime.world import world_from_environment

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store

T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 3600.0
"""Seconds that ranks wait for each other before process groups form."""
_NOTICE_SECONDS = 40.0
"""Seconds of waiting until a rank logs which ranks it waits for."""
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.005, 0.5
_PEER_LOST_MESSAGE = (
    "A rank that this one waits for has ended or does not respond: look for its error above, and "
    "in the launcher's log."
)

_SINGLE_PROCESS_HINT = (
    "If no other rank was started, as in the shell of `srun -n 4 --pty bash`, put RANK=0 "
    "WORLD_SIZE=1 before the command: then one process works alone."
)
_MAX_RANKS_IN_MESSAGE = 5
"""Ranks that a message names; it counts the others."""

_NO_VALUE = json.dumps((None, None))
"""The text of a rank that has neither a value nor an error."""

_exchange_counter = itertools.count()

logger = logging.getLogger("llm")


def on_all_ranks(action: Callable[[], T], *, timeout: float = CONNECT_TIMEOUT_SECONDS) -> T:
    """Call a function on every rank; return this rank's result when all ranks have finished.

    Calls may be nested. After an error between two inner calls, the next inner call of the other
    ranks raises it.

    Args:
        action: The function.
        timeout: Seconds to wait for the other ranks before process groups form.

    Raises:
        LLMError: The error of the first rank that failed, on all ranks.
        PeerLostError: Another rank has ended or does not respond.
    """
    with _share_error(group=None, timeout=timeout):
        result = action()
    _exchange_values(None, error=None, group=None, timeout=timeout)
    return result


def on_rank0(action: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank; every rank calls this.

    Raises:
        LLMError: The error of rank 0, on all ranks.
    """
    shared: T = gather_results(lambda: action() if _rank() == 0 else None)[0]  # type: ignore[assignment]
    return shared


def gather_results(action: Callable[[], T], *, group: "ProcessGroup | None" = None) -> list[T]:
    """Call a function on every rank, and return the results of all ranks, by rank.

    This takes one exchange, like `on_all_ranks` or `gather` alone.

    Args:
        action: The function; before process groups form, JSON can hold its result.
        group: The ranks that call this; by default all ranks.

    Raises:
        LLMError: The error of the first rank that failed, on all ranks.
        PeerLostError: Another rank has ended or does not respond.
    """
    with _share_error(group=group, timeout=CONNECT_TIMEOUT_SECONDS):
        result = action()
    return gather(result, group=group)


def gather(value: T, *, group: "ProcessGroup | None" = None) -> list[T]:
    """Return the values of all ranks, by rank; every rank calls this.

    Args:
        value: This rank's value; before process groups form, one that JSON can hold.
        group: The ranks that call this; by default all ranks.

    Raises:
        LLMError: Another rank failed within `on_all_ranks`.
    """
    return _exchange_values(value, error=None, group=group, timeout=CONNECT_TIMEOUT_SECONDS)


@contextlib.contextmanager
def _share_error(*, group: "ProcessGroup | None", timeout: float) -> Iterator[None]:
    """Send an error of the context to all ranks, which raise it where they exchange values."""
    try:
        yield
    except Exception as error:
        # The other ranks would not receive the news that a rank is lost.
        if not (is_shared(error) or isinstance(error, PeerLostError)):
            _exchange_values(None, error=error, group=group, timeout=timeout)
        raise


def is_shared(error: BaseException) -> bool:
    """Return whether all ranks raise this error: rank 0 reports it for all of them."""
    return getattr(error, "shared", False)


def leave_together(seconds: float) -> None:
    """Wait for the other ranks before an exit: a launcher kills all ranks as soon as one ends."""
    if _world_size() > 1:
        try:
            _gather_through_store(None, seconds)
        except (PeerLostError, RuntimeError):  # another rank has already ended
            return


def _exchange_values(
    value: Any, *, error: Exception | None, group: "ProcessGroup | None", timeout: float
) -> list[Any]:
    """Return the values of all ranks, or raise the error of the first rank that has one."""
    if _world_size() == 1:
        if error is not None:
            raise error
        return [value]
    values_and_reports = _gather_values((value, _error_report(error)), group, timeout)
    error_reports = [error_report for _, error_report in values_and_reports]
    failed_ranks = [rank for rank, report in enumerate(error_reports) if report is not None]
    if not failed_ranks:
        return [rank_value for rank_value, _ in values_and_reports]

    first_failed_rank = failed_ranks[0]
    first_error: Any = error
    if error is None or first_failed_rank != _rank():  # another rank's error, which comes as text
        class_name, message = error_reports[first_failed_rank]
        first_error = getattr(errors, class_name)(message)
    first_error.shared = True
    raise first_error


def _error_report(error: Exception | None) -> tuple[str, str] | None:
    """Return the class in `llm.errors` and the message of the error that other ranks raise."""
    if error is None:
        return None
    if isinstance(error, LLMError):
        return type(error).__name__, str(error)
    reason = explain_wrapped_os_error(error) or f"{type(error).__name__}: {one_line(error)}."
    return "ParallelError", f"Rank {_rank()} has failed: {reason}"


def _gather_values(value: Any, group: "ProcessGroup | None", timeout: float) -> list[Any]:
    """Return the values of all ranks, by rank; `timeout` holds before process groups form."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return _gather_through_store(value, timeout)
    values = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:  # gloo has lost its connection
        raise PeerLostError(_PEER_LOST_MESSAGE) from error
    return values


def _gather_through_store(value: Any, timeout: float) -> list[Any]:
    """Return the values of all ranks, by rank, before process groups form.

    Args:
        value: The value of this rank, which JSON can hold.
        timeout: Seconds to wait for the other ranks.

    Raises:
        PeerLostError: Another rank has ended or does not respond.
        ParallelError: Another rank has sent a value that is not JSON.
    """
    rank, world_size = _rank(), _world_size()
    restart_count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep its store
    key = f"llm/agreement/{restart_count}/{next(_exchange_counter)}"
    value_keys = [f"{key}/{peer}" for peer in range(world_size)]
    deadline = time.monotonic() + timeout
    try:
        store = _connect_to_store()
        store.set(value_keys[rank], json.dumps(value))
        _count_arrival(store, f"{key}/written", world_size)
        if rank == 0:
            _wait_for_key(store, f"{key}/written/all", value_keys, rank, deadline)
            store.set(f"{key}/values", _join_values(store.multi_get(value_keys)))
        else:
            _wait_for_key(store, f"{key}/values", value_keys, rank, deadline)
        text_by_rank = _parse_value(store.get(f"{key}/values"), 0)
        values = [
            _parse_value(text_by_rank.get(str(sender), _NO_VALUE), sender)
            for sender in range(world_size)
        ]
        _count_arrival(store, f"{key}/read", world_size)
        if rank == 0:  # it may serve the store, and must not end before the others have read
            _wait_for_key(store, f"{key}/read/all", value_keys, rank, deadline)
    except RuntimeError as error:  # rank 0 has ended, and the store with it
        raise PeerLostError(_PEER_LOST_MESSAGE) from error
    return values


def _join_values(texts: list[bytes]) -> str:
    """Return the texts of all ranks as one, by rank, without those of ranks that send nothing.

    Otherwise every rank would read as many texts as there are ranks.
    """
    return json.dumps(
        {
            sender: text.decode(errors="replace")
            for sender, text in enumerate(texts)
            if text != _NO_VALUE.encode()
        }
    )


def _count_arrival(store: "Store", barrier_key: str, world_size: int) -> None:
    """Count this rank at a barrier; the last rank opens the barrier."""
    if store.add(barrier_key, 1) == world_size:
        store.set(f"{barrier_key}/all", "")


def _wait_for_key(
    store: "Store", key: str, value_keys: list[str], rank: int, deadline: float
) -> None:
    """Wait until a key is set, and log once which ranks are late.

    Args:
        store: The store of the launcher.
        key: The key, which is set when all ranks have arrived.
        value_keys: Key of each rank's value, by rank.
        rank: Rank of this process.
        deadline: Time on the monotonic clock when a missing rank counts as lost.

    Raises:
        PeerLostError: The key is still not set at the deadline.
    """
    pause_seconds = _MIN_POLL_SECONDS
    notice_at = time.monotonic() + _NOTICE_SECONDS
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerLostError(_PEER_LOST_MESSAGE)
        if time.monotonic() > notice_at:
            _log_late_ranks(store, value_keys, rank)
            notice_at = math.inf
        time.sleep(pause_seconds)
        pause_seconds = min(1.5 * pause_seconds, _MAX_POLL_SECONDS)


def _log_late_ranks(store: "Store", value_keys: list[str], rank: int) -> None:
    """Log which ranks have not sent their value; only the lowest rank that has sent one logs."""
    has_sent = [store.check([key]) for key in value_keys]
    late_ranks = [peer for peer, is_sent in enumerate(has_sent) if not is_sent]
    if not late_ranks or rank != has_sent.index(True):
        return
    rank_names = [str(peer) for peer in late_ranks[:_MAX_RANKS_IN_MESSAGE]]
    if num_unnamed := len(late_ranks) - len(rank_names):
        rank_names.append(f"{num_unnamed:,} others")
    logger.warning(
        f"Rank {rank} waits for rank {', '.join(rank_names)} to finish this part of the start, or "
        f"to start. {_SINGLE_PROCESS_HINT}"
    )


def _parse_value(text: bytes | str, sender: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParallelError(
            f"Rank {sender} has sent a value that this version of llm does not read: install the "
            "same version on all nodes."
        ) from error


def _rank() -> int:
    return world_from_environment().rank


def _world_size() -> int:
    return world_from_environment().world_size


@functools.cache
def _connect_to_store() -> "Store":
    """Connect to the store of the launcher, which rank 0 or torchrun serves.

    The connection is cached until the process ends, and process groups use the same store.
    Otherwise rank 0 would close the store that it serves while faster ranks have already connected
    again to form their process groups.
    """
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=CONNECT_TIMEOUT_SECONDS)
    with _log_slow_connection():
        store: Store
        store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
    return store


@contextlib.contextmanager
def _log_slow_connection() -> Iterator[None]:
    """Log which ranks have not connected if the context takes `_NOTICE_SECONDS`."""
    rank = _rank()
    missing_ranks = "rank 0" if rank else f"the other {_world_size() - 1:,} ranks"
    address = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
    message = f"Rank {rank} waits for {missing_ranks} at {address}. {_SINGLE_PROCESS_HINT}"
    timer = threading.Timer(_NOTICE_SECONDS, logger.warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
