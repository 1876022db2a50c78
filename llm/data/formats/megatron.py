"""Token files: the memory-mapped `.bin`/`.idx` pair of Megatron-LM, NeMo and GPT-NeoX.

`PREFIX.bin` holds the token ids of all sequences, with nothing between them. `PREFIX.idx` says
where each sequence and each document starts, in the layout of Megatron-LM's `IndexedDataset`
(`megatron/core/datasets/indexed_dataset.py`). All numbers are little-endian:

    9 bytes   magic, MMIDIDX and two zero bytes
    u64       version, 1
    u8        dtype code of the tokens: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    u64       S, the number of sequences
    u64       D, the number of documents + 1
    i32[S]    tokens in each sequence
    i64[S]    byte offset of each sequence in the .bin
    i64[D]    the first sequence of each document; the first is 0, the last is S
    i8[S]     optional: a mode for each sequence (multimodal data sets); not read here
"""

import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from llm.errors import DataError

ROW_BYTES = "<u4"
"""Dtype of `PREFIX.bytes`: UTF-8 bytes of each text, needed to split them."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # "<": no padding between the fields
# The integer types among Megatron's codes.
_DTYPE_BY_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CODE_BY_DTYPE = {dtype: code for code, dtype in _DTYPE_BY_CODE.items()}
_BLOCK_ENTRIES = 1 << 16  # entries of a table that are checked at once
_MAX_FULLY_CHECKED_ENTRIES = 1 << 24
"""Entries of the largest table that opening checks completely, in some tenths of a second."""
_NUM_SAMPLED_BLOCKS = 64  # blocks that opening checks of a larger table


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron-LM's dtype for ids of a vocabulary of this size."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def add_suffix(prefix: Path, suffix: str) -> Path:
    """Return the path PREFIX + suffix."""
    # Path.with_suffix would cut ".2" off "text-v1.2".
    return Path(f"{prefix}{suffix}")


def read_row_bytes(prefix: Path) -> NDArray[np.uint32]:
    """Map the UTF-8 bytes of each text [num_sequences] of token files in the cache of a run."""
    return np.memmap(add_suffix(prefix, ".bytes"), ROW_BYTES, mode="r")


def map_file(path: Path) -> NDArray[np.uint8]:
    """Map a whole file into memory, read-only.

    Returns:
        Its bytes [size].

    Raises:
        DataError: The file is missing, unreadable, or not a regular file.
    """
    try:
        status = os.stat(path)
        # Opening a pipe blocks until another process writes to it.
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"The token file {path} cannot be read: it is not a regular file.")
        if status.st_size == 0:  # cannot be mapped
            return np.empty(0, np.uint8)
        # A plain array: every slice of an np.memmap costs a call into Python.
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name, or just emptied
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"The token file {path} cannot be read: {reason}.") from error


def mapping_of(mapped: NDArray[Any]) -> mmap.mmap | None:
    """Return the memory map of an array that `map_file` returned; None for an empty file."""
    base: Any = mapped
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def set_read_ahead(mapped_array: NDArray[Any], *, on: bool) -> None:
    """Turn read-ahead on, or keep the system from reading megabytes around each access.

    Args:
        mapped_array: An array that `map_file` returned.
        on: Whether the system reads ahead; its default is yes.
    """
    mapping = mapping_of(mapped_array)
    if mapping is not None and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_NORMAL if on else mmap.MADV_RANDOM)


def write_index(
    idx: IO[bytes],
    dtype: np.dtype[Any],
    *,
    num_sequences: int,
    num_documents: int,
    lengths: Callable[[], Iterator[NDArray[Any]]],
    documents: Iterable[NDArray[Any]],
) -> None:
    """Write an `.idx`, byte for byte as Megatron-LM does.

    The tables are passed in blocks, so memory does not grow with their size.

    Args:
        idx: The file, open for writing.
        dtype: Dtype of the tokens.
        num_sequences: Number of sequences, S.
        num_documents: Number of documents, D - 1.
        lengths: Returns the tokens of each sequence in blocks; called twice.
        documents: The document table in blocks, D entries in all.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    header = (_MAGIC, _VERSION, _CODE_BY_DTYPE[dtype], num_sequences, num_documents + 1)
    idx.write(_HEADER.pack(*header))
    for block in lengths():
        idx.write(block.astype("<i4").tobytes())
    offset = 0
    for block in lengths():
        end_offsets = offset + np.cumsum(block.astype("<i8") * dtype.itemsize)
        idx.write(np.append(offset, end_offsets)[:-1].astype("<i8").tobytes())
        offset = int(end_offsets[-1]) if end_offsets.size else offset
    for block in documents:
        idx.write(block.astype("<i8").tobytes())


class TokenFile:
    """A `.bin`/`.idx` pair, memory-mapped; opening takes a fraction of a second for any size.

    Opening checks the header and the tables, and compares each file's length with the header and
    the last pointer. Tables of more than 2^24 entries are sampled, so pointers are checked again
    when they are followed. `verification.find_token_file_faults` checks everything.

    Attributes:
        prefix: The path of both files without their suffix.
        tokens: All token ids [num_tokens], in the dtype of the file.
        lengths: Tokens in each sequence, int32 [num_sequences].
        offsets: Byte offset of each sequence in the `.bin`, int64 [num_sequences].
        documents: First sequence of each document and, last, S; int64 [num_documents + 1].
        num_tokens: Tokens in all sequences.
        num_sequences: Sequences: lines of a text file, records of other sources.
        num_documents: Documents, each of any number of sequences.

    Args:
        prefix: The path of both files without their suffix.
        check_tables: Whether to check more of the tables than their ends.

    Raises:
        DataError: A file is missing, truncated or inconsistent; the message names file and fault.
    """

    def __init__(self, prefix: Path, *, check_tables: bool = True) -> None:
        self.prefix = Path(prefix)
        dtype = self._map_index(map_file(add_suffix(self.prefix, ".idx")))
        data = map_file(add_suffix(self.prefix, ".bin"))
        if data.size % dtype.itemsize:
            raise self._damage_error(
                f"is {data.size} bytes long, which cuts a {dtype.name} in two", suffix=".bin"
            )
        self.tokens: NDArray[Any] = data.view(dtype)
        self.num_tokens = int(self.tokens.size)
        self._check_table_ends(data.size)
        if check_tables and (faults := self.find_index_faults(sample=True)):
            raise self._damage_error(", and ".join(faults))

    def _map_index(self, data: NDArray[np.uint8]) -> np.dtype[Any]:
        """Locate the tables in the bytes of the `.idx`; return the dtype of the tokens."""
        header = data[: _HEADER.size].tobytes()
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise self._damage_error("does not start with a token file's header")
        _, version, dtype_code, num_sequences, num_document_entries = _HEADER.unpack(header)
        if version != _VERSION:
            raise self._damage_error(f"has version {version}, not {_VERSION}")
        if dtype_code not in _DTYPE_BY_CODE:
            raise self._damage_error(
                f"has the dtype code {dtype_code}, which is not an integer type"
            )
        if num_document_entries < 1:
            raise self._damage_error("has no document table")
        # Python's integers do not overflow; in 64 bits, a damaged header could wrap to the right
        # size.
        offsets_start = _HEADER.size + num_sequences * 4
        documents_start = offsets_start + num_sequences * 8
        documents_end = documents_start + num_document_entries * 8
        modes_end = documents_end + num_sequences
        if data.size not in (documents_end, modes_end):
            raise self._damage_error(
                f"is {data.size} bytes long, not {documents_end} as its header says"
            )
        self.lengths: NDArray[np.int32] = data[_HEADER.size : offsets_start].view("<i4")
        self.offsets: NDArray[np.int64] = data[offsets_start:documents_start].view("<i8")
        self.documents: NDArray[np.int64] = data[documents_start:documents_end].view("<i8")
        self.num_sequences: int = num_sequences
        self.num_documents: int = num_document_entries - 1
        return _DTYPE_BY_CODE[dtype_code]

    def _check_table_ends(self, bin_size: int) -> None:
        """Check the first and last entry of each table."""
        expected_bin_size = 0
        if self.num_sequences:
            if self.offsets[0] != 0:
                raise self._damage_error(f"starts its sequences at {self.offsets[0]}")
            if self.lengths[-1] < 0:
                raise self._damage_error(f"ends with the length {self.lengths[-1]}")
            expected_bin_size = int(self.offsets[-1]) + int(self.lengths[-1]) * self.tokens.itemsize
        if expected_bin_size != bin_size:
            raise self._damage_error(
                f"is {bin_size} bytes long, not {expected_bin_size} as {self.prefix}.idx says",
                suffix=".bin",
            )
        if self.documents[0] != 0 or self.documents[-1] != self.num_sequences:
            raise self._damage_error(
                f"has documents from sequence {self.documents[0]} to {self.documents[-1]}, "
                f"not from 0 to {self.num_sequences}",
            )

    def find_index_faults(self, *, sample: bool) -> list[str]:
        """Find inconsistent entries of the tables, block by block.

        Args:
            sample: Whether to check only 64 blocks of 2^16 entries, at equal distances, of a table
                of more than 2^24 entries, so that the time does not grow with the size.

        Returns:
            The end of a sentence for each kind of fault, to be put after the index's name.
        """
        table_checks = (
            (self._flag_negative_lengths, self.num_sequences, "sequences of negative length"),
            (
                self._flag_wrong_ends,
                self.num_sequences,
                "sequences that do not end where the next one starts",
            ),
            (
                self._flag_negative_sizes,
                self.num_documents,
                "documents that end before they start",
            ),
        )
        faults = []
        for flag_faults, num_entries, fault_noun in table_checks:
            num_faults, first_fault = _count_faults(flag_faults, num_entries, sample=sample)
            if num_faults:
                faults.append(
                    f"has {num_faults:,} {fault_noun}; the first one is number {first_fault:,}"
                )
        return faults

    def _flag_negative_lengths(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Flag the sequences of a range that have a negative length, [stop - start]."""
        return self.lengths[start:stop] < 0

    def _flag_wrong_ends(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Flag the sequences of a range that do not end where the next one starts, [stop - start].

        The first offset is 0: if no sequence is flagged, all offsets are right.
        """
        next_offset = self.tokens.nbytes if stop == self.num_sequences else self.offsets[stop]
        expected_sizes = self.lengths[start:stop].astype(np.int64) * self.tokens.itemsize
        is_wrong: NDArray[np.bool_] = (
            np.diff(self.offsets[start:stop], append=next_offset) != expected_sizes
        )
        return is_wrong

    def _flag_negative_sizes(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Flag the documents of a range that end before they start, [stop - start]."""
        return self.documents[start + 1 : stop + 1] < self.documents[start:stop]

    def _damage_error(self, fault: str, *, suffix: str = ".idx") -> DataError:
        return DataError(
            f"The token file {self.prefix}{suffix} {fault}; it is damaged or of another kind."
        )

    def sequence_end(self, num_sequences: int) -> int:
        """Return the position in `tokens` after the first `num_sequences` sequences.

        Raises:
            DataError: The pointer lies outside the `.bin`.
        """
        return int(
            self._find_sequence_starts(np.array([min(num_sequences, self.num_sequences)]))[0]
        )

    def document_start(self, document: int) -> int:
        """Return the position in `tokens` where a document begins.

        Args:
            document: 0 to num_documents; the last one gives the end of all tokens.

        Raises:
            DataError: The pointer lies outside the files.
            IndexError: The document does not exist.
        """
        if not 0 <= document <= self.num_documents:
            raise IndexError(f"{self.prefix} has no document {document} of {self.num_documents}.")
        return int(self.find_document_starts(document, document + 1)[0])

    def find_document_starts(self, first_document: int, end_document: int) -> NDArray[np.int64]:
        """Return the positions in `tokens` where consecutive documents begin.

        Args:
            first_document: The first document, counted from 0.
            end_document: The document after the last one; num_documents + 1 includes the end of
                all tokens.

        Returns:
            int64 positions [end_document - first_document].

        Raises:
            DataError: A pointer lies outside the files.
        """
        first_sequences = self.documents[first_document:end_document]
        is_valid = (first_sequences >= 0) & (first_sequences <= self.num_sequences)
        if not is_valid.all():
            document = first_document + int(is_valid.argmin())
            raise self._damage_error(f"has a wrong pointer at document {document}")
        return self._find_sequence_starts(first_sequences)

    def _find_sequence_starts(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in `tokens` where sequences begin; `num_sequences` gives the end."""
        byte_offsets = np.full(sequences.size, self.tokens.nbytes, np.int64)
        has_offset = sequences < self.num_sequences
        byte_offsets[has_offset] = self.offsets[sequences[has_offset]]
        positions, remainders = np.divmod(byte_offsets, self.tokens.itemsize)
        is_valid = (remainders == 0) & (positions >= 0) & (positions <= self.num_tokens)
        if not is_valid.all():
            sequence = int(sequences[is_valid.argmin()])
            raise self._damage_error(f"has a wrong pointer at sequence {sequence}")
        return positions


def _count_faults(
    flag_faults: Callable[[int, int], NDArray[np.bool_]], num_entries: int, *, sample: bool
) -> tuple[int, int]:
    """Return the number of faulty entries of a table, and the first of them (-1 without any).

    Args:
        flag_faults: Returns a flag for each entry of a range, [stop - start].
        num_entries: Entries of the table.
        sample: Whether to check only some blocks of a large table.
    """
    block_starts: Iterable[int] = range(0, num_entries, _BLOCK_ENTRIES)
    if sample and num_entries > _MAX_FULLY_CHECKED_ENTRIES:
        block_starts = [
            (num_entries - _BLOCK_ENTRIES) * block_index // (_NUM_SAMPLED_BLOCKS - 1)
            for block_index in range(_NUM_SAMPLED_BLOCKS)
        ]
    num_faults, first_fault = 0, -1
    for start in block_starts:
        is_faulty = flag_faults(start, min(start + _BLOCK_ENTRIES, num_entries))
        fault_positions = np.flatnonzero(is_faulty)
        if fault_positions.size and not num_faults:
            first_fault = start + int(fault_positions[0])
        num_faults += fault_positions.size
    return num_faults, first_fault
