"""Samples that training leaves out (`--skip_samples`): maps positions to sample indices."""

import re
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

    def sample_range(self, positions: Range) -> Range:
        """Return the range of sample indices that a range of positions spans."""
        return self.sample_indices(positions[0]), self.sample_indices(positions[1] - 1) + 1

    def skip(self, ranges: Iterable[Range]) -> "SkippedSamples":
        """Return these ranges and others; ranges that touch are joined."""
        joined_ranges: list[Range] = []
        for first, stop in sorted((*self.ranges, *ranges)):
            if joined_ranges and first <= joined_ranges[-1][1]:
                joined_ranges[-1] = joined_ranges[-1][0], max(joined_ranges[-1][1], stop)
            else:
                joined_ranges.append((first, stop))
        return SkippedSamples(tuple(joined_ranges))

    def ranges_below(self, index: int) -> tuple[Range, ...]:
        """Return the ranges below a sample index, the last one cut there."""
        return tuple((first, min(stop, index)) for first, stop in self.ranges if first < index)

    def samples_per_source(
        self, count_per_source: Callable[[int], list[int]], num_trained_samples: int
    ) -> list[int]:
        """Count the trained samples of each source.

        Args:
            count_per_source: Returns how many of the first n samples, skipped ones included, come
                from each source.
            num_trained_samples: Number of trained samples.
        """
        end_sample = self.sample_indices(num_trained_samples - 1) + 1
        num_trained_by_source = [*count_per_source(end_sample)]
        for range_start, range_end in self.ranges_below(end_sample):
            count_pairs = zip(
                count_per_source(range_start), count_per_source(range_end), strict=True
            )
            for source_index, (num_before, num_after) in enumerate(count_pairs):
                num_trained_by_source[source_index] -= num_after - num_before
        return num_trained_by_source


NO_SKIPPED_SAMPLES = SkippedSamples()


def parse_skipped_ranges(text: str | None) -> list[Range]:
    """Parse the ranges of `skip_samples`.

    Raises:
        ConfigError: They are not ranges.
    """
    ranges = []
    for range_text in text.split(",") if text else ():
        match = re.fullmatch("([0-9]+):([0-9]+)", range_text.strip())
        first, stop = (int(match[1]), int(match[2])) if match else (0, 0)
        if not first < stop <= _MAX_SAMPLES:
            raise ConfigError(
                f"--skip_samples {text}: '{range_text.strip()}' is not FIRST:STOP, two growing "
                "numbers of samples such as 6400:6480."
            )
        ranges.append((first, stop))
    return ranges
