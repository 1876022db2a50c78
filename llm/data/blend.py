"""Which source serves which sample of a weighted blend: exact, without an index.

Source j, of weight w_j, would ideally serve its i-th sample (from 0) when (2i + 1) / (2 w_j)
samples have been served in all. Samples are served in the order of these ideal times. At every
point of the order each of k sources is then within k samples of its share: a source is within
half a sample of its share at any time, and the order's clock within k / 2 samples of the count.

Times are integers, so that any position of the order can be computed directly and is the same
on every machine: weights have a common denominator of 2**40, and a time counts in 256ths of a
sample, rounded down.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_DENOMINATOR = 2**40
_TICKS = 2**8  # of one sample; at least as many lie between two samples of a source
_BLOCK = 2**16  # positions that are worked out at once
_BLOCKS_KEPT = 4

Int64s = NDArray[np.int64]


class Blend:
    """The order in which sources take turns.

    Args:
        weights: Of each source, finite and not negative, one of them positive; they need not
            sum to 1. A source of weight 0 is never served.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = _integer_shares(weights)
        # Per object, not per class: a cache on the method would keep every blend alive.
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._make_block)

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Who serves each sample.

        Args:
            samples: Positions in the order, counted from 0 [num_samples].

        Returns:
            (source, number of the sample among those of its source), each int64 [num_samples].
        """
        samples = np.asarray(samples, dtype=np.int64)
        if len(self._shares) == 1:
            return np.zeros_like(samples), samples
        sources, indices = np.empty_like(samples), np.empty_like(samples)
        blocks, places = np.divmod(samples, _BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            block_sources, block_indices = self._block(int(block))
            sources[here] = block_sources[places[here]]
            indices[here] = block_indices[places[here]]
        return sources, indices

    def served(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each source serves, exactly."""
        low, high = -1, (num_samples + len(self._shares)) * _TICKS
        while high - low > 1:  # the first time at which so many have been served
            middle = (low + high) // 2
            if sum(self._served_until(middle)) >= num_samples:
                high = middle
            else:
                low = middle
        before, until = self._served_until(high - 1), self._served_until(high)
        missing = num_samples - sum(before)
        for source in range(len(before)):
            # Sources that are served at the same tick: the lower number comes first.
            if missing and until[source] > before[source]:
                before[source] += 1
                missing -= 1
        return before

    def _served_until(self, time: int) -> list[int]:
        """How many samples of each source have a time of at most `time`."""
        # time_j(i) = (2i + 1) * D * T // (2 share_j) <= time, solved for i.
        unit = _DENOMINATOR * _TICKS
        return [(((time + 1) * 2 * share - 1) // unit + 1) // 2 for share in self._shares]

    def _make_block(self, block: int) -> tuple[Int64s, Int64s]:
        """Sources and their indices for the positions of one block."""
        first, stop = self.served(block * _BLOCK), self.served((block + 1) * _BLOCK)
        origin = block * _BLOCK * _TICKS
        sources, indices, times = [], [], []
        for source, share in enumerate(self._shares):
            steps = np.arange(stop[source] - first[source], dtype=np.int64)
            if steps.size == 0:
                continue
            # The times in Python's integers where they are large, and relative to the block in
            # int64: step * rest is below 2**16 * 2**41.
            start, begun = divmod((2 * first[source] + 1) * _DENOMINATOR * _TICKS, 2 * share)
            whole, rest = divmod(2 * _DENOMINATOR * _TICKS, 2 * share)
            times.append(start - origin + steps * whole + (begun + steps * rest) // (2 * share))
            sources.append(np.full(steps.size, source, dtype=np.int64))
            indices.append(first[source] + steps)
        # Stable: at equal times the lower source, which was put in first, stays first.
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(sources)[order], np.concatenate(indices)[order]


def _integer_shares(weights: Sequence[float]) -> list[int]:
    """Weights as integers that sum to the denominator, by the largest remainder."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    quotas = [weight * _DENOMINATOR / total for weight in exact]
    # A source of almost no weight is served almost never, but not never.
    shares = [max(int(quota), int(quota > 0)) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda j: (shares[j] - quotas[j], j))
    missing = _DENOMINATOR - sum(shares)
    for source in by_remainder[: max(0, missing)]:
        shares[source] += 1
    shares[shares.index(max(shares))] += min(0, missing)
    return shares
