"""Samples that training leaves out (`--skip_samples`): from positions to sample numbers. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]
"""The first number, and the one after the last."""


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges of sample numbers that a run passes over.

    A position counts the samples that are trained on, from 0: steps, batches, epochs and the length
    of a run count positions. A sample number is a place in the order of all samples. The two are
    equal before the first range. Make it by `skip`.

    Attributes:
        ranges: Growing, and apart from one another.
    """

    ranges: tuple[Range, ...] = ()

    def __str__(self) -> str:
        """Return the ranges as `--skip_samples` takes them."""
        return ",".join(f"{first}:{stop}" for first, stop in self.ranges)

    @cached_property
    def _shifts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The positions at which ranges are passed over, and the samples skipped from there on."""
        passed = [0, *accumulate(stop - first for first, stop in self.ranges)]
        begins = [first - before for (first, _), before in zip(self.ranges, passed, strict=False)]
        return np.array(begins, np.int64), np.array(passed, np.int64)

    def numbers(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample number at each position, of any shape."""
        if not self.ranges:
            return positions
        begins, passed = self._shifts
        numbers: NDArray[np.int64] = positions + passed[np.searchsorted(begins, positions, "right")]
        return numbers

    def span(self, positions: Range) -> Range:
        """Return the range from the sample at the first position to the one at the last."""
        first, last = self.numbers(np.array([positions[0], positions[1] - 1])).tolist()
        return first, last + 1

    def skip(self, ranges: Iterable[Range]) -> "SkippedSamples":
        """Return these ranges and others, joined where they touch."""
        joined: list[Range] = []
        for first, stop in sorted((*self.ranges, *ranges)):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], stop)
            else:
                joined.append((first, stop))
        return SkippedSamples(tuple(joined))

    def before(self, number: int) -> tuple[Range, ...]:
        """Return the ranges below a sample number, the last one cut there."""
        return tuple((first, min(stop, number)) for first, stop in self.ranges if first < number)

    def served(self, count: Callable[[int], list[int]], position: int) -> list[int]:
        """Return how many samples before a position come from each source.

        Args:
            count: Returns how many of the first samples, by their number, come from each.
            position: Samples trained on.
        """
        end = self.span((0, position))[1] if position else 0
        totals = np.array(count(end))
        for first, stop in self.before(end):
            totals -= np.array(count(stop)) - np.array(count(first))
        return list(totals.tolist())


NONE_SKIPPED = SkippedSamples()
