"""Token files: the memory-mapped `.bin`/`.idx` pair of Megatron-LM, NeMo and GPT-NeoX.

`PREFIX.bin` holds the token ids of all sequences one after the other, with nothing between them.
`PREFIX.idx` says where each sequence and each document starts. All numbers are little-endian:

    9 bytes   magic, MMIDIDX and two zero bytes
    u64       version, 1
    u8        dtype code of the tokens: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    u64       S, the number of sequences
    u64       D, the number of documents + 1
    i32[S]    tokens in each sequence
    i64[S]    byte offset of each sequence in the .bin
    i64[D]    the sequence at which each document starts; the first is 0, the last is S
    i8[S]     optional: a mode for each sequence (multimodal sets); not read here
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.index_check import index_faults
from llm.data.formats.paths import beside, locate, map_file
from llm.errors import DataError
from llm.runtime.files import sync

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_CHUNK = 1 << 20  # sequences whose offsets are computed at once
_LONGEST = 2**31 - 1  # tokens of a sequence that the index can express


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which Megatron-LM stores ids of a vocabulary of this size."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class TokenFileWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`, byte for byte as Megatron-LM does.

    The `.idx` is written by `close`, so a writer that was interrupted leaves no readable pair.
    Memory grows by 4 bytes a sequence and 8 a document.

    Args:
        prefix: The path of both files without their suffix.
        dtype: Of the token ids on disk; see `token_dtype`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = Path(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._bin: BinaryIO = open(beside(self._prefix, ".bin"), "wb", buffering=1 << 20)  # noqa: SIM115

    def __enter__(self) -> "TokenFileWriter":
        """The writer itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes the index, unless the block was left by an error."""
        if kind is None:
            self.close()
        else:
            self._bin.close()

    @property
    def in_document(self) -> bool:
        """Whether sequences were added since the last document ended."""
        return len(self._lengths) > self._documents[-1]

    def add(self, tokens: NDArray[Any], *, ends_document: bool) -> None:
        """Appends one sequence.

        Args:
            tokens: Token ids [num_tokens], of any integer dtype.
            ends_document: Whether this is the last sequence of its document.

        Raises:
            DataError: An id does not fit the file's dtype, or there are too many for one sequence.
            OSError: The file system refused the write.
        """
        if tokens.size > _LONGEST:
            raise DataError(
                f"A sequence of {tokens.size:,} tokens is too long for {self._prefix}.idx, which "
                f"holds at most {_LONGEST:,}; cut the text into several documents."
            )
        if tokens.dtype != self._dtype:
            bounds = np.iinfo(self._dtype)
            if tokens.size and (tokens.min() < bounds.min or tokens.max() > bounds.max):
                raise DataError(
                    f"The token ids {tokens.min()} to {tokens.max()} do not fit the dtype "
                    f"{self._dtype.name} of {self._prefix}.bin; write it for a larger vocabulary."
                )
            tokens = tokens.astype(self._dtype)
        self._bin.write(tokens.tobytes())
        self._lengths.append(tokens.size)
        if ends_document:
            self.end_document()

    def end_document(self) -> None:
        """Closes the document that the sequences added so far belong to."""
        self._documents.append(len(self._lengths))

    def close(self) -> None:
        """Writes the index and returns when both files are on the disk.

        Sequences after the last document end are closed as a document of their own, so that
        every sequence belongs to one.
        """
        if self._bin.closed:
            return
        if self.in_document:
            self.end_document()
        with self._bin:
            sync(self._bin)
        lengths = np.asarray(self._lengths, dtype="<i4")
        documents = np.asarray(self._documents, dtype="<i8")
        write_index(
            beside(self._prefix, ".idx"),
            self._dtype,
            num_sequences=lengths.size,
            num_documents=documents.size - 1,
            lengths=lambda: iter(np.array_split(lengths, lengths.size // _CHUNK + 1)),
            documents=[documents],
        )


def write_index(
    path: Path,
    dtype: np.dtype[Any],
    *,
    num_sequences: int,
    num_documents: int,
    lengths: Callable[[], Iterator[NDArray[Any]]],
    documents: Iterable[NDArray[Any]],
) -> None:
    """Writes an `.idx` from blocks, so that memory does not grow with it, and syncs it.

    Args:
        path: The file.
        dtype: Of the tokens.
        num_sequences: S.
        num_documents: Documents, one less than the entries of their table.
        lengths: Gives the tokens of each sequence in blocks; called twice.
        documents: The document table in blocks, D entries in all.
    """
    with open(path, "wb") as idx:
        code = _CODES[np.dtype(dtype).newbyteorder("<")]
        idx.write(_HEADER.pack(_MAGIC, _VERSION, code, num_sequences, num_documents + 1))
        for block in lengths():
            idx.write(block.astype("<i4").tobytes())
        offset = 0
        for block in lengths():
            ends = offset + np.cumsum(block.astype("<i8") * np.dtype(dtype).itemsize)
            starts = np.concatenate([[offset], ends[:-1]]) if block.size else ends
            idx.write(starts.astype("<i8").tobytes())
            offset = int(ends[-1]) if block.size else offset
        for block in documents:
            idx.write(block.astype("<i8").tobytes())
        sync(idx)


class TokenFile:
    """A `.bin`/`.idx` pair, memory-mapped; opening takes a fraction of a second for any size.

    Opening checks the header, that each file is exactly as long as the header and the last pointer
    say, and the tables: all of them up to 2^24 sequences, beyond that a sample, so that pointers
    are checked again when they are followed. `token_check.check` goes through all of them.

    Attributes:
        prefix: The path of both files without their suffix.
        tokens: All token ids [num_tokens], in the dtype of the file.
        lengths: Tokens in each sequence, int32 [num_sequences].
        offsets: Byte offset of each sequence in the `.bin`, int64 [num_sequences].
        documents: First sequence of each document and, last, S; int64 [num_documents + 1].

    Args:
        prefix: The path of both files without their suffix.

    Raises:
        DataError: A file is missing, truncated or inconsistent; the message names it and says how.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)
        self._idx_path = beside(self.prefix, ".idx")
        self._bin_path = beside(self.prefix, ".bin")
        dtype = self._map_index(map_file(self._idx_path))
        data = map_file(self._bin_path)
        if data.size % dtype.itemsize:
            raise self._broken(
                self._bin_path, f"is {data.size} bytes long, which cuts a {dtype.name} in two"
            )
        self.tokens: NDArray[Any] = data.view(dtype)
        self._check_ends(data.size)
        faults = index_faults(self.lengths, self.offsets, self.documents, self.tokens, sample=True)
        if faults:
            raise self._broken(self._idx_path, ", and ".join(faults))

    def _map_index(self, data: NDArray[np.uint8]) -> np.dtype[Any]:
        """Finds the tables in the bytes of the `.idx`; returns the dtype of the tokens."""
        head = data[: _HEADER.size].tobytes()
        if len(head) < _HEADER.size or head[:9] != _MAGIC:
            raise self._broken(self._idx_path, "does not start with a token file's header")
        _, version, code, num_sequences, num_starts = _HEADER.unpack(head)
        if version != _VERSION:
            raise self._broken(self._idx_path, f"has version {version}, not {_VERSION}")
        if code not in _DTYPES:
            raise self._broken(self._idx_path, f"has the dtype code {code}, not that of integers")
        if num_starts < 1:
            raise self._broken(self._idx_path, "has no document table")
        # The numbers are Python's, which do not overflow whatever the header says.
        offsets = _HEADER.size + num_sequences * 4
        documents = offsets + num_sequences * 8
        end = documents + num_starts * 8
        if data.size not in (end, end + num_sequences):
            raise self._broken(
                self._idx_path, f"is {data.size} bytes long, not {end} as its header says"
            )
        self.lengths: NDArray[np.int32] = data[_HEADER.size : offsets].view("<i4")
        self.offsets: NDArray[np.int64] = data[offsets:documents].view("<i8")
        self.documents: NDArray[np.int64] = data[documents:end].view("<i8")
        return _DTYPES[code]

    def _check_ends(self, bin_size: int) -> None:
        end = 0
        if self.num_sequences:
            if self.offsets[0] != 0:
                raise self._broken(self._idx_path, f"starts its sequences at {self.offsets[0]}")
            if self.lengths[-1] < 0:
                raise self._broken(self._idx_path, f"ends with the length {self.lengths[-1]}")
            end = int(self.offsets[-1]) + int(self.lengths[-1]) * self.tokens.itemsize
        if end != bin_size:
            raise self._broken(
                self._bin_path, f"is {bin_size} bytes long, not {end} as {self._idx_path} says"
            )
        if self.documents[0] != 0 or self.documents[-1] != self.num_sequences:
            raise self._broken(
                self._idx_path,
                f"has documents from sequence {self.documents[0]} to {self.documents[-1]}, "
                f"not from 0 to {self.num_sequences}",
            )

    def _broken(self, path: Path, fault: str) -> DataError:
        return DataError(f"The token file {path} {fault}; it is damaged or of another kind.")

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return int(self.tokens.size)

    @property
    def num_sequences(self) -> int:
        """Sequences: lines of a text file, records of other sources."""
        return int(self.lengths.size)

    @property
    def num_documents(self) -> int:
        """Documents, each of one or more sequences."""
        return int(self.documents.size) - 1

    def sequence_end(self, num_sequences: int) -> int:
        """The position in `tokens` after the first `num_sequences` sequences.

        Raises:
            DataError: The pointer lies outside the `.bin`.
        """
        if num_sequences >= self.num_sequences:
            return self.num_tokens
        position, rest = divmod(int(self.offsets[num_sequences]), self.tokens.itemsize)
        if rest or not 0 <= position <= self.num_tokens:
            raise self._broken(self._idx_path, f"has a wrong pointer at sequence {num_sequences}")
        return position

    def document_start(self, number: int) -> int:
        """The position in `tokens` at which a document begins.

        Args:
            number: 0 to num_documents; the last one gives the end of all tokens.

        Raises:
            DataError: The pointer lies outside the files.
            IndexError: There is no such document.
        """
        if not 0 <= number <= self.num_documents:
            raise IndexError(f"{self.prefix} has no document {number} of {self.num_documents}.")
        return int(self.document_starts(number, number + 1)[0])

    def document_starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """The positions in `tokens` at which the documents first to stop - 1 begin.

        Returns:
            Positions [stop - first]; the last one may be that of num_documents, the end.

        Raises:
            DataError: A pointer lies outside the files.
        """
        sequences = self.documents[first:stop]
        sequence_inside = (sequences >= 0) & (sequences <= self.num_sequences)
        if not sequence_inside.all():
            number = first + int(sequence_inside.argmin())
            raise self._broken(self._idx_path, f"has a wrong pointer at document {number}")
        starts = np.full(sequences.size, self.tokens.nbytes, np.int64)
        begun = sequences < self.num_sequences
        starts[begun] = self.offsets[sequences[begun]]
        positions, rest = np.divmod(starts, self.tokens.itemsize)
        position_inside = (rest == 0) & (positions >= 0) & (positions <= self.num_tokens)
        if not position_inside.all():
            sequence = int(sequences[position_inside.argmin()])
            raise self._broken(self._idx_path, f"has a wrong pointer at sequence {sequence}")
        return positions


def open_token_file(path: Path) -> TokenFile | FlatTokenFile:
    """Opens token files of either kind; see `token_paths.locate` for how they may be named.

    Raises:
        DataError: There is none, or it is truncated or inconsistent.
    """
    prefix, is_flat = locate(path)
    return FlatTokenFile(beside(prefix, ".bin")) if is_flat else TokenFile(prefix)
