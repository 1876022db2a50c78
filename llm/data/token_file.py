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

import os
import struct
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llm.errors import DataError

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
        self._bin: BinaryIO = open(_with_suffix(self._prefix, ".bin"), "wb", buffering=1 << 20)  # noqa: SIM115

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
            DataError: An id does not fit the file's dtype.
            OSError: The file system refused the write.
        """
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
            _sync(self._bin)
        lengths = np.asarray(self._lengths, dtype="<i4")
        documents = np.asarray(self._documents, dtype="<i8")
        with open(_with_suffix(self._prefix, ".idx"), "wb") as idx:
            code = _CODES[self._dtype]
            idx.write(_HEADER.pack(_MAGIC, _VERSION, code, lengths.size, documents.size))
            idx.write(lengths.tobytes())
            offset = 0
            for first in range(0, lengths.size, _CHUNK):
                sizes = lengths[first : first + _CHUNK].astype("<i8") * self._dtype.itemsize
                ends = offset + np.cumsum(sizes)
                idx.write((ends - sizes).astype("<i8").tobytes())
                offset = int(ends[-1])
            idx.write(documents.tobytes())
            _sync(idx)


class TokenFile:
    """A `.bin`/`.idx` pair, memory-mapped; opening takes the same time for any size.

    What opening checks: magic, version, dtype, that each file is exactly as long as the header
    and the last pointer say, and that sequences start at 0 and documents end at S.

    Attributes:
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
        self._idx_path = _with_suffix(self.prefix, ".idx")
        self._bin_path = _with_suffix(self.prefix, ".bin")
        try:
            idx_size = self._idx_path.stat().st_size
            bin_size = self._bin_path.stat().st_size
            self._map(idx_size, bin_size)
        except OSError as error:
            raise DataError(f"The token file {self.prefix} cannot be read: {error}.") from error

    def _map(self, idx_size: int, bin_size: int) -> None:
        with open(self._idx_path, "rb") as idx:
            head = idx.read(_HEADER.size)
        if len(head) < _HEADER.size or head[:9] != _MAGIC:
            raise self._broken(self._idx_path, "does not start with a token file's header")
        _, version, code, num_sequences, num_documents = _HEADER.unpack(head)
        if version != _VERSION:
            raise self._broken(self._idx_path, f"has version {version}, not {_VERSION}")
        if code not in _DTYPES:
            raise self._broken(self._idx_path, f"has the dtype code {code}, not that of integers")
        if num_documents < 1:
            raise self._broken(self._idx_path, "has no document table")
        size = _HEADER.size + num_sequences * 12 + num_documents * 8
        if idx_size not in (size, size + num_sequences):
            raise self._broken(
                self._idx_path, f"is {idx_size} bytes long, not {size} as its header says"
            )
        dtype = _DTYPES[code]
        if bin_size % dtype.itemsize:
            raise self._broken(
                self._bin_path, f"is {bin_size} bytes long, which cuts a {dtype.name} in two"
            )
        raw = np.asarray(np.memmap(self._idx_path, dtype=np.uint8, mode="r"))
        cuts = np.cumsum([_HEADER.size, num_sequences * 4, num_sequences * 8, num_documents * 8])
        self.lengths: NDArray[np.int32] = raw[cuts[0] : cuts[1]].view("<i4")
        self.offsets: NDArray[np.int64] = raw[cuts[1] : cuts[2]].view("<i8")
        self.documents: NDArray[np.int64] = raw[cuts[2] : cuts[3]].view("<i8")
        # An empty file cannot be mapped.
        self.tokens: NDArray[Any] = (
            np.asarray(np.memmap(self._bin_path, dtype=dtype, mode="r"))
            if bin_size
            else np.empty(0, dtype)
        )
        self._check_ends(bin_size)

    def _check_ends(self, bin_size: int) -> None:
        end = 0
        if self.num_sequences:
            if self.offsets[0] != 0:
                raise self._broken(self._idx_path, f"starts its sequences at {self.offsets[0]}")
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


def _with_suffix(prefix: Path, suffix: str) -> Path:
    # Path.with_suffix would eat the "-v1.2" of "text-v1.2".
    return prefix.with_name(prefix.name + suffix)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
