"""Joins shards to a `.bin`/`.idx` pair, or to nanoGPT's two files, or makes each shard a part."""

import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.megatron import TokenFile, add_suffix, write_index
from llm.data.formats.parts import part_files, part_prefix
from llm.data.formats.sidecar import Sidecar, read_sidecar, write_sidecar
from llm.data.order import permute
from llm.errors import DataError
from llm.prepare.encoder import Encoding
from llm.prepare.shards import ShardStats, iterate_text_bytes, read_array
from llm.prepare.verification import compute_checksums, find_token_file_faults
from llm.runtime.files import sync, sync_folder

_BLOCK_ENTRIES = 1 << 20  # index entries computed at once
_DOCUMENTS_PER_GATHER = 1 << 12  # documents gathered at once
_COPY_BYTES = 1 << 26

logger = logging.getLogger("llm.data")


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output files to make from the shards.

    Attributes:
        prefix: The path of the files without their suffix. nanoGPT's files are in a folder with
            this name.
        nanogpt: Write `train.bin` and `val.bin` instead of a `.bin` with its `.idx`.
        parts: Keep the shards as numbered parts instead of joining them.
        validation_percentage: Documents, from the first one, that go to `val.bin`.
        shuffle_seed: Seed for shuffling the documents; None keeps their order.
        overwrite: Replace existing files.
        row_bytes: Write `PREFIX.bytes` too: UTF-8 bytes of each text, which a run needs to split
            them.
        lock_seconds: Seconds to wait for another program that writes the same output.
        option: The option that chooses the path, for messages.
    """

    prefix: Path
    nanogpt: bool = False
    parts: bool = False
    validation_percentage: float = 0.0
    shuffle_seed: int | None = None
    overwrite: bool = False
    row_bytes: bool = False
    lock_seconds: float = 0.0
    option: str = "--output_prefix"

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return add_suffix(self.prefix, ".parts")

    @property
    def names(self) -> list[Path]:
        """The prefixes of the files that are written."""
        if not self.nanogpt:
            return [self.prefix]
        splits = ["train", "val"] if self.validation_percentage else ["train"]
        return [self.prefix / split for split in splits]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of the files of a prefix, in the order of their renaming."""
        return (".json", ".bin") if self.nanogpt else (".json", ".idx", ".bin")

    def existing(self, prefix: Path) -> list[Path]:
        """Return the files with one of `names` that exist, also as parts."""
        paths = [add_suffix(prefix, suffix) for suffix in self.suffixes]
        parts = [] if self.nanogpt else part_files(prefix)
        # os.path.exists is false, too, for a name that is too long.
        return [*filter(os.path.exists, paths), *parts]

    def num_validation(self, documents: int) -> int:
        """Return how many of the documents go to `val.bin`."""
        return math.ceil(self.validation_percentage / 100 * documents)  # at least 1, as in nanoGPT


def assemble_output(
    stems: list[Path],
    stats: list[ShardStats],
    output: Output,
    *,
    encoding: Encoding,
    sources: list[str],
    digest: str,
) -> None:
    """Write the files to be renamed, `out.*`, with their sidecars, into the folder of the shards.

    Shards that stay parts get a sidecar only.

    Args:
        stems: The paths of the shards without their suffix, in their order.
        stats: Counts of their content.
        output: The files to make.
        encoding: How their texts became ids.
        sources: The names of the inputs.
        digest: Digest of input and options.

    Raises:
        DataError: The sidecar cannot be written.
        OSError: The file system refused a write.
    """
    joined_prefix = output.folder / "out"
    if output.shuffle_seed is not None:
        join_shuffled(stems, joined_prefix, dtype=encoding.dtype, seed=output.shuffle_seed)
    elif not output.parts:
        join_shards(stems, joined_prefix, dtype=encoding.dtype)
    common_entries = _make_common_sidecar_entries(
        stats, encoding=encoding, sources=sources, digest=digest
    )
    if output.nanogpt:
        _write_flat_files(stems, output, common_entries)
        return
    sidecar = Sidecar(
        documents=sum(shard.documents for shard in stats),
        tokens=sum(shard.tokens for shard in stats),
        text_bytes=sum(shard.text_bytes for shard in stats),
        largest_token=max(shard.largest_token for shard in stats),
        checksums={},
        **common_entries,
    )
    if output.parts:
        write_sidecar(joined_prefix, _describe_parts(sidecar, stats))
        return
    write_sidecar(joined_prefix, replace(sidecar, checksums=_pair_checksums(joined_prefix)))
    if output.row_bytes:
        _write_row_bytes(stems, add_suffix(joined_prefix, ".bytes"))


def _describe_parts(sidecar: Sidecar, stats: list[ShardStats]) -> Sidecar:
    """Return a sidecar with the checksums and the tokens of each part; empty shards are none."""
    part_stats = [shard for shard in stats if shard.tokens]
    checksums_by_file = {
        f"{part_index:05d}{suffix}": shard.checksums[suffix]
        for part_index, shard in enumerate(part_stats)
        for suffix in (".bin", ".idx")
    }
    part_tokens = [shard.tokens for shard in part_stats]
    return replace(sidecar, checksums=checksums_by_file, part_tokens=part_tokens)


def _write_row_bytes(stems: list[Path], path: Path) -> None:
    """Write the UTF-8 bytes of each text of all shards to one file, and sync it."""
    with open(path, "wb") as file:
        for block in iterate_text_bytes(stems, _BLOCK_ENTRIES):
            file.write(np.ascontiguousarray(block).data)
        sync(file)


def _make_common_sidecar_entries(
    stats: list[ShardStats], *, encoding: Encoding, sources: list[str], digest: str
) -> dict[str, Any]:
    """Return the entries that the sidecar of every form of output has."""
    return {
        "tokenizer": encoding.tokenizer.name,
        "tokenizer_fingerprint": encoding.tokenizer.fingerprint,
        "vocab_size": encoding.tokenizer.size,
        "eos_token_id": encoding.tokenizer.eos_token_id,
        "append_eos": encoding.end_token is not None,
        "prepend_bos": encoding.begin_token is not None,
        "dtype": encoding.dtype.name,
        "empty_documents": sum(shard.empty for shard in stats if not shard.one_document),
        "skipped_documents": sum(shard.skipped for shard in stats),
        "sources": sources,
        "plan": digest,
    }


def _pair_checksums(prefix: Path) -> dict[str, list[str]]:
    return {kind: compute_checksums(add_suffix(prefix, f".{kind}")) for kind in ("bin", "idx")}


def join_parts(parts: Sequence[Path], output: Output) -> None:
    """Join finished parts as `assemble_output` joins shards.

    Args:
        parts: The paths of the parts without their suffix, in their order.
        output: The joined file to make, which has a sidecar for the parts.

    Raises:
        DataError: The sidecar cannot be written, or a part is damaged.
        OSError: The file system refused a write.
    """
    joined = output.folder / "out"
    sidecar = read_sidecar(output.prefix)
    assert sidecar is not None
    join_shards(parts, joined, dtype=np.dtype(sidecar.dtype))
    write_sidecar(joined, replace(sidecar, checksums=_pair_checksums(joined), part_tokens=[]))


def join_shards(stems: Sequence[Path], prefix: Path, *, dtype: np.dtype[Any]) -> None:
    """Join token files to `PREFIX.bin` and `PREFIX.idx`, synced; memory does not grow with them.

    Args:
        stems: The paths of the shards or parts without their suffix, in their order.
        prefix: The path of both files without their suffix.
        dtype: Dtype of the ids.
    """
    num_sequences = num_documents = 0
    for file in _open_shards(stems):
        num_sequences += file.num_sequences
        num_documents += file.num_documents
    _join_ids(stems, add_suffix(prefix, ".bin"))
    with open(add_suffix(prefix, ".idx"), "wb") as idx_file:
        write_index(
            idx_file,
            dtype,
            num_sequences=num_sequences,
            num_documents=num_documents,
            lengths=lambda: _iterate_lengths(stems),
            documents=_iterate_document_ends(stems),
        )
        sync(idx_file)


def _open_shards(stems: Iterable[Path]) -> Iterator[TokenFile]:
    for stem in stems:
        yield TokenFile(stem, check_tables=False)


def _iterate_lengths(stems: Iterable[Path]) -> Iterator[NDArray[Any]]:
    """Yield the tokens of each text, in blocks."""
    for file in _open_shards(stems):
        for first in range(0, file.num_sequences, _BLOCK_ENTRIES):
            yield file.lengths[first : first + _BLOCK_ENTRIES]


def _iterate_document_ends(stems: Iterable[Path]) -> Iterator[NDArray[Any]]:
    """Yield 0, and the index of the text after each document, in blocks."""
    yield np.zeros(1, "<i8")
    first_sequence = 0
    for file in _open_shards(stems):
        for first_document in range(1, file.num_documents + 1, _BLOCK_ENTRIES):
            end_document = first_document + _BLOCK_ENTRIES
            yield first_sequence + file.documents[first_document:end_document]
        first_sequence += file.num_sequences


def join_shuffled(stems: Sequence[Path], prefix: Path, *, dtype: np.dtype[Any], seed: int) -> None:
    """Join shards of one document per text, as `join_shards` does, in an order keyed by the seed.

    Memory grows by 12 bytes per document, and the disk temporarily holds all ids twice.
    """
    # One file, because there may be more shards than a process can have open files.
    joined_path = add_suffix(prefix, ".joined")
    _join_ids(stems, joined_path)
    ids = read_array(joined_path, ".joined", dtype)
    lengths = np.concatenate(
        [np.empty(0, "<i4"), *(np.array(file.lengths) for file in _open_shards(stems))]
    )
    num_documents = lengths.size
    starts = np.cumsum(lengths, dtype=np.int64) - lengths  # int64: a sum of int32 may overflow

    shuffle = partial(_shuffle_documents, num_documents, seed=seed)
    with open(add_suffix(prefix, ".bin"), "wb") as bin_file:
        for documents in shuffle():
            ends = starts[documents] + lengths[documents]
            texts = [ids[start:end] for start, end in zip(starts[documents], ends, strict=True)]
            bin_file.write(np.concatenate(texts).tobytes())
        sync(bin_file)
    with open(add_suffix(prefix, ".idx"), "wb") as idx_file:
        write_index(
            idx_file,
            dtype,
            num_sequences=num_documents,
            num_documents=num_documents,
            lengths=lambda: (lengths[documents] for documents in shuffle()),
            documents=[np.arange(num_documents + 1)],
        )
        sync(idx_file)
    joined_path.unlink()


def _shuffle_documents(num_documents: int, *, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of all documents in the order that the seed keys, in blocks."""
    for first_position in range(0, num_documents, _DOCUMENTS_PER_GATHER):
        end_position = min(first_position + _DOCUMENTS_PER_GATHER, num_documents)
        positions = np.arange(first_position, end_position)
        yield permute(positions, size=num_documents, key=seed)


def _join_ids(stems: Iterable[Path], path: Path) -> None:
    """Write the ids of all shards to one file, and sync it."""
    with open(path, "wb") as target:
        for stem in stems:
            with open(add_suffix(stem, ".bin"), "rb") as shard:
                _append_file(shard, target)
        sync(target)


def _append_file(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file to the end of another one, inside the kernel if possible."""
    target.flush()  # copy_file_range writes behind the buffer's back
    try:
        while os.copy_file_range(source.fileno(), target.fileno(), _COPY_BYTES):
            pass
    except (OSError, AttributeError):  # this system or this file system does not support it
        pass
    # Copy the rest: some file systems end the copy too early.
    source.seek(os.lseek(source.fileno(), 0, os.SEEK_CUR))
    shutil.copyfileobj(source, target, 1 << 20)


def _write_flat_files(stems: list[Path], output: Output, common_entries: dict[str, Any]) -> None:
    """Split the ids at a document boundary into nanoGPT's `train.bin` and `val.bin`."""
    folder = output.folder
    joined_file = TokenFile(folder / "out")
    num_documents = joined_file.num_documents
    num_validation = output.num_validation(num_documents)
    bytes_by_text = np.concatenate(
        [np.zeros(1, np.int64), *iterate_text_bytes(stems, _BLOCK_ENTRIES)]
    )
    byte_offsets = np.cumsum(bytes_by_text)
    document_ranges = {"val": (0, num_validation), "train": (num_validation, num_documents)}
    for split, (first_document, end_document) in document_ranges.items():
        if first_document == end_document:
            continue
        first_token = joined_file.document_start(first_document)
        end_token = joined_file.document_start(end_document)
        first_text, end_text = joined_file.documents[[first_document, end_document]]
        _write_flat_file(
            folder / f"out.{split}",
            joined_file.tokens[first_token:end_token],
            documents=end_document - first_document,
            text_bytes=int(byte_offsets[end_text] - byte_offsets[first_text]),
            **common_entries,
        )


def _write_flat_file(prefix: Path, tokens: NDArray[Any], **sidecar_entries: Any) -> None:
    """Write ids to `PREFIX.bin`, synced, and a sidecar with these and further entries."""
    path = add_suffix(prefix, ".bin")
    with open(path, "wb") as file:
        tokens.tofile(file)
        sync(file)
    sidecar = Sidecar(
        tokens=int(tokens.size),
        largest_token=int(tokens.max(initial=0)),
        checksums={"bin": compute_checksums(path)},
        **sidecar_entries,
    )
    write_sidecar(prefix, sidecar)


def check_replaceable(output: Output, inputs: Iterable[Path]) -> None:
    """Refuse an output that would replace anything but token files, even with `--overwrite`.

    Args:
        output: The output to check.
        inputs: Every file that is read: texts and tokenizers.

    Raises:
        DataError: The output would replace an input, a folder or another kind of file, or an
            input is in the folder of the shards.
    """
    remedy = f"move it away, or choose another {output.option}."
    if output.nanogpt and output.prefix.exists() and not output.prefix.is_dir():
        raise DataError(f"{output.prefix} is a file, and --format nanogpt needs a folder; {remedy}")
    existing_paths = [path for prefix in output.names for path in output.existing(prefix)]
    for path in existing_paths:
        if path.is_dir():
            raise DataError(f"{path} is a folder, and a file is to be written there; {remedy}")
    _check_inputs_outside(output, existing_paths, inputs)
    for prefix in output.names:
        _check_token_files(prefix, is_nanogpt=output.nanogpt, remedy=remedy)


def _check_token_files(prefix: Path, *, is_nanogpt: bool, remedy: str) -> None:
    """Refuse to replace a JSON file that is no sidecar, or token files of another format."""
    try:
        read_sidecar(prefix)
    except DataError as error:
        raise DataError(
            f"{prefix}.json would be replaced, and it describes no token file; {remedy}"
        ) from error
    index = add_suffix(prefix, ".idx")
    if is_nanogpt and index.exists():
        raise DataError(
            f"{index} belongs to token files of another format, which {prefix}.bin would "
            f"break; {remedy}"
        )


def _check_inputs_outside(
    output: Output, existing_paths: Iterable[Path], inputs: Iterable[Path]
) -> None:
    """Refuse inputs among the files that an output replaces, or in the folder of its shards."""
    path_by_inode = {(path.stat().st_dev, path.stat().st_ino): path for path in existing_paths}
    folder = output.folder.resolve()
    for path in inputs:
        replaced_path = path_by_inode.get((path.stat().st_dev, path.stat().st_ino))
        if replaced_path is not None or path.resolve().is_relative_to(folder):
            raise DataError(
                f"{replaced_path or output.folder} would be replaced, and the input {path} with "
                f"it; choose another {output.option}."
            )


def find_stale_validation_files(output: Output) -> list[Path]:
    """Return the files of an earlier `val.bin`; an output without validation text removes them.

    Its documents are now in `train.bin`, so a run on both would evaluate on its training text.

    Raises:
        DataError: `--overwrite` is not given, or no sidecar shows that this program wrote the
            files.
    """
    if not output.nanogpt or output.validation_percentage:
        return []
    prefix = output.prefix / "val"
    paths = [add_suffix(prefix, suffix) for suffix in output.suffixes]
    stale_files = [path for path in paths if path.exists()]
    if not stale_files:
        return []
    conflict = (
        f"{stale_files[-1]} exists, and --validation_split_percentage 0 writes no validation text"
    )
    if len(stale_files) < 2 or find_token_file_faults(add_suffix(prefix, ".bin")):
        raise DataError(
            f"{conflict}. The file is not removed, since no val.json shows that this program wrote "
            f"it; move it away, or choose another {output.option}."
        )
    if not output.overwrite:
        raise DataError(
            f"{conflict}; choose another {output.option}, or pass --overwrite to remove the file."
        )
    return stale_files


def publish_output(output: Output) -> None:
    """Rename the files to their final names, the `.bin` last: it marks a complete prefix."""
    if output.nanogpt:
        output.prefix.mkdir(exist_ok=True)
    for path in find_stale_validation_files(output):
        logger.info(f"removing {path}: its documents are in train.bin now")
        path.unlink()
    obsolete_parts = [] if output.nanogpt else part_files(output.prefix)
    for prefix in output.names:
        temporary_prefix = output.folder / (f"out.{prefix.name}" if output.nanogpt else "out")
        # Remove the old .bin first, so that a mixture of old and new files never looks complete.
        for suffix in reversed(output.suffixes):
            add_suffix(prefix, suffix).unlink(missing_ok=True)
        if output.row_bytes:
            add_suffix(temporary_prefix, ".bytes").replace(add_suffix(prefix, ".bytes"))
        for suffix in output.suffixes:
            add_suffix(temporary_prefix, suffix).replace(add_suffix(prefix, suffix))
        sync_folder(prefix.parent)  # the renames survive a power cut
    for path in obsolete_parts:  # which are joined now, or belong to another text
        path.unlink()


def publish_parts(stems: Sequence[Path], stats: Sequence[ShardStats], output: Output) -> None:
    """Give shards their final names, as parts; they are complete when the last part is there.

    The shards keep their own names, too, so that a kill loses nothing. The sidecar comes first: it
    tells the next start who has begun this.

    Args:
        stems: The paths of the shards without their suffix, in their order; synced.
        stats: Counts of their content; empty shards are left out.
        output: The output, with its sidecar in the folder of the shards.

    Raises:
        OSError: The file system refused a write.
    """
    for path in output.existing(output.prefix):
        path.unlink()
    add_suffix(output.folder / "out", ".json").replace(add_suffix(output.prefix, ".json"))
    part_stems = [stem for stem, shard in zip(stems, stats, strict=True) if shard.tokens]
    for part_index, stem in enumerate(part_stems):
        prefix = part_prefix(output.prefix, part_index, len(part_stems))
        for suffix in (".bin", ".idx"):
            shard_path, part_path = stem.with_suffix(suffix), add_suffix(prefix, suffix)
            try:
                os.link(shard_path, part_path)
            except OSError:  # a file system without links
                shard_path.replace(part_path)
    sync_folder(output.prefix.parent)
