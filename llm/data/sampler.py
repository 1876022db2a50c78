"""Which tokens make which sample: pure functions of (seed, epoch, position).

There is no shuffled index and no generator state. A sample number is turned into a place in the
token stream by arithmetic alone, so starting, resuming and changing the number of ranks cost
nothing, for a thousand tokens and for a trillion.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.errors import DataError

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Four suffice asymptotically. For sizes below ten, eight leave a bias that two million keys show,
# twelve none.
_ROUNDS = 12
_WINDOW_KEY, _OFFSET_KEY = 1, 2
_SOURCE_KEY = 1 << 63  # far from every epoch's number

UInt64s = NDArray[np.uint64]
Int64s = NDArray[np.int64]


def permute(index: NDArray[Any], *, size: int, key: int | UInt64s) -> Int64s:
    """Where a keyed bijection of range(size) sends each index; no memory in `size`.

    A generalised Feistel network over side * side >= size, walked until the value falls below
    `size`: Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), after Luby &
    Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions" (1988). The
    round functions are SplitMix64 streams (Steele, Lea & Flood 2014): statistically good, not
    secret.

    Args:
        index: Numbers in range(size), of any shape.
        size: How many there are to permute, at least 1 and at most 2**62.
        key: One key for all, or an array of keys that goes with `index` [same shape].

    Returns:
        int64, in the shape of `index`.
    """
    side = math.isqrt(size - 1) + 1
    side += side % 2  # with an odd side, all keys would give permutations of one parity
    value = np.array(index, dtype=np.uint64)
    shape, value = value.shape, value.reshape(-1)
    keys = np.broadcast_to(np.asarray(_as_uint64(key)), shape).reshape(-1)
    todo = np.arange(value.size)
    while todo.size:
        value[todo] = _feistel(value[todo], keys[todo], np.uint64(side))
        todo = todo[value[todo] >= size]
    return value.astype(np.int64).reshape(shape)


def _feistel(value: UInt64s, keys: UInt64s, side: np.uint64) -> UInt64s:
    right, left = value // side, value % side
    for number in range(_ROUNDS):
        hashed = _splitmix(_splitmix(keys, number), right)
        left, right = right, (left + hashed % side) % side
    return right * side + left


def _splitmix(seed: UInt64s, position: UInt64s | int) -> UInt64s:
    """The output of SplitMix64 at a position of the stream of each seed; 1-D arrays."""
    # Arrays wrap around silently, as is meant here; numpy warns where a scalar does.
    count = np.atleast_1d(np.asarray(position, dtype=np.uint64)) + np.uint64(1)
    state: UInt64s = seed + count * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _as_uint64(key: int | UInt64s) -> UInt64s:
    return np.array([key & _MASK], np.uint64) if isinstance(key, int) else key


class WindowSampler:
    """Where each training sample starts in the token stream, read as a ring.

    Epoch e visits each of the `num_windows` windows once, in an order keyed by (seed, e). The
    first epoch's windows are cut from position 0; those of later epochs from an offset keyed by
    (seed, e), so that epochs do not repeat the same cuts.

    Args:
        num_tokens: Of the stream.
        block_size: Tokens a window predicts.
        seed: Any integer.
        source: Number of the stream among those of a blend, whose orders shall not be alike.
        name: Of the stream, for messages.

    Raises:
        DataError: The stream is too short for one window.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        block_size: int,
        seed: int,
        source: int = 0,
        name: str = "The training text",
    ) -> None:
        self.num_tokens = num_tokens
        self.block_size = block_size
        self.num_windows = num_tokens // block_size
        if self.num_windows == 0:
            raise DataError(
                f"{name} has {num_tokens:,} tokens, too few for one window of "
                f"--block_size {block_size:,}; use a smaller --block_size or more text."
            )
        self._seed = _as_uint64(seed)
        if source:
            self._seed = _splitmix(self._seed, _SOURCE_KEY + source)

    def starts(self, samples: NDArray[Any]) -> Int64s:
        """The first token's position of each sample.

        Args:
            samples: Global sample numbers, counted from 0 over all epochs, of any shape.

        Returns:
            int64 positions in range(num_tokens), in the shape of `samples`.
        """
        samples = np.asarray(samples, dtype=np.int64)
        epoch, index = np.divmod(samples.reshape(-1), self.num_windows)
        epoch_seed = _splitmix(self._seed, epoch.astype(np.uint64))
        window = permute(index, size=self.num_windows, key=_splitmix(epoch_seed, _WINDOW_KEY))
        offset = _splitmix(epoch_seed, _OFFSET_KEY) % np.uint64(self.num_tokens)
        offset[epoch == 0] = 0
        position = offset.astype(np.int64) + window * self.block_size
        return (position % self.num_tokens).reshape(samples.shape)
