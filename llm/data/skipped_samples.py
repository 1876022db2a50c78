"""Samples that training leaves out (`--skip_samples`): maps positions to sample indices."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from llm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Range = tuple[int, int]
"""The first index, and the one after the last."""

Positions = TypeVar("Positions", int, "NDArray[np.int64]")

_MAX_SAMPLES = 2**62  # beyond them, indices would overflow


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges of sample indices that a run skips.

    A position counts the trained samples from 0; steps, batches, epochs and the length of a run
    count positions. A sample index is a place in the order of all samples. Both are equal before
    the first range. Create it with `skip`.

    Attributes:
        ranges: In ascending order; they do not touch.
    """

    ranges: tuple[Range, ...] = ()

    def __str__(self) -> str:
        """Return the ranges in the notation of `--skip_samples`."""
        return ",".join(f"{first}:{stop}" for first, stop in self.ranges)

    def sample_indices(self, positions: Positions) -> Positions:
        """Return the sample index at a position, or at each of an array of any shape."""
        for first, stop in self.ranges:
            positions = positions + (positions >= first) * (stop - first)
        return positions

    def span(self, positions: Range) -> Range:
        """Return the range from the sample at the first position to the one at the last."""
        return self.sample_indices(positions[0]), self.sample_indices(positions[1] - 1) + 1

    def skip(self, ranges: Iterable[Range]) -> "SkippedSamples":
        """Return these ranges and others; ranges that touch are joined."""
        joined: list[Range] = []
        for first, stop in sorted((*self.ranges, *ranges)):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], stop)
            else:
                joined.append((first, stop))
        return SkippedSamples(tuple(joined))

    def ranges_below(self, index: int) -> tuple[Range, ...]:
        """Return the ranges below a sample index, the last one cut there."""
        return tuple((first, min(stop, index)) for first, stop in self.ranges if first < index)

    def served(self, count: Callable[[int], list[int]], position: int) -> list[int]:
        """Return how many samples before a position come from each source.

        Args:
            count: Returns how many of the first n sample indices come from each source.
            position: Samples trained on.
        """
        end = self.sample_indices(position - 1) + 1
        totals = count(end)
        for first, stop in self.ranges_below(end):
            skipped = zip(totals, count(first), count(stop), strict=True)
            totals = [
                total + count_before - count_after for total, count_before, count_after in skipped
            ]
        return totals


NONE_SKIPPED = SkippedSamples()


def skipped_ranges(text: str | None) -> list[Range]:
    """Parse the ranges of `skip_samples`.

    Raises:
        ConfigError: They are not ranges.
    """
    ranges = []
    for item in text.split(",") if text else ():
        first, colon, stop = item.strip().partition(":")
        digits = first.isascii() and first.isdigit() and stop.isascii() and stop.isdigit()
        if not (colon and digits and int(first) < int(stop) <= _MAX_SAMPLES):
            raise ConfigError(
                f"--skip_samples {text}: '{item.strip()}' is not FIRST:STOP, two growing numbers "
                "of samples such as 6400:6480."
            )
        ranges.append((int(first), int(stop)))
    return ranges
