"""From sources to shards on the disk, on all cores; an interrupted run is resumed."""

import dataclasses
import functools
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm.data.preparation.encoder import Encoding, OtherIds, make_encoder
from llm.data.preparation.shards import Progress, ShardStats, read_shard, remove_shard, write_shard
from llm.data.preparation.workers import run_in_processes
from llm.data.text.sources import Source
from llm.errors import DataError

_NO_FAST_ENCODER = "reference-encoder"  # an empty file: the fast one gave other ids

log = logging.getLogger("llm.data")


@dataclass(slots=True, kw_only=True)
class Totals(Progress):
    """What has been done so far in this process' life, over all shards.

    Attributes:
        num_bytes: Of all that is to be read; None where that is not known.
        shards_done: With those that an earlier try has left.
        num_shards: All of them.
    """

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
    fork: bool = True,
) -> tuple[list[Path], list[ShardStats]]:
    """Encode each source as a shard, unless the folder has it already.

    The result is the same for any number of workers.

    Args:
        sources: The texts; at least one.
        folder: Of the shards.
        encoding: How texts become ids.
        workers: Cores to use: as processes, and as threads of these where sources are few.
        report: Told about once a second or more often how far the work has come.
        fork: Whether several workers may be processes, forked from this one. Otherwise they are
            its threads, and it must not fork afterwards: threads do not survive that.

    Returns:
        The paths of the shards without their suffix, and what they hold.

    Raises:
        DataError: A source cannot be read, or a worker was killed.
        OSError: The file system refused a write.
    """
    stems = [folder / f"{number:06d}" for number in range(len(sources))]
    mark = folder / _NO_FAST_ENCODER
    encode = functools.partial(_encode_missing, sources, stems, encoding, workers, report, fork)
    try:
        encode(fast=not mark.exists())
    except OtherIds as error:
        log.warning(
            f"{error}; encoding everything anew with the tokenizers library, which is slower"
        )
        for stem in stems:
            remove_shard(stem)
        mark.touch()
        encode(fast=False)
    stats: list[ShardStats] = []
    for stem in stems:
        shard = read_shard(stem, verify=False)
        if shard is None:
            raise DataError(f"{stem}.json has vanished; is another program at work in {folder}?")
        stats.append(shard)
    return stems, stats


def _encode_missing(
    sources: list[Source],
    stems: list[Path],
    encoding: Encoding,
    workers: int,
    report: Callable[[Totals], None],
    fork: bool,
    *,
    fast: bool,
) -> None:
    missing = [i for i, stem in enumerate(stems) if read_shard(stem, verify=True) is None]
    if not missing:
        return
    processes = min(workers, len(missing)) if fork and workers > 1 else 0
    threads = workers // max(1, processes)
    # Made before the processes fork, which then share them.
    encoders = {
        one_document: make_encoder(encoding, one_document=one_document, threads=threads, fast=fast)
        for one_document in {sources[number].one_document for number in missing}
    }
    meter = _Meter(sources, missing)

    def report_totals() -> None:
        report(meter.totals())

    def work(number: int) -> None:
        def note(progress: Progress) -> None:
            meter.note(number, progress)
            if not processes:
                report_totals()

        source = sources[number]
        encoder = encoders[source.one_document]
        write_shard(source, stems[number], encoding, encoder=encoder, report=note)
        meter.note_end(number)

    if processes:
        run_in_processes(work, missing, processes=processes, watch=report_totals)
        return
    for number in missing:
        work(number)
        report_totals()


class _Meter:
    """How far each shard has come, in memory that forked processes share."""

    def __init__(self, sources: list[Source], missing: list[int]) -> None:
        sizes = [sources[number].num_bytes for number in missing]
        known = [size for size in sizes if size is not None]
        self._sizes = dict(zip(missing, sizes, strict=True))
        self._num_bytes = sum(known) if len(known) == len(sizes) else None
        self._num_shards = len(sources)
        self._rows = {number: row for row, number in enumerate(missing)}
        # Texts, tokens, their bytes, bytes read of the disk, and whether it is done.
        shared = mmap.mmap(-1, len(missing) * 5 * 8)
        self._counts = np.frombuffer(shared, np.int64).reshape(-1, 5)

    def note(self, number: int, progress: Progress) -> None:
        self._counts[self._rows[number], :4] = dataclasses.astuple(progress)

    def note_end(self, number: int) -> None:
        self._counts[self._rows[number], 3:] = self._sizes[number] or 0, 1

    def totals(self) -> Totals:
        texts, tokens, text_bytes, consumed, done = self._counts.sum(axis=0).tolist()
        return Totals(
            texts=texts,
            tokens=tokens,
            text_bytes=text_bytes,
            consumed=consumed,
            num_bytes=self._num_bytes,
            shards_done=self._num_shards - len(self._rows) + done,
            num_shards=self._num_shards,
        )
