"""Goes through whole token files for what opening them does not look at."""

from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.index_check import index_faults
from llm.data.formats.megatron import TokenFile
from llm.data.formats.paths import beside

_CHUNK = 1 << 20  # tokens that are looked at together


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
        index = beside(token_file.prefix, ".idx")
        tables = (token_file.lengths, token_file.offsets, token_file.documents)
        for fault in index_faults(*tables, token_file.tokens, sample=False):
            faults.append(f"{index} {fault}.")
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
