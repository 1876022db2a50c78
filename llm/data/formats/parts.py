"""Numbered token files that open as one: `PREFIX-00000-of-00128.bin` and `.idx`.

The parts hold consecutive documents, so their tokens follow each other as in the joined file. Each
part is a complete pair, which Megatron-LM opens alone.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.megatron import TokenFile, add_suffix
from llm.errors import DataError
from llm.runtime.process_settings import raise_file_limit

_MAX_CHECKED_PARTS = 64
"""Parts with tables that opening checks, at equal distances."""


def part_prefix(prefix: Path, part_index: int, num_parts: int) -> Path:
    """Return the path without suffix of a part, counted from 0."""
    return add_suffix(prefix, f"-{part_index:05d}-of-{num_parts:05d}")


def part_files(prefix: Path) -> list[Path]:
    """Return the `.bin` and `.idx` of all parts with this prefix, complete or not, sorted."""
    pattern = re.compile(rf"{re.escape(prefix.name)}-[0-9]{{5}}-of-[0-9]{{5}}\.(bin|idx)")
    try:
        names = os.listdir(prefix.parent)
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return []
    return sorted(prefix.parent / name for name in names if pattern.fullmatch(name))


def find_parts(prefix: Path) -> list[Path]:
    """Return the paths without suffix of all parts, in their order; may be empty.

    Raises:
        DataError: A part is missing, the parts belong to different sets, or there is a whole pair
            next to them.
    """
    files = part_files(prefix)
    if not files:
        return []
    part_counts = sorted({path.stem[-5:] for path in files})
    if len(part_counts) > 1:
        raise DataError(
            f"The token file {prefix} has parts of several preparations, -of-{part_counts[0]} and "
            f"-of-{part_counts[1]}; keep one set, and move the other away."
        )
    num_parts = int(part_counts[0])
    prefixes = [part_prefix(prefix, part_index, num_parts) for part_index in range(num_parts)]
    _check_all_parts(prefix, prefixes, files)
    for suffix in (".bin", ".idx"):
        if os.path.exists(joined_file := add_suffix(prefix, suffix)):
            raise DataError(
                f"There are a whole token file {joined_file} and parts of it, {files[0]}; move one "
                "of them away."
            )
    return prefixes


def _check_all_parts(prefix: Path, prefixes: Sequence[Path], files: Sequence[Path]) -> None:
    """Refuse a set of parts with a missing file, or with a file beyond the number of parts.

    Args:
        prefix: The common path of the parts.
        prefixes: The path of each part without suffix.
        files: The files that exist.
    """
    expected_files = [add_suffix(part, suffix) for part in prefixes for suffix in (".bin", ".idx")]
    existing_files = set(files)
    if missing_files := [path for path in expected_files if path not in existing_files]:
        raise DataError(
            f"The token file {prefix} lacks {missing_files[0].name} of its {len(prefixes):,} parts "
            f"({len(missing_files):,} of {len(expected_files):,} files are missing); copy or "
            "prepare them again."
        )
    if excess_files := sorted(existing_files.difference(expected_files)):
        raise DataError(
            f"The token file {excess_files[0]} has a number beyond its count; move it away."
        )


class PartedTokens:
    """Token ids of consecutive arrays, indexed as one array; slices copy nothing.

    Attributes:
        arrays: The arrays, of one dtype; at least one.
        dtype: Their dtype.
        itemsize: Bytes of one id.
        size: Ids of all arrays.
        nbytes: Their bytes.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.arrays = arrays
        self._end_positions = np.cumsum([array.size for array in arrays])
        self.dtype = arrays[0].dtype
        self.itemsize = self.dtype.itemsize
        self.size = int(self._end_positions[-1])
        self.nbytes = self.size * self.itemsize

    def __getitem__(self, index: slice) -> "PartedTokens":
        """Return a range of ids."""
        start, stop, step = index.indices(self.size)
        assert step == 1
        if start >= stop:
            return PartedTokens([self.arrays[0][:0]])
        first_array_index, last_array_index = np.searchsorted(
            self._end_positions, [start, stop - 1], side="right"
        ).tolist()
        arrays = []
        for array_index in range(first_array_index, last_array_index + 1):
            array = self.arrays[array_index]
            array_start = int(self._end_positions[array_index]) - array.size
            arrays.append(array[max(0, start - array_start) : stop - array_start])
        return PartedTokens(arrays)

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        """Return the ids as one array, which is a view if there is only one."""
        ids = self.arrays[0] if len(self.arrays) == 1 else np.concatenate(self.arrays)
        return np.array(ids, dtype, copy=copy)

    def take(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the ids at positions [...], counted from 0."""
        ids = np.empty(positions.shape, self.dtype)
        array_indices = np.searchsorted(self._end_positions, positions, side="right")
        for array_index in np.unique(array_indices).tolist():
            is_in_array = array_indices == array_index
            array_start = int(self._end_positions[array_index]) - self.arrays[array_index].size
            ids[is_in_array] = self.arrays[array_index][positions[is_in_array] - array_start]
        return ids


Tokens = NDArray[Any] | PartedTokens
"""Token ids; `np.asarray(tokens[start:stop])` is an array of either."""


def arrays_of(tokens: Tokens) -> Sequence[NDArray[Any]]:
    """Return the mapped arrays of token ids."""
    return tokens.arrays if isinstance(tokens, PartedTokens) else [tokens]


class TokenFileParts:
    """Parts, memory-mapped, with the attributes and methods of the joined `TokenFile`.

    Opening reads the header of each part, and checks the tables of at most 64 parts.

    Attributes:
        prefix: The common path, without number and suffix.
        parts: The parts, in their order.
        tokens: All token ids [num_tokens], in the dtype of the parts.
        num_tokens: Tokens of all parts.
        num_sequences: Sequences of all parts.
        num_documents: Documents of all parts.

    Args:
        prefix: The common path.
        parts: The paths of the parts without suffix, as `find_parts` returns them.

    Raises:
        DataError: A part is damaged or cannot be opened, or the dtypes differ.
    """

    def __init__(self, prefix: Path, parts: Sequence[Path]) -> None:
        self.prefix = prefix
        raise_file_limit()  # each map keeps its file open
        stride = -(-len(parts) // _MAX_CHECKED_PARTS)
        self.parts = [
            TokenFile(part, check_tables=part_index % stride == 0)
            for part_index, part in enumerate(parts)
        ]
        for part in self.parts:
            if part.tokens.dtype != self.parts[0].tokens.dtype:
                raise DataError(
                    f"The token file {part.prefix}.idx holds {part.tokens.dtype.name}, and part 0 "
                    f"{self.parts[0].tokens.dtype.name}; prepare all parts with one tokenizer."
                )
        self.tokens = PartedTokens([part.tokens for part in self.parts])
        self.num_tokens = self.tokens.size
        self.num_sequences = sum(part.num_sequences for part in self.parts)
        self._first_tokens = np.cumsum([0, *(part.num_tokens for part in self.parts)])
        self._first_documents = np.cumsum([0, *(part.num_documents for part in self.parts)])
        self.num_documents = int(self._first_documents[-1])

    def document_start(self, document: int) -> int:
        """Return the position in `tokens` where a document begins; see `TokenFile`."""
        if not 0 <= document <= self.num_documents:
            raise IndexError(f"{self.prefix} has no document {document} of {self.num_documents}.")
        return int(self.find_document_starts(document, document + 1)[0])

    def find_document_starts(self, first_document: int, end_document: int) -> NDArray[np.int64]:
        """Return the positions in `tokens` where consecutive documents begin, as in `TokenFile`."""
        starts = np.full(end_document - first_document, self.num_tokens, np.int64)
        last_document = min(end_document, self.num_documents) - 1
        first_documents = self._first_documents
        # A part holds the documents from its entry in the table up to the next entry.
        first_part, last_part = (
            np.searchsorted(first_documents, [first_document, last_document], side="right") - 1
        ).tolist()
        for part_index in range(first_part, last_part + 1):
            part_first_document = int(first_documents[part_index])
            part_end_document = int(first_documents[part_index + 1])
            documents = range(
                max(first_document, part_first_document), min(end_document, part_end_document)
            )
            if documents:
                part_starts = self.parts[part_index].find_document_starts(
                    documents.start - part_first_document, documents.stop - part_first_document
                )
                starts[documents.start - first_document : documents.stop - first_document] = (
                    self._first_tokens[part_index] + part_starts
                )
        return starts
