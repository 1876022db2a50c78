"""The training samples of a corpus by their numbers: one source, or a blend of several."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.blend import Blend
from llm.data.corpus import CorpusPart
from llm.data.sampler import WindowSampler

_BLOCK = 1024  # samples whose places are computed at once; a few at a time cost thirty times more
_BLOCKS_KEPT = 4


class _Starts:
    """Where the samples of one source start, computed in blocks."""

    def __init__(self, sampler: WindowSampler) -> None:
        self.num_windows = sampler.num_windows
        self._sampler = sampler
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._make_block)

    def of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `WindowSampler.starts`, for samples that lie near one another [num_samples]."""
        starts = np.empty_like(samples)
        blocks = samples // _BLOCK
        for block in np.unique(blocks).tolist():
            here = blocks == block
            starts[here] = self._block(block)[samples[here] - block * _BLOCK]
        return starts

    def _make_block(self, block: int) -> NDArray[np.int64]:
        return self._sampler.starts(block * _BLOCK + np.arange(_BLOCK, dtype=np.int64))


class Samples:
    """Turns numbers of samples into tokens.

    Each source goes through its own windows in its own order, epoch after epoch, and the blend
    says whose turn it is. An epoch of a blend is as many samples as all its sources hold.

    Attributes:
        block_size: Tokens a sample predicts.
        num_windows: Samples of one epoch.

    Args:
        parts: The sources; those of weight 0 are never read.
        block_size: Tokens a sample predicts.
        seed: Of the order.

    Raises:
        DataError: A source is too short for one sample.
    """

    def __init__(self, parts: Sequence[CorpusPart], *, block_size: int, seed: int) -> None:
        self.block_size = block_size
        self._streams = [part.stream for part in parts]
        self._dtype = np.result_type(*(part.stream.tokens.dtype for part in parts))
        self._blend = Blend([part.weight for part in parts])
        self._starts = {
            source: _Starts(
                WindowSampler(
                    num_tokens=part.stream.num_tokens,
                    block_size=block_size,
                    seed=seed,
                    source=source,
                    name="The training text" if len(parts) == 1 else f"The source {part.name}",
                )
            )
            for source, part in enumerate(parts)
            if part.weight > 0
        }
        self.num_windows = sum(starts.num_windows for starts in self._starts.values())

    def read(self, samples: NDArray[np.int64]) -> NDArray[Any]:
        """The tokens of some samples.

        Args:
            samples: Their numbers, counted from 0 over all epochs [num_samples].

        Returns:
            Token ids [num_samples, block_size + 1], in a dtype that holds those of all files.

        Raises:
            DataError: A source holds an id beyond the vocabulary.
        """
        length = self.block_size + 1
        if len(self._streams) == 1:
            return self._streams[0].windows(self._starts[0].of(samples), length)
        sources, indices = self._blend.locate(samples)
        tokens = np.empty((samples.size, length), self._dtype)
        for source in np.unique(sources).tolist():
            here = sources == source
            starts = self._starts[source].of(indices[here])
            tokens[here] = self._streams[source].windows(starts, length)
        return tokens

    def windows_of(self, source: int) -> int:
        """Samples that one epoch of a source has; 0 for a source of weight 0."""
        starts = self._starts.get(source)
        return 0 if starts is None else starts.num_windows

    def served(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples come from each source."""
        return self._blend.served(num_samples)
