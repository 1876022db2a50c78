"""Tokenizes sources into shards on the disk, on all cores; an interrupted run is resumed."""

import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm.data.preparation.encoder import Encoder, Encoding, OtherIds, make_encoder
from llm.data.preparation.shards import ShardStats, read_shard, remove_shard, write_shard
from llm.data.text.sources import Source
from llm.errors import DataError

_NO_FAST_ENCODER = "reference-encoder"  # an empty file: the fast encoder gave other ids
_REPORT_SECONDS = 1.0

_work: Callable[[int], object]  # a worker inherits it from the process that forked it

log = logging.getLogger("llm.data")


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
    workers: int,
    report: Callable[[Totals], None] = lambda _: None,
) -> tuple[list[Path], list[ShardStats]]:
    """Encode each source as a shard, unless the folder has it already.

    The result is the same for any number of workers.

    Args:
        sources: The texts; at least one.
        folder: Folder of the shards.
        encoding: How texts become ids.
        workers: Cores to use, as processes; with few sources, also as threads of each process.
        report: Called with the progress, once a second or more often.

    Returns:
        The paths of the shards without their suffix, and their contents.

    Raises:
        DataError: A source cannot be read, or a worker was killed.
        OSError: The file system refused a write.
    """
    stems = [folder / f"{number:06d}" for number in range(len(sources))]
    shards = list(zip(sources, stems, strict=True))
    mark = folder / _NO_FAST_ENCODER
    try:
        _encode(shards, encoding, workers, report, fast=not mark.exists())
    except OtherIds as error:
        log.warning(
            f"{error}; encoding everything again with the tokenizers library, which is slower"
        )
        # Remove the shards before the mark: a kill in between must not leave wrong shards that
        # count.
        for stem in stems:
            remove_shard(stem)
        mark.touch()
        _encode(shards, encoding, workers, report, fast=False)
    stats: list[ShardStats] = []
    for stem in stems:
        shard = read_shard(stem, verify=False)
        if shard is None:
            raise DataError(f"{stem}.json has vanished; is another program at work in {folder}?")
        stats.append(shard)
    return stems, stats


def _encode(
    shards: list[tuple[Source, Path]],
    encoding: Encoding,
    workers: int,
    report: Callable[[Totals], None],
    *,
    fast: bool,
) -> None:
    """Write the missing shards, in forked processes if there are several workers."""
    missing = [shard for shard in shards if read_shard(shard[1], verify=True) is None]
    if not missing:
        return
    processes = min(workers, len(missing)) if workers > 1 else 0
    threads = workers // max(1, processes)
    # Made before the fork, so that all processes use one copy in memory.
    encoder = make_encoder(encoding, threads=threads, fast=fast)
    if any(source.one_document for source, _ in missing):
        _warn_of_lines(encoder)
    sizes = [source.num_bytes for source, _ in missing]
    num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    # For each missing shard: texts, tokens, bytes of text, bytes read and whether it is done.
    # Forked processes share an anonymous map.
    counts = np.frombuffer(mmap.mmap(-1, len(missing) * 5 * 8), np.int64).reshape(-1, 5)

    def report_totals() -> None:
        texts, tokens, text_bytes, consumed, done = counts.sum(axis=0).tolist()
        report(
            Totals(
                texts=texts,
                tokens=tokens,
                text_bytes=text_bytes,
                consumed=consumed,
                num_bytes=num_bytes,
                shards_done=len(shards) - len(missing) + done,
                num_shards=len(shards),
            )
        )

    def work(number: int) -> None:
        source, stem = missing[number]

        def note(stats: ShardStats) -> None:
            counts[number, :4] = stats.texts, stats.tokens, stats.text_bytes, source.consumed
            if not processes:
                report_totals()

        write_shard(source, stem, encoding, encoder, report=note)
        counts[number, 3:] = source.num_bytes or 0, 1

    if processes:
        run_in_processes(work, range(len(missing)), processes=processes, report=report_totals)
        return
    for number in range(len(missing)):
        work(number)
        report_totals()


def _warn_of_lines(encoder: Encoder) -> None:
    """Log a warning if a tokenizer, like SentencePiece, encodes separate lines differently."""
    # One text per call, which starts no threads: this process may fork later.
    whole, first, second = (encoder.encode([text], ends=False)[0] for text in ("a\nb", "a\n", "b"))
    if not np.array_equal(whole, np.concatenate([first, second])):
        log.warning(
            "text files are encoded line by line, and this tokenizer treats each line as the start "
            "of a text, usually by adding a space in front; to encode whole documents, give them "
            "as JSON Lines"
        )


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
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(work,))
    # Otherwise every forked process would write the contents of the buffers again.
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pending = {pool.submit(_call, task) for task in tasks}
        while pending:
            done, pending = wait(pending, _REPORT_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            report()
    except BrokenProcessPool as error:
        raise DataError(
            "A worker was killed, perhaps because the memory ran out; start again with fewer "
            "--workers (of a run: --preprocessing_num_workers)."
        ) from error
    except BaseException:
        # The pool itself would wait for the tasks that are running.
        for process in set(multiprocessing.active_children()) - others:
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


def _call(task: int) -> None:
    # Pass only numbers: the work is a closure, which the pool cannot pickle for its queue.
    _work(task)
