"""Shards written by the workers of a running Dask cluster: `--executor dask`.

The workers need this package, and they need to see the texts and the output under the same paths.
If a worker is lost, Dask gives its shard to another one.
"""

import ctypes
import hashlib
import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm.errors import ConfigError, DataError, one_line
from llm.prepare.encoder import Encoder, Encoding, make_encoder
from llm.prepare.shards import ShardStats, read_shard, write_shard
from llm.prepare.tokenize_shards import Shard, finish_tasks
from llm.runtime.files import write_whole

_CONNECT_TIMEOUT_SECONDS = 30
_WORKER_TIMEOUT_SECONDS = 60
_TASKS_PER_WORKER = 32  # at least, with enough shards: a task costs Dask some ms
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_INSTALL_COMMAND = "pip install 'llm-trainers[dask]'"

_thread_cache = threading.local()  # on a worker: `key` and `encoding_and_encoder`

logger = logging.getLogger("llm.data")


class DaskCluster:
    """The workers of a running Dask cluster.

    Args:
        client: A `distributed.Client`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def encode(
        self,
        shards: list[Shard],
        encoding: Encoding,
        *,
        allow_fast: bool,
        on_result: Callable[[tuple[int, ShardStats]], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Write shards, as `tokenize_shards.Cluster.encode` describes."""
        # Results of equal calls are not reused: an earlier client's files may be gone.
        executor = self._client.get_executor(pure=False)
        encoding_path = _publish_encoding(encoding, shards)
        tasks = self._group_shards(shards)
        working_dir = os.getcwd()  # as paths of the sources may be relative
        futures = [
            executor.submit(_encode_shards, task, encoding_path, allow_fast, working_dir)
            for task in tasks
        ]
        try:
            _collect_results(futures, on_result=on_result, on_progress=on_progress)
        finally:
            executor.shutdown(wait=False)

    def _group_shards(self, shards: list[Shard]) -> list[list[tuple[int, Shard]]]:
        """Return the shards with their indices, in a group for each task."""
        indexed_shards = list(enumerate(shards))
        num_workers = max(1, len(self._client.nthreads()))
        shards_per_task = max(1, len(shards) // (num_workers * _TASKS_PER_WORKER))
        return [
            indexed_shards[first : first + shards_per_task]
            for first in range(0, len(shards), shards_per_task)
        ]

    def sync(self) -> None:
        """Return when all that the workers have written is on the disk."""
        self._client.run(os.sync)


@contextmanager
def connect_to_dask(scheduler_file: str | None) -> Iterator[DaskCluster]:
    """Connect to a running scheduler.

    Args:
        scheduler_file: The file that `dask scheduler --scheduler-file` has written; None takes the
            address in `DASK_SCHEDULER_ADDRESS`.

    Raises:
        ConfigError: Dask is not installed, or the scheduler is not named or not reached, or has no
            workers.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ConfigError(f"--executor dask needs Dask: {_INSTALL_COMMAND}") from error
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    _check_scheduler_named(scheduler_file, address)
    _silence_libraries()
    location = f"--scheduler_file {scheduler_file}" if scheduler_file else f"{address}"
    connection = {"scheduler_file": scheduler_file} if scheduler_file else {"address": address}
    try:
        client = Client(**connection, timeout=_CONNECT_TIMEOUT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"The Dask scheduler at {location} does not answer ({one_line(error)}); check that it "
            "runs, and that this node can connect to it."
        ) from error
    try:
        client.wait_for_workers(1, timeout=_WORKER_TIMEOUT_SECONDS)
        logger.info(f"Dask: {len(client.nthreads())} workers at {location}")
        yield DaskCluster(client)
    except TimeoutError as error:
        raise ConfigError(
            f"The Dask scheduler at {location} has no worker after {_WORKER_TIMEOUT_SECONDS} s; "
            "start workers, and repeat the command."
        ) from error
    finally:
        client.close(timeout=5)


def _silence_libraries() -> None:
    """Turn off the loggers of Dask: failures become sentences, and it would write tracebacks."""
    for name in ("asyncio", *logging.root.manager.loggerDict):  # each sets its level
        if name.partition(".")[0] in ("asyncio", "distributed", "tornado"):
            logging.getLogger(name).disabled = True


def _check_scheduler_named(scheduler_file: str | None, address: str | None) -> None:
    """Refuse to connect without a scheduler's address, or with a file that does not exist."""
    if scheduler_file is None and not address:
        raise ConfigError(
            "--executor dask finds no scheduler; export DASK_SCHEDULER_ADDRESS, or give "
            "--scheduler_file."
        )
    if scheduler_file is not None and not Path(scheduler_file).is_file():
        raise ConfigError(f"--scheduler_file {scheduler_file} does not exist; start the scheduler.")


def _publish_encoding(encoding: Encoding, shards: list[Shard]) -> Path:
    """Pickle the encoding for the workers into the folder of the shards; return the path.

    It is a file, because a worker that encodes holds the global interpreter lock (GIL) and could
    not send the encoding to other workers.
    """
    import cloudpickle

    pickled = cloudpickle.dumps(encoding)
    _, stem = shards[0]
    path = stem.with_name(_encoding_name(pickled))
    write_whole(path, pickled)
    return path


def _collect_results(
    futures: list[Any],
    *,
    on_result: Callable[[tuple[int, ShardStats]], None],
    on_progress: Callable[[], None],
) -> None:
    """Wait for all tasks, and pass the result of each shard on.

    Raises:
        DataError: The scheduler or the workers have died.
        Exception: The first exception of a task.
    """
    from distributed import KilledWorker

    def on_task_result(results: list[tuple[int, ShardStats]]) -> None:
        for result in results:
            on_result(result)

    try:
        finish_tasks(futures, on_progress=on_progress, on_result=on_task_result)
    except CancelledError as error:
        raise DataError(
            "The Dask scheduler has stopped, perhaps because its job ended; start it again and "
            "repeat the command, which keeps the finished shards."
        ) from error
    except KilledWorker as error:
        raise DataError(
            f"Dask gave up a shard, because its workers died ({one_line(error)}); give them "
            "more memory."
        ) from error


def _encode_shards(
    shards: list[tuple[int, Shard]], encoding_path: Path, allow_fast: bool, working_dir: str
) -> list[tuple[int, ShardStats]]:
    """Write a task's shards, except those that a lost worker has written; called on a worker.

    Returns:
        The index and the contents of each shard.
    """
    if os.getcwd() != working_dir:
        os.chdir(working_dir)
    results = []
    for shard_index, (source, stem) in shards:
        shard_stats = read_shard(stem, verify=True)
        if shard_stats is None:
            encoding, encoder = _get_cached_encoder(encoding_path, allow_fast=allow_fast)
            shard_stats = write_shard(source, stem, encoding, encoder, on_progress=lambda _: None)
        results.append((shard_index, shard_stats))
    return results


def _get_cached_encoder(encoding_path: Path, *, allow_fast: bool) -> tuple[Encoding, Encoder]:
    """Return the encoding and the encoder, cached in the worker's thread: they take a second."""
    key = encoding_path.name, allow_fast  # the name contains a digest of the encoding
    if getattr(_thread_cache, "key", None) != key:
        _keep_freed_memory()
        encoding = _load_encoding(encoding_path)
        encoder = make_encoder(encoding, num_threads=1, allow_fast=allow_fast)
        _thread_cache.encoding_and_encoder = encoding, encoder
        _thread_cache.key = key
    encoding_and_encoder: tuple[Encoding, Encoder] = _thread_cache.encoding_and_encoder
    return encoding_and_encoder


def _load_encoding(encoding_path: Path) -> Encoding:
    """Unpickle the encoding that the client has written; its digest is in the name of the file.

    The client sends the name through Dask, and others may write in the folder of the file.
    Unpickling can run code, so nothing but the client's bytes is unpickled.

    Raises:
        DataError: This worker does not see the file, or its content is not the client's.
    """
    try:
        pickled = encoding_path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"The Dask worker on {socket.gethostname()} does not find {encoding_path.absolute()}; "
            "start the workers where they see the texts and the output under the same paths."
        ) from error
    if encoding_path.name != _encoding_name(pickled):
        raise DataError(
            f"{encoding_path.absolute()} has changed since this command wrote it; check who can "
            "write in its folder, and repeat the command."
        )
    encoding: Encoding = pickle.loads(pickled)
    return encoding


def _encoding_name(pickled: bytes) -> str:
    return f"encoding-{hashlib.sha256(pickled).hexdigest()}.pickle"


def _keep_freed_memory() -> None:
    """Let malloc keep freed memory, up to the limits that glibc itself would reach.

    Dask starts workers with MALLOC_TRIM_THRESHOLD_=65536. This also turns off glibc's dynamic
    limit, so that every array above 128 KiB is mapped and unmapped, and the page faults make
    encoding take about 1.2 times as long. The worker keeps this setting until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
