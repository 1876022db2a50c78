"""Whether the tables of an `.idx` agree with each other and with the `.bin`."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16  # entries of a table that are looked at together
_WHOLE = 1 << 24  # entries up to which a table is looked at whole: some tenths of a second
_SAMPLES = 64  # blocks of a larger table


def index_faults(
    lengths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    documents: NDArray[np.int64],
    tokens: NDArray[Any],
    *,
    sample: bool,
) -> list[str]:
    """Looks for sequences and documents that contradict each other, in bounded memory.

    Args:
        lengths: Tokens in each sequence [num_sequences].
        offsets: Byte offset of each sequence [num_sequences]; the first is 0.
        documents: First sequence of each document [num_documents + 1]; the last is num_sequences.
        tokens: All of them [num_tokens].
        sample: Of tables with more than 2^24 entries look at 64 blocks of 2^16 at equal distances,
            so that the time does not grow with the size. Otherwise look at everything.

    Returns:
        For each kind of fault what the index has, to be put after its name.
    """

    def negative(start: int, stop: int) -> NDArray[Any]:
        return lengths[start:stop] < 0

    def misplaced(start: int, stop: int) -> NDArray[Any]:
        # If each sequence ends where the next one starts, every offset is the sum of all lengths
        # before it.
        after = tokens.nbytes if stop == lengths.size else offsets[stop]
        ends = np.append(offsets[start + 1 : stop], after)
        sizes = lengths[start:stop].astype(np.int64) * tokens.itemsize
        marked: NDArray[Any] = ends - offsets[start:stop] != sizes
        return marked

    def backward(start: int, stop: int) -> NDArray[Any]:
        return documents[start + 1 : stop + 1] < documents[start:stop]

    faults = []
    for find, size, what in (
        (negative, lengths.size, "sequences of negative length"),
        (misplaced, lengths.size, "sequences that do not end where the next one starts"),
        (backward, documents.size - 1, "documents that end before they start"),
    ):
        count, first = _places(find, size, sample=sample)
        if count:
            faults.append(f"has {count:,} {what}; the first one is number {first:,}")
    return faults


def _places(
    find: Callable[[int, int], NDArray[Any]], size: int, *, sample: bool
) -> tuple[int, int]:
    """How many entries of a table are marked by `find(start, stop)`, and the first of them."""
    starts: Iterable[int] = range(0, size, _BLOCK)
    if sample and size > _WHOLE:
        starts = [(size - _BLOCK) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
    count, first = 0, -1
    for start in starts:
        marked = np.flatnonzero(find(start, min(start + _BLOCK, size)))
        if marked.size and not count:
            first = start + int(marked[0])
        count += marked.size
    return count, first
