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

_UINT64_MASK = (1 << 64) - 1
_SPLIT_MIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
# Four rounds suffice asymptotically. For sizes below ten, eight leave a bias that shows with two
# million keys; twelve leave none.
_NUM_FEISTEL_ROUNDS = 12
# Positions in SplitMix64 streams of seeds.
_WINDOW_STREAM, _OFFSET_STREAM = 1, 2
_FIRST_SOURCE_STREAM = 1 << 63  # far from the number of any epoch

_WEIGHT_DENOMINATOR = 2**40
_TICKS_PER_SAMPLE = 2**8  # per sample; two samples of a source are at least this many ticks apart

# Samples computed at once; a few at a time would cost thirty times as much.
_SAMPLES_PER_WINDOW_BLOCK = 2**10
_SAMPLES_PER_BLEND_BLOCK = 2**12
_NUM_CACHED_BLOCKS = 4

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
    shape = np.shape(index)
    values = np.array(index, dtype=np.uint64).reshape(-1)
    keys = np.broadcast_to(np.asarray(_to_uint64(key)), shape).reshape(-1)
    pending = np.arange(values.size)
    while pending.size:
        values[pending] = _apply_feistel_network(values[pending], keys[pending], np.uint64(side))
        # Values outside the range are mapped again, which keeps the map one to one.
        pending = pending[values[pending] >= size]
    return values.astype(np.int64).reshape(shape)


def _apply_feistel_network(values: UInt64s, keys: UInt64s, side: np.uint64) -> UInt64s:
    """Permute values [num_values] of range(side * side), each with its key [num_values]."""
    high, low = values // side, values % side
    for round_index in range(_NUM_FEISTEL_ROUNDS):
        hashed = _split_mix(_split_mix(keys, round_index), high)
        low, high = high, (low + hashed % side) % side
    return high * side + low


def _split_mix(seed: UInt64s, position: UInt64s | int) -> UInt64s:
    """Return the SplitMix64 output at a position of each seed's stream; 1-D arrays."""
    # Arrays wrap around silently, which is intended; for scalars numpy would warn.
    stream_position = np.atleast_1d(np.asarray(position, dtype=np.uint64)) + np.uint64(1)
    state: UInt64s = seed + stream_position * _SPLIT_MIX_INCREMENT
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _to_uint64(key: int | UInt64s) -> UInt64s:
    """Return keys as uint64; an integer becomes an array [1] of its lowest 64 bits."""
    return np.array([key & _UINT64_MASK], np.uint64) if isinstance(key, int) else key


class _BlockCache:
    """A function of sample indices, computed and cached in blocks of consecutive indices.

    Args:
        compute_block: Returns a block by its index: int64 [num_values, size].
        num_values: Values of one sample.
        size: Samples of a block.
    """

    def __init__(
        self, compute_block: Callable[[int], Int64s], *, num_values: int, size: int
    ) -> None:
        # One cache per object: a cache on the method would keep all objects alive.
        self._read_block = lru_cache(maxsize=_NUM_CACHED_BLOCKS)(compute_block)
        self._num_values = num_values
        self._size = size

    def __call__(self, samples: Int64s) -> Int64s:
        """Return the values of samples, int64 [num_values, num_samples], from their blocks."""
        block_indices, offsets = np.divmod(samples, self._size)
        if samples.size and (block_indices == block_indices[0]).all():  # usually, in one copy
            return self._read_block(int(block_indices[0]))[:, offsets]
        values = np.empty((self._num_values, samples.size), np.int64)
        for block_index in np.unique(block_indices).tolist():
            is_in_block = block_indices == block_index
            values[:, is_in_block] = self._read_block(block_index)[:, offsets[is_in_block]]
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
        self._seed = _to_uint64(seed)
        if source:
            self._seed = _split_mix(self._seed, _FIRST_SOURCE_STREAM + source)
        self._starts = _BlockCache(
            self._compute_block, num_values=1, size=_SAMPLES_PER_WINDOW_BLOCK
        )

    def locate_windows(self, samples: NDArray[Any]) -> Int64s:
        """Return the position of each sample's first token.

        Args:
            samples: Sample indices, counted from 0 over all epochs, of any shape.

        Returns:
            int64 positions in range(num_tokens), in the shape of `samples`.
        """
        samples = np.asarray(samples, dtype=np.int64)
        return self._starts(samples.reshape(-1)).reshape(samples.shape)

    def _compute_block(self, block_index: int) -> Int64s:
        """Return where the samples of one block start in the stream, int64 [1, 1024]."""
        first_sample = block_index * _SAMPLES_PER_WINDOW_BLOCK
        samples = first_sample + np.arange(_SAMPLES_PER_WINDOW_BLOCK, dtype=np.int64)
        epochs, epoch_positions = np.divmod(samples, self.num_windows)
        epoch_seeds = _split_mix(self._seed, epochs.astype(np.uint64))
        windows = permute(
            epoch_positions, size=self.num_windows, key=_split_mix(epoch_seeds, _WINDOW_STREAM)
        )
        offsets = _split_mix(epoch_seeds, _OFFSET_STREAM) % np.uint64(self.num_tokens)
        offsets[epochs == 0] = 0
        positions = offsets.astype(np.int64) + windows * self.block_size
        return (positions % self.num_tokens)[None]


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
        self._weights = _round_weights(weights)
        self._cached_blocks = _BlockCache(
            self._compute_block, num_values=2, size=_SAMPLES_PER_BLEND_BLOCK
        )

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
        sources, indices = self._cached_blocks(samples)
        return sources, indices

    def samples_per_source(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples each source serves, exactly."""
        last_tick = self._find_tick_after(num_samples)
        counts_before_tick = self._samples_per_source_until(last_tick - 1)
        counts_after_tick = self._samples_per_source_until(last_tick)
        num_samples_by_source = [*counts_before_tick]
        num_unassigned = num_samples - sum(num_samples_by_source)
        for source_index in range(len(num_samples_by_source)):
            # If several sources are served at the same tick, the lower number comes first.
            if (
                num_unassigned
                and counts_after_tick[source_index] > counts_before_tick[source_index]
            ):
                num_samples_by_source[source_index] += 1
                num_unassigned -= 1
        return num_samples_by_source

    def _find_tick_after(self, num_samples: int) -> int:
        """Find the first tick at which `num_samples` samples have been served, by binary search."""
        # With k sources, the clock is within k / 2 samples of this number.
        num_sources = len(self._weights)
        low_tick = max(-1, (num_samples - num_sources) * _TICKS_PER_SAMPLE - 1)
        high_tick = (num_samples + num_sources) * _TICKS_PER_SAMPLE
        while high_tick - low_tick > 1:
            middle_tick = (low_tick + high_tick) // 2
            if sum(self._samples_per_source_until(middle_tick)) >= num_samples:
                high_tick = middle_tick
            else:
                low_tick = middle_tick
        return high_tick

    def _samples_per_source_until(self, tick: int) -> list[int]:
        """Return how many samples of each source have a time of at most `tick` ticks."""
        # tick_j(i) = (2i + 1) * D * T // (2 weight_j) <= tick, solved for i, with the denominator D
        # and T ticks per sample.
        ticks_of_full_weight = _WEIGHT_DENOMINATOR * _TICKS_PER_SAMPLE
        return [
            (((tick + 1) * 2 * weight - 1) // ticks_of_full_weight + 1) // 2
            for weight in self._weights
        ]

    def _compute_block(self, block_index: int) -> Int64s:
        """Return the sources and indices of one block of samples, int64 [2, 4096]."""
        first_sample = block_index * _SAMPLES_PER_BLEND_BLOCK
        first_indices = self.samples_per_source(first_sample)
        end_indices = self.samples_per_source(first_sample + _SAMPLES_PER_BLEND_BLOCK)
        sources, indices, ticks = [], [], []
        for source, weight in enumerate(self._weights):
            first_index = first_indices[source]
            num_samples = end_indices[source] - first_index
            if num_samples == 0:
                continue
            sources.append(np.full(num_samples, source, dtype=np.int64))
            indices.append(first_index + np.arange(num_samples, dtype=np.int64))
            ticks.append(
                _compute_source_ticks(
                    weight,
                    first_index=first_index,
                    num_samples=num_samples,
                    block_tick=first_sample * _TICKS_PER_SAMPLE,
                )
            )
        # The sort is stable: at equal ticks the lower source stays first.
        order = np.argsort(np.concatenate(ticks), kind="stable")
        return np.stack([np.concatenate(sources)[order], np.concatenate(indices)[order]])


def _compute_source_ticks(
    weight: int, *, first_index: int, num_samples: int, block_tick: int
) -> Int64s:
    """Return when a source serves consecutive samples: ticks after `block_tick` [num_samples].

    Sample i is served at tick (2i + 1) * D * T // (2 weight), with the denominator D of the weights
    and T ticks per sample.

    Args:
        weight: Integer weight of the source.
        first_index: Index of the first sample among the samples of the source.
        num_samples: Number of samples, at most 2**12.
        block_tick: The tick when the block begins.
    """
    # The first tick is computed with Python's integers, which do not overflow. The others are int64
    # relative to the block: offset * remainder is below 2**12 * 2**41.
    first_tick, first_remainder = divmod(
        (2 * first_index + 1) * _WEIGHT_DENOMINATOR * _TICKS_PER_SAMPLE, 2 * weight
    )
    step_ticks, step_remainder = divmod(2 * _WEIGHT_DENOMINATOR * _TICKS_PER_SAMPLE, 2 * weight)
    offsets = np.arange(num_samples, dtype=np.int64)
    carried_ticks = (first_remainder + offsets * step_remainder) // (2 * weight)
    ticks: Int64s = first_tick - block_tick + offsets * step_ticks + carried_ticks
    return ticks


def _round_weights(weights: Sequence[float]) -> list[int]:
    """Return weights as integers that sum to the denominator, by the largest remainder."""
    exact_weights = [Fraction(weight) for weight in weights]
    weight_sum = sum(exact_weights)
    quotas = [weight * _WEIGHT_DENOMINATOR / weight_sum for weight in exact_weights]
    # A source with a tiny weight is served rarely, but not never.
    integer_weights = [max(int(quota), int(quota > 0)) for quota in quotas]
    sources_by_remainder = sorted(
        range(len(quotas)), key=lambda source: (integer_weights[source] - quotas[source], source)
    )
    num_unassigned = _WEIGHT_DENOMINATOR - sum(integer_weights)
    if num_unassigned >= 0:
        for source in sources_by_remainder[:num_unassigned]:
            integer_weights[source] += 1
    else:
        heaviest_source = integer_weights.index(max(integer_weights))
        integer_weights[heaviest_source] += num_unassigned
    return integer_weights


@dataclass(frozen=True, slots=True)
class MixtureStage:
    """The weights of all sources during a part of a run.

    Attributes:
        until: Tokens of the run when the stage ends; None for the last stage.
        weights: Weight of each source of the run, as for `Blend`.
    """

    until: int | None
    weights: tuple[float, ...]


def find_stage_starts(stages: Sequence[MixtureStage], *, block_size: int) -> list[int]:
    """Return the first sample of each stage. Only whole samples belong to a stage.

    Raises:
        ConfigError: A stage has no sample.
    """
    end_tokens = [stage.until for stage in stages if stage.until is not None]
    starts = [0, *(end // block_size for end in end_tokens)]
    for stage_index, (start, next_start) in enumerate(itertools.pairwise(starts)):
        if start == next_start:
            raise ConfigError(
                f"data_stage {stage_index + 1} ends at {end_tokens[stage_index]:,} tokens, before "
                f"its first sample of --block_size {block_size:,} tokens is complete; make its "
                "until larger."
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
        self._starts = find_stage_starts(stages, block_size=block_size)
        self._blends = [Blend(stage.weights) for stage in stages]
        # Samples served by each source before each stage: int64 [num_sources] for every stage.
        self._samples_before_stage = [np.zeros(len(stages[0].weights), np.int64)]
        stage_lengths = [end - start for start, end in itertools.pairwise(self._starts)]
        for blend, num_samples in zip(self._blends[:-1], stage_lengths, strict=True):
            samples_in_stage = blend.samples_per_source(num_samples)
            self._samples_before_stage.append(self._samples_before_stage[-1] + samples_in_stage)

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each sample, and its index among the samples of that source.

        Args:
            samples: Sample indices, counted from 0 over the whole run [num_samples].

        Returns:
            (sources, indices), each int64 [num_samples].
        """
        samples = np.asarray(samples, dtype=np.int64)
        stage_indices = np.searchsorted(self._starts, samples, side="right") - 1
        sources, indices = np.empty_like(samples), np.empty_like(samples)
        for stage_index in np.unique(stage_indices).tolist():
            is_in_stage = stage_indices == stage_index
            samples_in_stage = samples[is_in_stage] - self._starts[stage_index]
            stage_sources, indices_in_blend = self._blends[stage_index].locate(samples_in_stage)
            sources[is_in_stage] = stage_sources
            indices[is_in_stage] = (
                self._samples_before_stage[stage_index][stage_sources] + indices_in_blend
            )
        return sources, indices

    def samples_per_source(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples each source serves, exactly."""
        stage = self.stage_of(num_samples)
        counts_in_stage = self._blends[stage].samples_per_source(num_samples - self._starts[stage])
        counts: list[int] = (self._samples_before_stage[stage] + counts_in_stage).tolist()
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
            Position of each token in its document, and the number of that document in its window,
            counted from 0; both int64 [num_windows, block_size], None if `positions` or `attention`
            is False.
        """
        is_document_start = np.zeros(input_ids.shape, dtype=bool)
        is_document_start[:, 1:] = input_ids[:, :-1] == self.eos_token_id
        positions = documents = None
        if self.positions:
            window_positions = np.arange(input_ids.shape[1], dtype=np.int64)
            positions = window_positions - np.maximum.accumulate(
                np.where(is_document_start, window_positions, 0), axis=1
            )
        if self.attention:
            documents = np.cumsum(is_document_start, axis=1, dtype=np.int64)
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
        eos_token_id=eos_token_id,
        positions=options.reset_position_ids,
        attention=options.reset_attention_mask,
    )
