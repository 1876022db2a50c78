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

_CONNECT_SECONDS = 30
_WORKER_SECONDS = 60
_TASKS_PER_WORKER = 32  # at least, with enough shards: a task costs Dask some ms
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_INSTALL = "pip install 'llm-trainers[dask]'"

_kept = threading.local()  # the encoder of a worker's thread, and what it was made from

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
        fast: bool,
        take: Callable[[tuple[int, ShardStats]], None],
        report: Callable[[], None],
    ) -> None:
        """Write shards; see `tokenize_shards.Cluster`."""
        import cloudpickle
        from distributed import KilledWorker

        # Results of equal calls are not reused: an earlier client's files may be gone.
        executor = self._client.get_executor(pure=False)
        # A file, because a worker that encodes holds Python's lock and cannot send it to others.
        pickled = cloudpickle.dumps(encoding)
        file = shards[0][1].with_name(_encoding_name(pickled))
        write_whole(file, pickled)
        key = (
            encoding.tokenizer.fingerprint,
            encoding.end_token,
            encoding.begin_token,
            encoding.dtype,
            encoding.allow_special_tokens,
            encoding.on_error,
            fast,
        )
        folder = os.getcwd()  # as paths of the sources may be relative
        numbered = list(enumerate(shards))
        workers = max(1, len(self._client.nthreads()))
        size = max(1, len(numbered) // (workers * _TASKS_PER_WORKER))
        futures = [
            executor.submit(_encode_shards, numbered[first : first + size], key, file, folder)
            for first in range(0, len(numbered), size)
        ]

        def take_all(results: list[tuple[int, ShardStats]]) -> None:
            for result in results:
                take(result)

        try:
            finish_tasks(futures, report=report, take=take_all)
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
        finally:
            executor.shutdown(wait=False)

    def sync(self) -> None:
        """Return when all that the workers have written is on the disk."""
        self._client.run(os.sync)


@contextmanager
def connect(scheduler_file: str | None) -> Iterator[DaskCluster]:
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
        raise ConfigError(f"--executor dask needs Dask: {_INSTALL}") from error
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    if scheduler_file is None and not address:
        raise ConfigError(
            "--executor dask finds no scheduler; export DASK_SCHEDULER_ADDRESS, or give "
            "--scheduler_file."
        )
    if scheduler_file is not None and not Path(scheduler_file).is_file():
        raise ConfigError(f"--scheduler_file {scheduler_file} does not exist; start the scheduler.")
    # What fails becomes a sentence here; the library would write tracebacks, too.
    for name in ("asyncio", *logging.root.manager.loggerDict):  # each sets its level
        if name.partition(".")[0] in ("asyncio", "distributed", "tornado"):
            logging.getLogger(name).disabled = True
    place = f"--scheduler_file {scheduler_file}" if scheduler_file else f"{address}"
    how = {"scheduler_file": scheduler_file} if scheduler_file else {"address": address}
    try:
        client = Client(**how, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"The Dask scheduler at {place} does not answer ({one_line(error)}); check that it "
            "runs, and that this node can connect to it."
        ) from error
    try:
        client.wait_for_workers(1, timeout=_WORKER_SECONDS)
        logger.info(f"Dask: {len(client.nthreads())} workers at {place}")
        yield DaskCluster(client)
    except TimeoutError as error:
        raise ConfigError(
            f"The Dask scheduler at {place} has no worker after {_WORKER_SECONDS} s; start "
            "workers, and repeat the command."
        ) from error
    finally:
        client.close(timeout=5)


def _encode_shards(
    shards: list[tuple[int, Shard]], key: tuple[Any, ...], file: Path, folder: str
) -> list[tuple[int, ShardStats]]:
    """Write some shards, unless a lost worker has written them; called on a worker."""
    if os.getcwd() != folder:
        os.chdir(folder)
    results = []
    for number, (source, stem) in shards:
        stats = read_shard(stem, verify=True)
        if stats is None:
            encoding, encoder = _worker_encoder(key, file)
            stats = write_shard(source, stem, encoding, encoder, report=lambda _: None)
        results.append((number, stats))
    return results


def _worker_encoder(key: tuple[Any, ...], file: Path) -> tuple[Encoding, Encoder]:
    # Both take a second, so a worker keeps them for the next command, too.
    if getattr(_kept, "key", None) != key:
        _keep_freed_memory()
        encoding = _load_encoding(file)
        _kept.made = encoding, make_encoder(encoding, threads=1, fast=key[-1])
        _kept.key = key
    encoding_and_encoder: tuple[Encoding, Encoder] = _kept.made
    return encoding_and_encoder


def _load_encoding(file: Path) -> Encoding:
    """Unpickle the encoding that the client has written; its digest is in the name of the file.

    The client sends the name through Dask, and others may write in the folder of the file.
    Unpickling can run code, so nothing but the client's bytes is unpickled.

    Raises:
        DataError: This worker does not see the file, or its content is not the client's.
    """
    try:
        pickled = file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"The Dask worker on {socket.gethostname()} does not find {file.absolute()}; start "
            "the workers where they see the texts and the output under the same paths."
        ) from error
    if file.name != _encoding_name(pickled):
        raise DataError(
            f"{file.absolute()} has changed since this command wrote it; check who can write in "
            "its folder, and repeat the command."
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
