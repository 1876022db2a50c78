"""From sources to parts on the disk, on all cores, going on where an earlier try was stopped."""

import dataclasses
import functools
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llm.data.encoder import Encoder, OtherIds, make_encoder
from llm.data.parts import PartFacts, Progress, read_part, remove_part, write_part
from llm.data.sources import Source
from llm.data.workers import run_in_processes
from llm.errors import ConfigError, DataError
from llm.text_tokenizer import TextTokenizer

_NO_FAST_ENCODER = "reference-encoder"  # an empty file: the fast one was found wrong

log = logging.getLogger("llm.data")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How texts become ids.

    Attributes:
        tokenizer: What gives the ids.
        end_token: Ends each document; None is nothing.
        dtype: Of the ids on the disk, wide enough for all of the tokenizer's.
        allow_special_tokens: Whether the name of a special token in a text is that token.
        on_error: What becomes of records that cannot be used.
    """

    tokenizer: TextTokenizer
    end_token: int | None
    dtype: np.dtype[Any]
    allow_special_tokens: bool = False
    on_error: Literal["stop", "skip"] = "stop"


def end_token(tokenizer: TextTokenizer, append_eos: bool) -> int | None:
    """The token that shall end each document; None where none shall.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if append_eos and tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end-of-text token to put between documents; pass "
            "--no_append_eos, or use a tokenizer that has one."
        )
    return tokenizer.eos_token_id if append_eos else None


@dataclass(slots=True)
class Totals:
    """What has been done so far, over all parts.

    Attributes:
        texts: Encoded in this process' life.
        tokens: Theirs.
        text_bytes: Theirs, in UTF-8.
        consumed: Bytes on the disk that were read.
        num_bytes: Of all that is to be read; None where that is not known.
        parts_done: With those that an earlier try has left.
        num_parts: All of them.
    """

    texts: int = 0
    tokens: int = 0
    text_bytes: int = 0
    consumed: int = 0
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
) -> tuple[list[Path], list[PartFacts]]:
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
    facts: list[PartFacts] = []
    for stem in stems:
        held = read_part(stem, verify=False)
        if held is None:
            raise DataError(f"{stem}.json has vanished; is another program at work in {folder}?")
        facts.append(held)
    return stems, facts


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
        one_document: encoder_of(encoding, one_document=one_document, threads=threads, fast=fast)
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
        tokenize_part(source, stems[number], encoding, encoder=encoder, report=note)
        meter.note_end(number)

    if processes:
        run_in_processes(work, missing, processes=processes, watch=tell)
        return
    for number in missing:
        work(number)
        tell()


def tokenize_part(
    source: Source,
    stem: Path,
    encoding: Encoding,
    *,
    encoder: Encoder | None = None,
    report: Callable[[Progress], None] = lambda _: None,
) -> PartFacts:
    """Encodes one source as a part; what fails leaves no part.

    All that it needs can be pickled, so that it may run in any process that sees the same files.

    Args:
        source: The texts.
        stem: The path of the part without its suffix.
        encoding: How texts become ids.
        encoder: One made by `encoder_of`; None makes one.
        report: Told the progress after every batch.

    Returns:
        What the part holds.

    Raises:
        DataError: The source cannot be read.
        OtherIds: The encoder cannot be trusted.
        OSError: The file system refused a write.
    """
    if encoder is None:
        encoder = encoder_of(encoding, one_document=source.one_document, threads=1, fast=True)
    try:
        return write_part(
            source,
            stem,
            encoder=encoder,
            dtype=encoding.dtype,
            end_token=encoding.end_token,
            on_error=encoding.on_error,
            report=report,
        )
    except BaseException:
        remove_part(stem)
        raise


def encoder_of(encoding: Encoding, *, one_document: bool, threads: int, fast: bool) -> Encoder:
    """The encoder of sources that are one document each, or of all others.

    Args:
        encoding: How texts become ids.
        one_document: Which of the two; the end of a document is not the encoder's to write.
        threads: That it may use.
        fast: Whether to try the fast one.
    """
    return make_encoder(
        encoding.tokenizer,
        dtype=encoding.dtype,
        end_token=None if one_document else encoding.end_token,
        threads=threads,
        allow_special_tokens=encoding.allow_special_tokens,
        fast=fast,
    )


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
