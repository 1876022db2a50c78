"""A mixture of sources with changing weights, as a function of the sample number."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm.data.order import Blend, Int64s
from llm.errors import ConfigError


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
        """Return the source of each sample, and its number among the samples of that source.

        Args:
            samples: Their numbers, counted from 0 over the whole run [num_samples].

        Returns:
            (sources, numbers), each int64 [num_samples].
        """
        samples = np.asarray(samples, dtype=np.int64)
        stages = np.searchsorted(self._starts, samples, side="right") - 1
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            sources[here], within = self._blends[stage].locate(samples[here] - self._starts[stage])
            numbers[here] = self._before[stage][sources[here]] + within
        return sources, numbers

    def served(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples each source serves, exactly."""
        stage = self.stage_of(num_samples)
        within = self._blends[stage].served(num_samples - self._starts[stage])
        served: list[int] = (self._before[stage] + within).tolist()
        return served

    def stage_of(self, sample: int) -> int:
        """Return the stage of a sample, counted from 0."""
        return bisect.bisect_right(self._starts, sample) - 1
