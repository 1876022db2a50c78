"""From sources to parts on the disk, on all cores, going on where an earlier try was stopped."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llm.data.encoder import Encoder, OtherIds, make_encoder
from llm.data.parts import PartFacts, Progress, read_part, remove_part, write_part
from llm.data.sources import Source
from llm.data.workers import run_tasks
from llm.errors import DataError
from llm.text_tokenizer import TextTokenizer

_REPORT_SECONDS = 1.0
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
    report: Callable[[Totals], None] | None = None,
    fork: bool = True,
) -> tuple[list[Path], list[PartFacts]]:
    """Encodes each source as a part of its own, unless the folder holds it already.

    The result is the same for any number of workers.

    Args:
        sources: The texts; at least one.
        folder: Of the parts.
        encoding: How texts become ids.
        workers: Cores to use: as processes, and as threads of these where sources are few.
        report: Told about once a second how far the work has come.
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
    facts = []
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
    report: Callable[[Totals], None] | None,
    fork: bool,
    *,
    fast: bool,
) -> None:
    missing = [i for i, stem in enumerate(stems) if read_part(stem, verify=True) is None]
    if not missing:
        return
    processes = min(workers, len(missing)) if fork and workers > 1 else 0
    kinds = {sources[number].one_document for number in missing}
    # Made before the processes fork, which then share them.
    encoders = {
        one_document: make_encoder(
            encoding.tokenizer,
            dtype=encoding.dtype,
            end_token=None if one_document else encoding.end_token,
            threads=workers // max(1, processes),
            allow_special_tokens=encoding.allow_special_tokens,
            fast=fast,
        )
        for one_document in kinds
    }
    meter = _Meter(sources, missing, report)

    def work(number: int, send: Callable[[Any], None]) -> None:
        _write(sources[number], stems[number], encoding, encoders, send)

    run_tasks(missing, work, processes=processes, on_message=meter.hear)


def _write(
    source: Source,
    stem: Path,
    encoding: Encoding,
    encoders: dict[bool, Encoder],
    send: Callable[[Any], None],
) -> None:
    told = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal told
        if time.monotonic() - told >= _REPORT_SECONDS:
            told = time.monotonic()
            send(dataclasses.replace(progress))

    try:
        write_part(
            source,
            stem,
            encoder=encoders[source.one_document],
            dtype=encoding.dtype,
            end_token=encoding.end_token,
            on_error=encoding.on_error,
            report=report,
        )
    except BaseException:
        remove_part(stem)
        raise
    facts = read_part(stem, verify=False)
    if facts is not None:
        send(Progress(facts.texts, facts.tokens, facts.text_bytes, source.num_bytes or 0))


class _Meter:
    """Adds up what the parts have come to."""

    def __init__(
        self,
        sources: list[Source],
        missing: list[int],
        report: Callable[[Totals], None] | None,
    ) -> None:
        sizes = [sources[number].num_bytes for number in missing]
        known = [size for size in sizes if size is not None]
        self._num_bytes = sum(known) if len(known) == len(sizes) else None
        self._num_parts = len(sources)
        self._done = len(sources) - len(missing)
        self._parts: dict[int, Progress] = {}
        self._report = report
        self._told = time.monotonic()

    def hear(self, number: int, message: Progress | None) -> None:
        if message is None:
            self._done += 1
        else:
            self._parts[number] = message
        now = time.monotonic()
        if self._report is None or now - self._told < _REPORT_SECONDS:
            return
        self._told = now
        parts = self._parts.values()
        self._report(
            Totals(
                texts=sum(part.texts for part in parts),
                tokens=sum(part.tokens for part in parts),
                text_bytes=sum(part.text_bytes for part in parts),
                consumed=sum(part.consumed for part in parts),
                num_bytes=self._num_bytes,
                parts_done=self._done,
                num_parts=self._num_parts,
            )
        )
