"""From sources to parts on the disk, on all cores, going on where an earlier try was stopped."""

import dataclasses
import functools
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm.data.preparation.encoder import Encoding, OtherIds, make_encoder
from llm.data.preparation.parts import PartStats, Progress, read_part, remove_part, write_part
from llm.data.preparation.workers import run_in_processes
from llm.data.text.sources import Source
from llm.errors import DataError

_NO_FAST_ENCODER = "reference-encoder"  # an empty file: the fast one was found wrong

log = logging.getLogger("llm.data")


@dataclass(slots=True, kw_only=True)
class Totals(Progress):
    """What has been done so far in this process' life, over all parts.

    Attributes:
        num_bytes: Of all that is to be read; None where that is not known.
        parts_done: With those that an earlier try has left.
        num_parts: All of them.
    """

    num_bytes: int | None = None
    parts_done: int = 0
    num_parts: int = 0


def tokenize_parts(
    sources: list[Source],
    folder: Path,
    *,
    encoding: Encoding,
    workers: int,
    report: Callable[[Totals], None] = lambda _: None,
    fork: bool = True,
) -> tuple[list[Path], list[PartStats]]:
    """Encodes each source as a part of its own, unless the folder holds it already.

    The result is the same for any number of workers.

    Args:
        sources: The texts; at least one.
        folder: Of the parts.
        encoding: How texts become ids.
        workers: Cores to use: as processes, and as threads of these where sources are few.
        report: Told about once a second or more often how far the work has come.
        fork: Whether several workers may be processes, forked from this one. Otherwise they are
            its threads, and it must not fork afterwards: threads do not survive that.

    Returns:
        The paths of the parts without their suffix, and what they hold.

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
            remove_part(stem)
        mark.touch()
        encode(fast=False)
    stats: list[PartStats] = []
    for stem in stems:
        held = read_part(stem, verify=False)
        if held is None:
            raise DataError(f"{stem}.json has vanished; is another program at work in {folder}?")
        stats.append(held)
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
    missing = [i for i, stem in enumerate(stems) if read_part(stem, verify=True) is None]
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

    def tell() -> None:
        report(meter.totals())

    def work(number: int) -> None:
        def note(progress: Progress) -> None:
            meter.note(number, progress)
            if not processes:
                tell()

        source = sources[number]
        encoder = encoders[source.one_document]
        write_part(source, stems[number], encoding, encoder=encoder, report=note)
        meter.note_end(number)

    if processes:
        run_in_processes(work, missing, processes=processes, watch=tell)
        return
    for number in missing:
        work(number)
        tell()


class _Meter:
    """How far each part has come, in memory that forked processes share."""

    def __init__(self, sources: list[Source], missing: list[int]) -> None:
        sizes = [sources[number].num_bytes for number in missing]
        known = [size for size in sizes if size is not None]
        self._sizes = dict(zip(missing, sizes, strict=True))
        self._num_bytes = sum(known) if len(known) == len(sizes) else None
        self._num_parts = len(sources)
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
            parts_done=self._num_parts - len(self._rows) + done,
            num_parts=self._num_parts,
        )
