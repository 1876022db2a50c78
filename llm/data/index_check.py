"""Whether the tables of an `.idx` agree with each other and with the `.bin`."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llm.data.token_file import TokenFile

_BLOCK = 1 << 16  # entries of a table that are looked at together
_WHOLE = 1 << 24  # entries up to which a table is looked at whole: some tenths of a second
_SAMPLES = 64  # blocks of a larger table


def index_faults(file: "TokenFile", *, sample: bool) -> list[str]:
    """Looks for sequences and documents that contradict each other, in bounded memory.

    Args:
        file: With its tables mapped, whose first and last entries are right.
        sample: Of tables with more than 2^24 entries look at 64 blocks of 2^16 at equal distances,
            so that the time does not grow with the size. Otherwise look at everything.

    Returns:
        For each kind of fault what the index has, to be put after its name.
    """
    lengths, offsets, documents = file.lengths, file.offsets, file.documents

    def negative(start: int, stop: int) -> NDArray[Any]:
        return lengths[start:stop] < 0

    def misplaced(start: int, stop: int) -> NDArray[Any]:
        # If each sequence ends where the next one starts, every offset is the sum of all lengths
        # before it.
        after = file.tokens.nbytes if stop == file.num_sequences else offsets[stop]
        ends = np.append(offsets[start + 1 : stop], after)
        sizes = lengths[start:stop].astype(np.int64) * file.tokens.itemsize
        marked: NDArray[Any] = ends - offsets[start:stop] != sizes
        return marked

    def backward(start: int, stop: int) -> NDArray[Any]:
        return documents[start + 1 : stop + 1] < documents[start:stop]

    faults = []
    for find, size, what in (
        (negative, file.num_sequences, "sequences of negative length"),
        (misplaced, file.num_sequences, "sequences that do not end where the next one starts"),
        (backward, file.num_documents, "documents that end before they start"),
    ):
        count, first = _places(find, _blocks(size, sample))
        if count:
            faults.append(f"has {count:,} {what}; the first one is number {first:,}")
    return faults


def _blocks(size: int, sample: bool) -> Iterator[tuple[int, int]]:
    if sample and size > _WHOLE:
        for number in range(_SAMPLES):
            start = (size - _BLOCK) * number // (_SAMPLES - 1)
            yield start, start + _BLOCK
    else:
        for start in range(0, size, _BLOCK):
            yield start, min(start + _BLOCK, size)


def _places(
    find: Callable[[int, int], NDArray[Any]], blocks: Iterator[tuple[int, int]]
) -> tuple[int, int]:
    """How many entries of a table are marked by `find(start, stop)`, and the first of them."""
    count, first = 0, -1
    for start, stop in blocks:
        marked = np.flatnonzero(find(start, stop))
        if marked.size and not count:
            first = start + int(marked[0])
        count += marked.size
    return count, first
