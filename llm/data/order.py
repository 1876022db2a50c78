"""Maps samples to tokens, by pure functions of (seed, epoch, position).

This needs no shuffled index and no generator state. Arithmetic alone turns a sample index into a
source of the blend and a position in its token stream. Starting, resuming and changing the number
of ranks therefore cost nothing, for a thousand tokens as for a trillion.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.options import DataOptions
from llm.errors import ConfigError, DataError

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Four rounds suffice asymptotically. For sizes below ten, eight leave a bias that shows with two
# million keys; twelve leave none.
_ROUNDS = 12
_WINDOW_KEY, _OFFSET_KEY = 1, 2
_SOURCE_KEY = 1 << 63  # far from the number of any epoch

_DENOMINATOR = 2**40
_TICKS = 2**8  # per sample; two samples of a source are at least this many ticks apart

# Samples computed at once; a few at a time would cost thirty times as much.
_WINDOW_BLOCK = 2**10
_BLEND_BLOCK = 2**12
_BLOCKS_KEPT = 4

UInt64s = NDArray[np.uint64]
Int64s = NDArray[np.int64]


def permute(index: NDArray[Any], *, size: int, key: int | UInt64s) -> Int64s:
    """Apply a keyed permutation of range(size) to each index, without a table.

    A generalised Feistel network over side * side >= size, repeated until the value falls below
    `size`: Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), after Luby &
    Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions" (1988). The
    round functions are SplitMix64 streams (Steele, Lea & Flood 2014): statistically good, not
    secret.

    Args:
        index: Numbers in range(size), of any shape.
        size: Size of the range, from 1 to 2**62.
        key: One key for all, or an array with a key for each index [same shape].

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
        value[todo] = _feistel_permute(value[todo], keys[todo], np.uint64(side))
        # Values outside the range are mapped again, which keeps the map one to one.
        todo = todo[value[todo] >= size]
    return value.astype(np.int64).reshape(shape)


def _feistel_permute(value: UInt64s, keys: UInt64s, side: np.uint64) -> UInt64s:
    high, low = value // side, value % side
    for number in range(_ROUNDS):
        hashed = _split_mix(_split_mix(keys, number), high)
        low, high = high, (low + hashed % side) % side
    return high * side + low


def _split_mix(seed: UInt64s, position: UInt64s | int) -> UInt64s:
    """Return the SplitMix64 output at a position of each seed's stream; 1-D arrays."""
    # Arrays wrap around silently, which is intended; for scalars numpy would warn.
    count = np.atleast_1d(np.asarray(position, dtype=np.uint64)) + np.uint64(1)
    state: UInt64s = seed + count * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _as_uint64(key: int | UInt64s) -> UInt64s:
    return np.array([key & _MASK], np.uint64) if isinstance(key, int) else key


class _Blockwise:
    """A function of sample indices, computed and cached in blocks of consecutive indices.

    Args:
        make: Computes a block from its number: int64 [num_values, size].
        num_values: Values of one sample.
        size: Samples of a block.
    """

    def __init__(self, make: Callable[[int], Int64s], *, num_values: int, size: int) -> None:
        # One cache per object: a cache on the method would keep all objects alive.
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(make)
        self._num_values = num_values
        self._size = size

    def __call__(self, samples: Int64s) -> Int64s:
        """Return int64 [num_values, num_samples] for int64 [num_samples]."""
        blocks, places = np.divmod(samples, self._size)
        if samples.size and (blocks == blocks[0]).all():  # the usual case, in one copy
            return self._block(int(blocks[0]))[:, places]
        values = np.empty((self._num_values, samples.size), np.int64)
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            values[:, in_block] = self._block(block)[:, places[in_block]]
        return values


class WindowSampler:
    """Where each training sample starts in the token stream, read as a ring.

    Epoch e visits each of the `num_windows` windows once, in an order keyed by (seed, e). The
    windows of the first epoch begin at position 0; later epochs begin at an offset keyed by (seed,
    e), so that they do not repeat the same cuts.

    Args:
        num_tokens: Tokens of the stream.
        block_size: Tokens that a window predicts.
        seed: Any integer.
        source: Number of the stream in a blend; each number gives another order.
        name: Name of the stream, for messages.

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
            self._seed = _split_mix(self._seed, _SOURCE_KEY + source)
        self._starts = _Blockwise(self._make_block, num_values=1, size=_WINDOW_BLOCK)

    def starts(self, samples: NDArray[Any]) -> Int64s:
        """Return the position of each sample's first token.

        Args:
            samples: Sample indices, counted from 0 over all epochs, of any shape.

        Returns:
            int64 positions in range(num_tokens), in the shape of `samples`.
        """
        samples = np.asarray(samples, dtype=np.int64)
        return self._starts(samples.reshape(-1)).reshape(samples.shape)

    def _make_block(self, block: int) -> Int64s:
        samples = block * _WINDOW_BLOCK + np.arange(_WINDOW_BLOCK, dtype=np.int64)
        epoch, index = np.divmod(samples, self.num_windows)
        epoch_seed = _split_mix(self._seed, epoch.astype(np.uint64))
        window = permute(index, size=self.num_windows, key=_split_mix(epoch_seed, _WINDOW_KEY))
        offset = _split_mix(epoch_seed, _OFFSET_KEY) % np.uint64(self.num_tokens)
        offset[epoch == 0] = 0
        position = offset.astype(np.int64) + window * self.block_size
        return (position % self.num_tokens)[None]


class Blend:
    """Assigns each sample of a weighted blend to a source: exact, without an index.

    Source j, of weight w_j, would ideally serve its i-th sample (from 0) when (2i + 1) / (2 w_j)
    samples have been served in all. Samples are served in the order of these ideal times. At every
    point of the order each of k sources is then within k samples of its quota: a source is within
    half a sample of its quota at any time, and the order's clock within k / 2 samples of the count.

    Times are integers, so any position of the order can be computed directly and is the same on
    every machine: weights have the common denominator 2**40, and times are in 256ths of a sample,
    rounded down.

    Args:
        weights: Weight of each source, finite and not negative, one of them positive; they need
            not sum to 1. A source of weight 0 is never served.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = _integer_weights(weights)
        self._locate = _Blockwise(self._make_block, num_values=2, size=_BLEND_BLOCK)

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each sample, and its index among the samples of that source.

        Args:
            samples: Positions in the order, counted from 0 [num_samples].

        Returns:
            (sources, indices), each int64 [num_samples].
        """
        samples = np.asarray(samples, dtype=np.int64)
        if len(self._weights) == 1:
            return np.zeros_like(samples), samples
        sources, indices = self._locate(samples)
        return sources, indices

    def served(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples each source serves, exactly."""
        # Binary search for the first time when `num_samples` samples have been served. With k
        # sources, the clock is within k / 2 samples of this number.
        num_sources = len(self._weights)
        low, high = (
            max(-1, (num_samples - num_sources) * _TICKS - 1),
            (num_samples + num_sources) * _TICKS,
        )
        while high - low > 1:
            middle = (low + high) // 2
            if sum(self._served_until(middle)) >= num_samples:
                high = middle
            else:
                low = middle
        counts, counts_at_end = self._served_until(high - 1), self._served_until(high)
        missing = num_samples - sum(counts)
        for source in range(len(counts)):
            # If several sources are served at the same tick, the lower number comes first.
            if missing and counts_at_end[source] > counts[source]:
                counts[source] += 1
                missing -= 1
        return counts

    def _served_until(self, time: int) -> list[int]:
        """Return how many samples of each source have a time of at most `time`."""
        # time_j(i) = (2i + 1) * D * T // (2 weight_j) <= time, solved for i.
        unit = _DENOMINATOR * _TICKS
        return [(((time + 1) * 2 * weight - 1) // unit + 1) // 2 for weight in self._weights]

    def _make_block(self, block: int) -> Int64s:
        """Return the sources and indices of one block of samples, int64 [2, _BLEND_BLOCK]."""
        first, stop = self.served(block * _BLEND_BLOCK), self.served((block + 1) * _BLEND_BLOCK)
        origin = block * _BLEND_BLOCK * _TICKS
        sources, indices, times = [], [], []
        for source, weight in enumerate(self._weights):
            steps = np.arange(stop[source] - first[source], dtype=np.int64)
            if steps.size == 0:
                continue
            # The first time is computed with Python's integers, which do not overflow; the others
            # are int64 relative to the block, because step * rest is below 2**12 * 2**41.
            start, start_remainder = divmod(
                (2 * first[source] + 1) * _DENOMINATOR * _TICKS, 2 * weight
            )
            step_ticks, step_remainder = divmod(2 * _DENOMINATOR * _TICKS, 2 * weight)
            times.append(
                start
                - origin
                + steps * step_ticks
                + (start_remainder + steps * step_remainder) // (2 * weight)
            )
            sources.append(np.full(steps.size, source, dtype=np.int64))
            indices.append(first[source] + steps)
        # The sort is stable: at equal times the lower source stays first.
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.stack([np.concatenate(sources)[order], np.concatenate(indices)[order]])


def _integer_weights(weights: Sequence[float]) -> list[int]:
    """Return weights as integers that sum to the denominator, by the largest remainder."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    quotas = [weight * _DENOMINATOR / total for weight in exact]
    # A source with a tiny weight is served rarely, but not never.
    rounded = [max(int(quota), int(quota > 0)) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda j: (rounded[j] - quotas[j], j))
    missing = _DENOMINATOR - sum(rounded)
    for source in by_remainder[: max(0, missing)]:
        rounded[source] += 1
    rounded[rounded.index(max(rounded))] += min(0, missing)
    return rounded


@dataclass(frozen=True, slots=True)
class MixtureStage:
    """The weights of all sources during a part of a run.

    Attributes:
        until: Tokens of the run when the stage ends; None for the last stage.
        weights: Weight of each source of the run, as for `Blend`.
    """

    until: int | None
    weights: tuple[float, ...]


def stage_starts(stages: Sequence[MixtureStage], *, block_size: int) -> list[int]:
    """Return the first sample of each stage. Only whole samples belong to a stage.

    Args:
        stages: In their order.
        block_size: Tokens that a sample predicts.

    Raises:
        ConfigError: A stage has no sample.
    """
    ends = [stage.until for stage in stages if stage.until is not None]
    starts = [0, *(end // block_size for end in ends)]
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        if start == stop:
            raise ConfigError(
                f"data_stage {number + 1} ends at {ends[number]:,} tokens, before its first sample "
                f"of --block_size {block_size:,} tokens is complete; make its until larger."
            )
    return starts


class Mixture:
    """Which source serves which sample of a run: a `Blend` in each stage.

    Each stage begins a new blend, so its k sources are within k samples of their shares at every
    point of the stage. A source's samples are numbered across all stages: a source that appears
    again continues where it stopped.

    Args:
        stages: In their order; all have weights for the same sources.
        block_size: Tokens that a sample predicts.

    Raises:
        ConfigError: A stage has no sample.
    """

    def __init__(self, stages: Sequence[MixtureStage], *, block_size: int) -> None:
        self._starts = stage_starts(stages, block_size=block_size)
        self._blends = [Blend(stage.weights) for stage in stages]
        # Samples served by each source before each stage.
        self._before = [np.zeros(len(stages[0].weights), np.int64)]
        borders = itertools.pairwise(self._starts)
        for blend, (start, stop) in zip(self._blends, borders, strict=False):
            self._before.append(self._before[-1] + blend.served(stop - start))

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each sample, and its index among the samples of that source.

        Args:
            samples: Sample indices, counted from 0 over the whole run [num_samples].

        Returns:
            (sources, indices), each int64 [num_samples].
        """
        samples = np.asarray(samples, dtype=np.int64)
        stages = np.searchsorted(self._starts, samples, side="right") - 1
        sources, indices = np.empty_like(samples), np.empty_like(samples)
        for stage in np.unique(stages).tolist():
            in_stage = stages == stage
            sources[in_stage], within = self._blends[stage].locate(
                samples[in_stage] - self._starts[stage]
            )
            indices[in_stage] = self._before[stage][sources[in_stage]] + within
        return sources, indices

    def served(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples each source serves, exactly."""
        stage = self.stage_of(num_samples)
        within = self._blends[stage].served(num_samples - self._starts[stage])
        counts: list[int] = (self._before[stage] + within).tolist()
        return counts

    def stage_of(self, sample: int) -> int:
        """Return the stage of a sample, counted from 0."""
        return bisect.bisect_right(self._starts, sample) - 1


@dataclass(frozen=True, slots=True)
class DocumentBoundaries:
    """How to keep the documents of a window apart.

    A document ends with an end-of-text token, which belongs to it. The first document of a window
    begins with the window, even if it is the rest of a longer document.

    Attributes:
        eos_token_id: The token that ends a document.
        positions: Whether positions start again with each document.
        attention: Whether attention stops at the start of a document.
    """

    eos_token_id: int
    positions: bool
    attention: bool

    def split(self, input_ids: NDArray[Any]) -> tuple[Int64s | None, Int64s | None]:
        """Return positions and document numbers of windows.

        Args:
            input_ids: [num_windows, block_size].

        Returns:
            Position of each token in its document, and the number of that document in its
            window, counted from 0; both [num_windows, block_size], None if not wanted.
        """
        begins = np.zeros(input_ids.shape, dtype=bool)
        begins[:, 1:] = input_ids[:, :-1] == self.eos_token_id
        positions = documents = None
        if self.positions:
            places = np.arange(input_ids.shape[1], dtype=np.int64)
            positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        if self.attention:
            documents = np.cumsum(begins, axis=1, dtype=np.int64)
        return positions, documents


def choose_document_boundaries(
    options: DataOptions, *, eos_token_id: int | None
) -> DocumentBoundaries | None:
    """Return how to keep the documents of a window apart, or None to ignore their boundaries.

    Args:
        options: Whether positions or attention restart at each document.
        eos_token_id: The tokenizer's end-of-text token.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if not (options.reset_position_ids or options.reset_attention_mask):
        return None
    if eos_token_id is None:
        raise ConfigError(
            "--reset_position_ids and --reset_attention_mask need an end-of-text token between "
            "documents, and the tokenizer has none; use another tokenizer."
        )
    return DocumentBoundaries(
        eos_token_id, options.reset_position_ids, options.reset_attention_mask
    )
