"""A shard: a chunk of text as token ids on the disk, written by one worker, reused by a restart.

    STEM.bin     token ids, one text after the other
    STEM.idx     their index: both are a complete token file
    STEM.bytes   UTF-8 bytes of each text, uint32
    STEM.json    counts and checksums, renamed last: without it the shard does not exist

Each file is written under a temporary name and renamed, so a worker that was given up as lost does
not disturb its replacement at the same shard. A text without tokens is dropped and counted.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.megatron import ROW_BYTES, write_index
from llm.errors import DataError
from llm.prepare.encoder import Encoder, Encoding, ReferenceEncoder, WrongIdsError
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import Source
from llm.prepare.verification import ChunkHash, compute_checksums

_SUFFIXES = (".bin", ".idx", ".bytes")
_REFERENCE_MARKER = "reference-encoder"  # an empty file: the fast encoder gave other ids
_MAX_TOKENS = 2**31 - 1  # per text, a limit of the index format


@dataclass(kw_only=True)
class ShardStats:
    """The contents of a shard, so far or when it is done.

    Attributes:
        one_document: Whether its texts are one document; otherwise each is one.
        texts: Texts that have tokens.
        empty: Texts without tokens.
        skipped: Records that could not be used.
        tokens: Tokens, including end tokens.
        text_bytes: UTF-8 bytes of the texts.
        largest_token: The largest id; 0 without tokens.
        fast: Whether another encoder than the reference made the ids.
        sizes: The size of each of the three files in bytes.
        checksums: The result of `verification.checksums` for each of them.
    """

    one_document: bool
    texts: int = 0
    empty: int = 0
    skipped: int = 0
    tokens: int = 0
    text_bytes: int = 0
    largest_token: int = 0
    fast: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, list[str]] = field(default_factory=dict)

    @property
    def documents(self) -> int:
        """Documents that have tokens."""
        return min(self.texts, 1) if self.one_document else self.texts


def write_shard(
    source: Source,
    stem: Path,
    encoding: Encoding,
    encoder: Encoder,
    *,
    on_progress: Callable[[ShardStats], None],
) -> ShardStats:
    """Encode a source and write it to the disk; an error leaves no shard.

    Args:
        source: The texts.
        stem: The path of the files without their suffix.
        encoding: How texts become ids.
        encoder: An encoder for this encoding.
        on_progress: Called after every batch with the contents of the shard so far.

    Returns:
        The content of the shard.

    Raises:
        DataError: The source cannot be read, or a text is too long.
        WrongIdsError: The encoder cannot be trusted, here or for another worker.
        OSError: The file system refused a write.
    """
    bad_records = BadRecordPolicy(encoding.on_error)
    temporary_stem = stem.with_name(f".{stem.name}-{uuid4().hex}")  # of no other process
    is_fast = not isinstance(encoder, ReferenceEncoder)
    try:
        writer = _ShardWriter(source, temporary_stem, encoding.dtype)
        with contextlib.closing(writer):
            for texts in source.batches(bad_records):
                writer.add_texts(texts, *_encode_batch(texts, writer, encoding, encoder))
                on_progress(writer.stats)
            if source.one_document:
                writer.end_document(encoding.end)
            writer.write_index()
        writer.add_checksums()
        stats = dataclasses.replace(writer.stats, skipped=bad_records.skipped, fast=is_fast)
        if is_fast and needs_reference(stem.parent):
            raise WrongIdsError("another worker found wrong ids")
        _publish_shard(temporary_stem, stem, stats)
        return stats
    except BaseException:
        for suffix in (".json", *_SUFFIXES):
            temporary_stem.with_suffix(suffix).unlink(missing_ok=True)
        raise


def _encode_batch(
    texts: list[str], writer: "_ShardWriter", encoding: Encoding, encoder: Encoder
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Encode a batch; the pieces of one document share one begin token and one end token.

    Returns:
        The concatenated ids of all texts [num_tokens], and how many belong to each text
        [len(texts)].
    """
    is_piece = writer.stats.one_document
    ids, counts = encoder.encode(texts, adds_boundaries=not is_piece)
    if is_piece and not writer.stats.texts and ids.size:
        ids = np.concatenate([encoding.begin, ids])
        first_text = np.flatnonzero(counts)[0]
        counts[first_text] += encoding.begin.size
    return ids, counts


def _publish_shard(temporary: Path, stem: Path, stats: ShardStats) -> None:
    """Write the contents of a finished shard, and rename its files; the contents come last."""
    # Not synced, for speed: a restart compares every byte with the checksums.
    record = json.dumps(dataclasses.asdict(stats))
    temporary.with_suffix(".json").write_text(record, encoding="utf-8")
    for suffix in (*_SUFFIXES, ".json"):
        temporary.with_suffix(suffix).replace(stem.with_suffix(suffix))


def needs_reference(folder: Path) -> bool:
    """Return whether the fast encoder gave other ids than the reference in a folder of shards."""
    return (folder / _REFERENCE_MARKER).exists()


def require_reference(folder: Path) -> None:
    """Make the shards of the fast encoder in a folder invalid, for all processes."""
    (folder / _REFERENCE_MARKER).touch()


class _ShardWriter:
    """The three files of a shard, and their contents so far."""

    def __init__(self, source: Source, stem: Path, dtype: np.dtype[Any]) -> None:
        self.stats = ShardStats(one_document=source.one_document)
        self._name = source.name
        self._stem, self._dtype = stem, dtype
        self._files = {suffix: open(stem.with_suffix(suffix), "wb") for suffix in _SUFFIXES}  # noqa: SIM115
        self._hashes = {suffix: ChunkHash() for suffix in (".bin", ".bytes")}
        self._lengths: list[NDArray[np.int32]] = []

    def add_texts(self, texts: list[str], ids: NDArray[Any], counts: NDArray[np.int64]) -> None:
        """Add a batch; texts without ids are dropped and counted."""
        if counts.size and counts.max() > _MAX_TOKENS:
            raise DataError(
                f"{self._name} holds a text of {counts.max():,} tokens, and a token file "
                f"can take {_MAX_TOKENS:,} at most; cut it into several documents."
            )
        has_ids = counts > 0
        utf8_bytes = (len(text) if text.isascii() else len(text.encode()) for text in texts)
        text_bytes = np.fromiter(utf8_bytes, np.uint32, len(texts))[has_ids]
        self._write_array(".bin", ids)
        self._write_array(".bytes", text_bytes.astype("<u4"))
        if text_bytes.size:
            self._lengths.append(counts[has_ids].astype("<i4"))
        self.stats.empty += len(texts) - text_bytes.size
        self.stats.texts += text_bytes.size
        self.stats.text_bytes += int(text_bytes.sum(dtype=np.int64))
        self._count_ids(ids)

    def end_document(self, end_ids: NDArray[Any]) -> None:
        if self.stats.texts:
            self._write_array(".bin", end_ids)
            self._lengths[-1][-1] += end_ids.size
            self._count_ids(end_ids)

    def write_index(self) -> None:
        """Write the index, since all texts have been added."""
        texts, documents = self.stats.texts, self.stats.documents
        document_table = [0, texts] if self.stats.one_document and texts else np.arange(texts + 1)
        write_index(
            self._files[".idx"],
            self._dtype,
            num_sequences=texts,
            num_documents=documents,
            lengths=lambda: iter(self._lengths),
            documents=[np.asarray(document_table)],
        )

    def _count_ids(self, ids: NDArray[Any]) -> None:
        self.stats.tokens += int(ids.size)
        self.stats.largest_token = max(self.stats.largest_token, int(ids.max(initial=0)))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def add_checksums(self) -> None:
        digests = {suffix: chunks.digests() for suffix, chunks in self._hashes.items()}
        paths = {suffix: self._stem.with_suffix(suffix) for suffix in _SUFFIXES}
        self.stats.checksums = {**digests, ".idx": compute_checksums(paths[".idx"])}
        self.stats.sizes = {suffix: path.stat().st_size for suffix, path in paths.items()}

    def _write_array(self, suffix: str, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).view(np.uint8)
        self._files[suffix].write(data.data)
        self._hashes[suffix].update(data.data)


def read_shard(stem: Path, *, verify: bool) -> ShardStats | None:
    """Return the contents of a shard; None if it is unfinished, has changed, or is invalid.

    Args:
        stem: The path of its files without their suffix.
        verify: Compare the checksums, not only the sizes; a crash of the machine may have lost
            writes.
    """
    try:
        stats = ShardStats(**json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")))
        for suffix in _SUFFIXES:
            path = stem.with_suffix(suffix)
            if path.stat().st_size != stats.sizes[suffix]:
                return None
            if verify and compute_checksums(path) != stats.checksums[suffix]:
                return None
    except (OSError, ValueError, TypeError, KeyError, DataError):
        return None
    return None if stats.fast and needs_reference(stem.parent) else stats


def read_array(stem: Path, suffix: str, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """Map a file of a shard into memory."""
    path = stem.with_suffix(suffix)
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def iterate_text_bytes(stems: list[Path], block_size: int) -> Iterator[NDArray[Any]]:
    """Yield the UTF-8 bytes of each text of shards, in blocks of at most `block_size` texts."""
    for stem in stems:
        array = read_array(stem, ".bytes", ROW_BYTES)
        for first in range(0, array.size, block_size):
            yield array[first : first + block_size]
