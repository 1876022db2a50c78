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
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llm.errors import DataError
from llm.prepare.encoder import Encoder, Encoding, OtherIds, make_encoder
from llm.prepare.shards import (
    ShardStats,
    needs_reference,
    read_shard,
    require_reference,
    write_shard,
)
from llm.prepare.text.sources import Source

_REPORT_SECONDS = 1.0

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
        fast: bool,
        take: Callable[[tuple[int, ShardStats]], None],
        report: Callable[[], None],
    ) -> None:
        """Write shards.

        Args:
            shards: The shards.
            encoding: How texts become ids.
            fast: Whether to try the fast encoder.
            take: Called with the number of each finished shard, and what it holds.
            report: Called about once a second.

        Raises:
            DataError: The cluster has failed.
            Exception: The first that a worker raised.
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
    report: Callable[[Totals], None] = lambda _: None,
    numbers: Sequence[int] | None = None,
) -> tuple[list[Path], list[ShardStats]]:
    """Encode each source as a shard, unless the folder has it already.

    The result is the same for any number of workers.

    Args:
        sources: The texts; at least one.
        folder: Folder of the shards.
        encoding: How texts become ids.
        workers: Cores to use, as processes; with few sources, also as threads of each process. Or
            a cluster.
        report: Called with the progress, once a second or more often.
        numbers: Numbers of the sources, counted from 0; None for all.

    Returns:
        The paths of these shards without their suffix, and their contents.

    Raises:
        DataError: A source cannot be read, or a worker was killed.
        OSError: The file system refused a write.
    """
    numbers = range(len(sources)) if numbers is None else numbers
    stems = [folder / f"{number:06d}" for number in numbers]
    shards = [(sources[number], stem) for number, stem in zip(numbers, stems, strict=True)]
    try:
        _encode_shards(shards, encoding, workers, report, fast=not needs_reference(folder))
    except OtherIds as error:
        logger.warning(
            f"{error}; encoding everything again with the tokenizers library, which is slower"
        )
        require_reference(folder)
        _encode_shards(shards, encoding, workers, report, fast=False)
    stats: list[ShardStats] = []
    for stem in stems:
        shard = read_shard(stem, verify=False)
        if shard is None:
            raise DataError(
                f"{stem}.json has vanished or cannot be read: if no other program is at work in "
                f"{folder}, give the same command again."
            )
        stats.append(shard)
    return stems, stats


class _Progress:
    """Progress of the missing shards, counted by several processes."""

    def __init__(
        self, sources: list[Source], num_shards: int, report: Callable[[Totals], None]
    ) -> None:
        sizes = [source.num_bytes for source in sources]
        self._num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self._num_shards, self._sources, self._report = num_shards, sources, report
        # For each missing shard: texts, tokens, bytes of text, bytes read and whether it is done.
        # Forked processes share an anonymous map.
        self._counts = np.frombuffer(mmap.mmap(-1, len(sources) * 5 * 8), np.int64).reshape(-1, 5)

    def note(self, number: int, stats: ShardStats) -> None:
        """Note what a shard in work holds so far."""
        consumed = self._sources[number].consumed
        self._counts[number, :4] = stats.texts, stats.tokens, stats.text_bytes, consumed

    def note_done(self, number: int) -> None:
        """Note that a shard is done."""
        self._counts[number, 3:] = self._sources[number].num_bytes or 0, 1

    def report(self) -> None:
        """Report the sums over all shards."""
        texts, tokens, text_bytes, consumed, done = self._counts.sum(axis=0).tolist()
        self._report(
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
    report: Callable[[Totals], None],
    *,
    fast: bool,
) -> None:
    """Write the missing shards, in forked processes if there are several workers, or on a cluster.

    Raises:
        OtherIds: The fast encoder is wrong, also if another rank has found it.
    """
    missing = [shard for shard in shards if read_shard(shard[1], verify=True) is None]
    if not missing:
        return
    sources = [source for source, _ in missing]
    progress = _Progress(sources, len(shards), report)
    cores = workers if isinstance(workers, int) else 1
    processes = min(cores, len(missing)) if cores > 1 else 0
    threads = cores // max(1, processes)
    # Made before the fork, so that all processes use one copy in memory.
    encoder = make_encoder(encoding, threads=threads, fast=fast)
    if any(source.one_document for source in sources):
        _warn_of_lines(encoder)

    def work(number: int) -> None:
        source, stem = missing[number]

        def note(stats: ShardStats) -> None:
            progress.note(number, stats)
            if not processes:
                progress.report()

        write_shard(source, stem, encoding, encoder, report=note)
        progress.note_done(number)

    def take(result: tuple[int, ShardStats]) -> None:
        number, stats = result
        progress.note(number, stats)
        progress.note_done(number)

    numbers = range(len(missing))
    if not isinstance(workers, int):
        workers.encode(missing, encoding, fast=fast, take=take, report=progress.report)
    elif processes:
        run_in_processes(work, numbers, processes=processes, report=progress.report)
    else:
        for number in numbers:
            work(number)
            progress.report()
    if fast and needs_reference(missing[0][1].parent):
        raise OtherIds("another rank found wrong ids")


def _warn_of_lines(encoder: Encoder) -> None:
    """Log a warning if a tokenizer, like SentencePiece, encodes separate lines differently."""
    # One text per call, which starts no threads: this process may fork later.
    joined, first, second = (encoder.encode([text], ends=False)[0] for text in ("a\nb", "a\n", "b"))
    if not np.array_equal(joined, np.concatenate([first, second])):
        logger.warning(
            "text files are encoded line by line, and this tokenizer treats each line as the start "
            "of a text, usually by adding a space in front; to encode whole documents, give them "
            "as JSON Lines"
        )


def finish_tasks(
    futures: Iterable[Future[Any]],
    *,
    report: Callable[[], None],
    take: Callable[[Any], None] = lambda _: None,
) -> None:
    """Wait for all tasks of an executor.

    Args:
        futures: The tasks.
        report: Called about once a second, and at the end.
        take: Called with each result.

    Raises:
        Exception: The first of a task.
    """
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _REPORT_SECONDS, FIRST_EXCEPTION)
        for future in done:
            take(future.result())
        report()


def run_in_processes(
    work: Callable[[int], object],
    tasks: Iterable[int],
    *,
    processes: int,
    report: Callable[[], None],
) -> None:
    """Call a function once for each task, on forked processes.

    A forked process has this one's memory, so the function's data (texts, a tokenizer) need not be
    copied or pickled, as they would for a spawned process. Threads do not survive a fork: a library
    that has started threads before may wait for them forever.

    Args:
        work: Called with each task.
        tasks: Task numbers, begun in this order.
        processes: Number of processes; none of them outlives this one.
        report: Called here about once a second, and at the end.

    Raises:
        DataError: A process was killed.
        Exception: The first exception of `work`; the processes are ended.
    """
    existing_children = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(work,))
    # Otherwise every forked process would write the contents of the buffers again.
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        finish_tasks([pool.submit(_call_work, task) for task in tasks], report=report)
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
