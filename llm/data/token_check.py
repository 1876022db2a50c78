"""Goes through whole token files for what opening them does not look at."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.flat_file import FlatTokenFile
from llm.data.token_file import TokenFile
from llm.data.token_paths import beside

_CHUNK = 1 << 20  # entries of a table, or tokens, that are looked at together


def check(token_file: TokenFile | FlatTokenFile, vocab_size: int | None = None) -> list[str]:
    """Whether an open token file is consistent; reads its whole index in bounded memory.

    Args:
        token_file: The file.
        vocab_size: Read all tokens too, and find ids outside of a vocabulary of this size.

    Returns:
        A sentence for each kind of fault; none where there is none.
    """
    faults: list[str] = []
    if isinstance(token_file, TokenFile):
        faults += _index_faults(token_file)
    if vocab_size is not None:
        faults += id_faults(token_file, vocab_size, id_range(token_file))
    return faults


def id_range(token_file: TokenFile | FlatTokenFile) -> tuple[int, int]:
    """Reads all tokens for the smallest and the largest id; (0, -1) where there are none."""
    tokens = token_file.tokens
    smallest, largest = 0, -1
    for start in range(0, tokens.size, _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        low, high = int(chunk.min()), int(chunk.max())
        smallest = min(smallest, low) if start else low
        largest = max(largest, high) if start else high
    return smallest, largest


def id_faults(
    token_file: TokenFile | FlatTokenFile, vocab_size: int, ids: tuple[int, int]
) -> list[str]:
    """Says whether the smallest and the largest id, from `id_range`, are of a vocabulary."""
    path = beside(token_file.prefix, ".bin")
    smallest, largest = ids
    faults = []
    if smallest < 0:
        faults.append(f"{path} has negative ids, down to {smallest}.")
    if largest >= vocab_size:
        faults.append(
            f"{path} has ids up to {largest}, which a vocabulary of {vocab_size} does not reach."
        )
    return faults


def _index_faults(file: TokenFile) -> list[str]:
    path = beside(file.prefix, ".idx")
    size = file.tokens.itemsize

    def after(stop: int) -> int:
        return file.num_tokens * size if stop == file.num_sequences else int(file.offsets[stop])

    def negative(start: int, stop: int) -> NDArray[Any]:
        return file.lengths[start:stop] < 0

    def misplaced(start: int, stop: int) -> NDArray[Any]:
        # From one offset to the next it is as far as the length says: then every offset is the
        # sum of all lengths before it, since the first one is 0.
        ends = np.append(file.offsets[start + 1 : stop], after(stop))
        sizes = file.lengths[start:stop].astype(np.int64) * size
        marked: NDArray[Any] = ends - file.offsets[start:stop] != sizes
        return marked

    def backward(start: int, stop: int) -> NDArray[Any]:
        return file.documents[start + 1 : stop + 1] < file.documents[start:stop]

    faults = []
    for find, size_of_table, what in (
        (negative, file.num_sequences, "sequences of negative length"),
        (misplaced, file.num_sequences, "sequences that do not end where the next one starts"),
        (backward, file.num_documents, "documents that end before they start"),
    ):
        count, first = _places(find, size_of_table)
        if count:
            faults.append(f"{path} has {count:,} {what}; the first one is number {first:,}.")
    return faults


def _places(find: Callable[[int, int], NDArray[Any]], size: int) -> tuple[int, int]:
    """How many entries of a table are marked by `find(start, stop)`, and the first of them."""
    count, first = 0, -1
    for start in range(0, size, _CHUNK):
        marked = np.flatnonzero(find(start, min(start + _CHUNK, size)))
        if marked.size and not count:
            first = start + int(marked[0])
        count += marked.size
    return count, first
