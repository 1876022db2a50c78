"""How many tokens the loss takes at a time on an accelerator.

The sums of the loss depend on it in their last bits, so checkpoints record it.
"""

import functools
from dataclasses import dataclass

TILE = 128
"""Rows and columns of the tiles in an accelerator's matrix products."""

_PRODUCT_TILE_WIDTH = 256
"""Columns of a tile in the large products of a Hopper GPU; it has `TILE` rows."""
_CHUNK_COST_WIDTH = 5000
"""Width at which a further chunk costs as much as a wave of the product that computes the gradient
of the hidden states.

A chunk reads and writes the head's fp32 gradient, 8 bytes x columns x width. A tile of the product
takes 2 x 128 x 256 x columns operations. The number follows from the rates of an H100 or H200: 3 to
4 TB/s, and 6 TFLOP/s for a multiprocessor."""
_EXCESS = 1 / 16
"""Share of `num_bytes` by which a chunk may exceed it to fill its waves."""

# 5,248 tokens with GPT-2's vocabulary, twice as many with the softmax kernel. Each chunk reads and
# writes the head's fp32 gradient, so few large chunks are faster. Logits and gradients in half
# precision together take the same number of bytes; fp32 probabilities take them once more.
_MAX_CHUNK_BYTES = 2**30
_CHUNKS_PER_DEVICE = 64  # 1 GiB of 64 GiB; smaller devices get smaller chunks
_DEFAULT_CHUNK_BYTES = 512 * 2**20  # if the memory is unknown


@dataclass(frozen=True, kw_only=True)
class LossChunks:
    """What the number of tokens in a chunk follows from, besides the sizes of the model.

    Attributes:
        num_bytes: Memory for the fp32 logits of one chunk.
        num_multiprocessors: Multiprocessors that work on a chunk; None if unknown.
    """

    num_bytes: int
    num_multiprocessors: int | None

    def choose_rows(
        self, num_tokens: int, num_columns: int, width: int, *, is_in_place: bool
    ) -> int:
        """Return the tokens per chunk, a multiple of 128.

        Args:
            num_tokens: Tokens of a micro-batch.
            num_columns: Columns of the logits.
            width: Width of the hidden states.
            is_in_place: Whether the gradient replaces the logits, so that a chunk of twice as many
                tokens takes the same memory.
        """
        num_bytes = self.num_bytes * (2 if is_in_place else 1)
        if self.num_multiprocessors is None:
            return choose_equal_chunk_rows(num_tokens, num_columns, num_bytes)
        return choose_fastest_chunk_rows(
            num_tokens,
            num_columns,
            num_bytes,
            width=width,
            num_multiprocessors=self.num_multiprocessors,
        )

    def describe(self) -> str:
        """Describe the chunks for the log."""
        text = f"chunks of about {self.num_bytes / 2**20:,.0f} MiB of float32 logits"
        if self.num_multiprocessors is None:
            return text
        return f"{text}, for {self.num_multiprocessors} multiprocessors"


def default_chunks(device_bytes: int | None, num_multiprocessors: int | None) -> LossChunks:
    """Return the chunk size of the loss on an accelerator.

    Args:
        device_bytes: Memory of the device in bytes; None if unknown.
        num_multiprocessors: Its multiprocessors; None if unknown.
    """
    num_bytes = _DEFAULT_CHUNK_BYTES
    if device_bytes is not None:
        num_bytes = min(_MAX_CHUNK_BYTES, device_bytes // _CHUNKS_PER_DEVICE)
    return LossChunks(num_bytes=num_bytes, num_multiprocessors=num_multiprocessors)


def choose_equal_chunk_rows(num_tokens: int, num_columns: int, chunk_bytes: int) -> int:
    """Choose the tokens per chunk: a multiple of 128 that makes all chunks equally long.

    The last chunk is shorter if the number of chunks times 128 does not divide the tokens.

    Args:
        num_tokens: Tokens of a micro-batch.
        num_columns: Columns of the logits.
        chunk_bytes: Memory for the fp32 logits of one chunk; exceeded if 128 tokens need more.
    """
    num_tiles = max(1, -(-num_tokens // TILE))
    num_chunks = -(-num_tiles // _count_max_tiles(num_columns, chunk_bytes))
    return TILE * -(-num_tiles // num_chunks)


@functools.cache
def choose_fastest_chunk_rows(
    num_tokens: int, num_columns: int, chunk_bytes: int, *, width: int, num_multiprocessors: int
) -> int:
    """Choose the tokens per chunk: the multiple of 128 with which the loss is fastest.

    The multiprocessors compute the tiles of a product in waves, and a wave takes as long with one
    tile as with all. This matters in the product with the fewest tiles, which computes the gradient
    of the hidden states. Among sizes with equal cost, the smallest is chosen.

    Args:
        num_tokens: Tokens of a micro-batch.
        num_columns: Columns of the logits.
        chunk_bytes: Memory for the fp32 logits of one chunk. A chunk may exceed it by 1/16, or if
            128 tokens need more.
        width: Width of the hidden states.
        num_multiprocessors: Multiprocessors of the device.
    """
    num_tiles = max(1, -(-num_tokens // TILE))
    max_tiles = _count_max_tiles(num_columns, int(chunk_bytes * (1 + _EXCESS)))
    cost_by_chunk_tiles = {
        chunk_tiles: _estimate_loss_cost(
            num_tiles, chunk_tiles, width=width, num_multiprocessors=num_multiprocessors
        )
        for chunk_tiles in range(1, min(max_tiles, num_tiles) + 1)
    }
    return TILE * min(cost_by_chunk_tiles, key=cost_by_chunk_tiles.__getitem__)


def _estimate_loss_cost(
    num_tiles: int, chunk_tiles: int, *, width: int, num_multiprocessors: int
) -> float:
    """Return the cost of a micro-batch's loss, in waves of the multiprocessors.

    The tokens of the micro-batch and of a chunk are counted in tiles of 128.
    """
    num_full_chunks, last_chunk_tiles = divmod(num_tiles, chunk_tiles)
    num_chunks = num_full_chunks + (last_chunk_tiles > 0)
    product_tiles_per_tile = -(-width // _PRODUCT_TILE_WIDTH)
    waves_per_chunk = -(-chunk_tiles * product_tiles_per_tile // num_multiprocessors)
    waves_of_last_chunk = -(-last_chunk_tiles * product_tiles_per_tile // num_multiprocessors)
    num_waves = num_full_chunks * waves_per_chunk + waves_of_last_chunk
    return num_waves + num_chunks * width / _CHUNK_COST_WIDTH


def _count_max_tiles(num_columns: int, chunk_bytes: int) -> int:
    """Return how many times 128 tokens have logits that fit into a chunk, at least 1."""
    num_columns = -(-num_columns // TILE) * TILE
    return max(1, chunk_bytes // (4 * num_columns * TILE))
