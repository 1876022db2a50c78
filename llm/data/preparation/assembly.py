"""From shards to one token file, in their order or with the documents shuffled."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.megatron import write_index
from llm.data.preparation.shards import ShardStats, each_row, read_array
from llm.data.sampler import permute
from llm.runtime.files import sync

_BLOCK = 1 << 20  # numbers of an index that are computed at once
_SHUFFLED_DOCUMENTS = 1 << 12  # documents that are gathered at once
_COPY = 1 << 26


def assemble(
    stems: list[Path], stats: list[ShardStats], prefix: Path, *, dtype: np.dtype[Any]
) -> None:
    """Join shards to `PREFIX.bin` and `PREFIX.idx`, synced; memory does not grow with them.

    Args:
        stems: The paths of the shards without their suffix, in their order.
        stats: What they hold.
        prefix: The path of both files without their suffix.
        dtype: Of the ids.
    """
    _join(stems, Path(f"{prefix}.bin"))

    def document_table() -> Iterator[NDArray[Any]]:
        yield np.zeros(1, "<i8")
        sequences = 0
        for shard in stats:
            stop = sequences + shard.texts
            if shard.one_document:
                yield np.arange(stop, stop + shard.documents, dtype="<i8")
            else:
                for first in range(sequences, stop, _BLOCK):
                    yield np.arange(first, min(first + _BLOCK, stop), dtype="<i8") + 1
            sequences = stop

    write_index(
        Path(f"{prefix}.idx"),
        dtype,
        num_sequences=sum(shard.texts for shard in stats),
        num_documents=sum(shard.documents for shard in stats),
        lengths=lambda: each_row(stems, ".rows", "<i4", _BLOCK),
        documents=document_table(),
    )


def _join(stems: list[Path], path: Path) -> None:
    """Write the ids of all shards to one file, and sync it."""
    with open(path, "wb") as target:
        for stem in stems:
            with open(stem.with_suffix(".ids"), "rb") as shard:
                _append(shard, target)
        sync(target)


def _append(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file to the end of another one, inside the kernel where it can."""
    target.flush()
    try:
        while os.copy_file_range(source.fileno(), target.fileno(), _COPY):
            pass
    except (OSError, AttributeError):  # not on this system, or not on this file system
        pass
    # Whatever is left; some file systems end the copy too early.
    source.seek(os.lseek(source.fileno(), 0, os.SEEK_CUR))
    while chunk := source.read(1 << 20):
        target.write(chunk)


def assemble_shuffled(
    stems: list[Path], stats: list[ShardStats], prefix: Path, *, dtype: np.dtype[Any], seed: int
) -> None:
    """Join shards whose texts are documents, in an order keyed by the seed.

    Memory grows by 12 bytes a document; on the disk, all ids are there once more for a while.

    Args:
        stems: As for `assemble`.
        stats: As for `assemble`.
        prefix: As for `assemble`.
        dtype: Of the ids.
        seed: Of the order; the same documents and seed give the same order.
    """
    # One file, since there may be more shards than files that a process can have open.
    joined = Path(f"{prefix}.joined")
    _join(stems, joined)
    ids = read_array(joined, ".joined", dtype)
    count = sum(shard.texts for shard in stats)
    lengths = np.empty(count, "<i4")
    filled = 0
    for block in each_row(stems, ".rows", "<i4", _BLOCK):
        lengths[filled : filled + block.size] = block
        filled += block.size
    starts = np.cumsum(lengths, dtype=np.int64) - lengths

    def order() -> Iterator[NDArray[np.int64]]:
        for first in range(0, count, _SHUFFLED_DOCUMENTS):
            index = np.arange(first, min(first + _SHUFFLED_DOCUMENTS, count))
            yield permute(index, size=count, key=seed)

    with open(f"{prefix}.bin", "wb") as target:
        for documents in order():
            ends = starts[documents] + lengths[documents]
            pieces = [ids[i:j] for i, j in zip(starts[documents], ends, strict=True)]
            target.write(np.concatenate(pieces).tobytes())
        sync(target)
    write_index(
        Path(f"{prefix}.idx"),
        dtype,
        num_sequences=count,
        num_documents=count,
        lengths=lambda: (lengths[documents] for documents in order()),
        documents=[np.arange(count + 1)],
    )
    joined.unlink()
