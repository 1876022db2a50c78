"""Tokenizes sources into shards on the disk, on all cores; an interrupted run is resumed."""

import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llm.errors import DataError
from llm.prepare.encoder import Encoder, Encoding, WrongIdsError, make_encoder
from llm.prepare.shards import (
    ShardStats,
    needs_reference,
    read_shard,
    require_reference,
    write_shard,
)
from llm.prepare.text.sources import Source

_PROGRESS_SECONDS = 1.0

_work: Callable[[int], object]  # a worker inherits it from the process that forked it

Shard = tuple[Source, Path]
"""A text, and the path of its shard without suffix."""

logger = logging.getLogger("llm.data")


class Cluster(Protocol):
    """Workers outside of this machine that encode shards."""

    def encode(
        self,
        shards: list[Shard],
        encoding: Encoding,
        *,
        allow_fast: bool,
        on_result: Callable[[tuple[int, ShardStats]], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Write shards.

        Args:
            shards: The shards.
            encoding: How texts become ids.
            allow_fast: Whether to try the fast encoder.
            on_result: Called with the index of each finished shard in `shards`, and its contents.
            on_progress: Called about once a second.

        Raises:
            DataError: The cluster has failed.
            Exception: The first exception of a worker.
        """

    def sync(self) -> None:
        """Return when all that the workers have written is on the disk."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """The progress of this process over all shards.

    Attributes:
        texts: Texts that have tokens.
        tokens: Tokens.
        text_bytes: UTF-8 bytes of the texts.
        consumed: Bytes read from the disk; for a compressed file, compressed bytes.
        num_bytes: Total bytes to read; None if unknown.
        shards_done: Finished shards, including an earlier run's.
        num_shards: All shards.
    """

    texts: int = 0
    tokens: int = 0
    text_bytes: int = 0
    consumed: int = 0
    num_bytes: int | None = None
    shards_done: int = 0
    num_shards: int = 0


def tokenize_shards(
    sources: list[Source],
    folder: Path,
    *,
    encoding: Encoding,
    workers: int | Cluster,
    on_progress: Callable[[Totals], None] = lambda _: None,
    shard_indices: Sequence[int] | None = None,
) -> tuple[list[Path], list[ShardStats]]:
    """Encode each source as a shard, unless the folder has it already.

    The result is the same for any number of workers.

    Args:
        sources: The texts; at least one.
        folder: Folder of the shards.
        encoding: How texts become ids.
        workers: Cores to use, as processes; with few sources, also as threads of each process. Or
            a cluster.
        on_progress: Called with the progress, once a second or more often.
        shard_indices: Indices of the sources to encode; None for all.

    Returns:
        The paths of these shards without their suffix, and their contents.

    Raises:
        DataError: A source cannot be read, or a worker was killed.
        OSError: The file system refused a write.
    """
    indices = range(len(sources)) if shard_indices is None else shard_indices
    shards = [(sources[index], folder / f"{index:06d}") for index in indices]
    try:
        _encode_shards(
            shards, encoding, workers, on_progress, allow_fast=not needs_reference(folder)
        )
    except WrongIdsError as error:
        logger.warning(
            f"{error}; encoding everything again with the tokenizers library, which is slower"
        )
        require_reference(folder)
        _encode_shards(shards, encoding, workers, on_progress, allow_fast=False)
    stems = [stem for _, stem in shards]
    return stems, [_read_existing_shard(stem) for stem in stems]


def _read_existing_shard(stem: Path) -> ShardStats:
    """Return the contents of a shard that has just been written."""
    stats = read_shard(stem, verify=False)
    if stats is None:
        raise DataError(
            f"{stem}.json has vanished or cannot be read: if no other program is at work in "
            f"{stem.parent}, give the same command again."
        )
    return stats


class _Progress:
    """Progress of the missing shards, counted by several processes."""

    def __init__(
        self, sources: list[Source], num_shards: int, on_progress: Callable[[Totals], None]
    ) -> None:
        sizes = [source.num_bytes for source in sources]
        self._num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self._num_shards = num_shards
        self._sources = sources
        self._on_progress = on_progress
        # For each missing shard: texts, tokens, bytes of text, bytes read and whether it is done.
        # Forked processes share an anonymous map.
        self._counts = np.frombuffer(mmap.mmap(-1, len(sources) * 5 * 8), np.int64).reshape(-1, 5)

    def update_shard(self, index: int, stats: ShardStats) -> None:
        """Record the contents of an unfinished shard so far."""
        consumed = self._sources[index].consumed
        self._counts[index, :4] = stats.texts, stats.tokens, stats.text_bytes, consumed

    def finish_shard(self, index: int) -> None:
        """Record that a shard is done."""
        self._counts[index, 3:] = self._sources[index].num_bytes or 0, 1

    def add_result(self, result: tuple[int, ShardStats]) -> None:
        """Record a shard that a cluster has finished: its index, and its contents."""
        index, stats = result
        self.update_shard(index, stats)
        self.finish_shard(index)

    def report(self) -> None:
        """Report the sums over all shards."""
        texts, tokens, text_bytes, consumed, done = self._counts.sum(axis=0).tolist()
        self._on_progress(
            Totals(
                texts=texts,
                tokens=tokens,
                text_bytes=text_bytes,
                consumed=consumed,
                num_bytes=self._num_bytes,
                shards_done=self._num_shards - len(self._sources) + done,
                num_shards=self._num_shards,
            )
        )


def _encode_shards(
    shards: list[Shard],
    encoding: Encoding,
    workers: int | Cluster,
    on_progress: Callable[[Totals], None],
    *,
    allow_fast: bool,
) -> None:
    """Write the missing shards, on this machine's cores or on a cluster.

    Raises:
        WrongIdsError: The fast encoder is wrong, also if another rank has found it.
    """
    missing_shards = [
        (source, stem) for source, stem in shards if read_shard(stem, verify=True) is None
    ]
    if not missing_shards:
        return
    sources = [source for source, _ in missing_shards]
    progress = _Progress(sources, len(shards), on_progress)
    num_processes, num_threads = _divide_cores(workers, num_shards=len(missing_shards))
    # Made before the fork, so that all processes use one copy in memory.
    encoder = make_encoder(encoding, num_threads=num_threads, allow_fast=allow_fast)
    if any(source.one_document for source in sources):
        _warn_of_separate_lines(encoder)

    if isinstance(workers, int):
        _encode_on_cores(missing_shards, encoding, encoder, progress, num_processes=num_processes)
    else:
        workers.encode(
            missing_shards,
            encoding,
            allow_fast=allow_fast,
            on_result=progress.add_result,
            on_progress=progress.report,
        )
    if allow_fast and needs_reference(missing_shards[0][1].parent):
        raise WrongIdsError("another rank found wrong ids")


def _divide_cores(workers: int | Cluster, *, num_shards: int) -> tuple[int, int]:
    """Return the forked processes, 0 for this one alone, and the threads of each process."""
    num_cores = workers if isinstance(workers, int) else 1
    num_processes = min(num_cores, num_shards) if num_cores > 1 else 0
    return num_processes, num_cores // max(1, num_processes)


def _encode_on_cores(
    shards: list[Shard],
    encoding: Encoding,
    encoder: Encoder,
    progress: _Progress,
    *,
    num_processes: int,
) -> None:
    """Write shards in forked processes, or in this process if `num_processes` is 0."""
    encode_shard = partial(
        _encode_shard, shards, encoding, encoder, progress, reports_batches=not num_processes
    )
    indices = range(len(shards))
    if num_processes:
        run_in_processes(
            encode_shard, indices, num_processes=num_processes, on_progress=progress.report
        )
        return
    for index in indices:
        encode_shard(index)
        progress.report()


def _encode_shard(
    shards: list[Shard],
    encoding: Encoding,
    encoder: Encoder,
    progress: _Progress,
    shard_index: int,
    *,
    reports_batches: bool,
) -> None:
    """Write one of several shards, and update its progress.

    Args:
        shards: The shards.
        encoding: How texts become ids.
        encoder: An encoder for this encoding.
        progress: Counts for all shards.
        shard_index: Index of the shard.
        reports_batches: Whether to report the progress after each batch. Forked processes only
            update it.
    """

    def on_batch(stats: ShardStats) -> None:
        progress.update_shard(shard_index, stats)
        if reports_batches:
            progress.report()

    source, stem = shards[shard_index]
    write_shard(source, stem, encoding, encoder, on_progress=on_batch)
    progress.finish_shard(shard_index)


def _warn_of_separate_lines(encoder: Encoder) -> None:
    """Log a warning if a tokenizer, like SentencePiece, encodes separate lines differently."""
    # One text per call, which starts no threads: this process may fork later.
    joined_ids, first_line_ids, second_line_ids = (
        encoder.encode([text], adds_boundaries=False)[0] for text in ("a\nb", "a\n", "b")
    )
    if not np.array_equal(joined_ids, np.concatenate([first_line_ids, second_line_ids])):
        logger.warning(
            "text files are encoded line by line, and this tokenizer treats each line as the start "
            "of a text, usually by adding a space in front; to encode whole documents, give them "
            "as JSON Lines"
        )


def finish_tasks(
    futures: Iterable[Future[Any]],
    *,
    on_progress: Callable[[], None],
    on_result: Callable[[Any], None] = lambda _: None,
) -> None:
    """Wait for all tasks of an executor.

    Args:
        futures: The tasks.
        on_progress: Called about once a second, and at the end.
        on_result: Called with each result.

    Raises:
        Exception: The first exception of a task.
    """
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _PROGRESS_SECONDS, FIRST_EXCEPTION)
        for future in done:
            on_result(future.result())
        on_progress()


def run_in_processes(
    work: Callable[[int], object],
    tasks: Iterable[int],
    *,
    num_processes: int,
    on_progress: Callable[[], None],
) -> None:
    """Call a function once for each task, on forked processes.

    A forked process has this one's memory, so the function's data (texts, a tokenizer) need not be
    copied or pickled, as they would for a spawned process. Threads do not survive a fork: a library
    that has started threads before may wait for them forever.

    Args:
        work: Called with each task.
        tasks: Task numbers, begun in this order.
        num_processes: Number of processes; none of them outlives this one.
        on_progress: Called here about once a second, and at the end.

    Raises:
        DataError: A process was killed.
        Exception: The first exception of `work`; the processes are ended.
    """
    existing_children = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_processes, context, initializer=_start_worker, initargs=(work,))
    # Otherwise every forked process would write the contents of the buffers again.
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        finish_tasks([pool.submit(_call_work, task) for task in tasks], on_progress=on_progress)
    except BrokenProcessPool as error:
        raise DataError(
            "A worker was killed, perhaps because the memory ran out; start again with fewer "
            "--workers (of a run: --preprocessing_num_workers)."
        ) from error
    except BaseException:
        # The pool itself would wait for the tasks that are running.
        for process in set(multiprocessing.active_children()) - existing_children:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(work: Callable[[int], object]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to workers, too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call_work(task: int) -> None:
    # Pass only numbers: the work is a closure, which the pool cannot pickle for its queue.
    _work(task)
