"""Splits of a corpus: flat streams of tokens, and the training samples in them by number."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llm.data.blend import Blend
from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile
from llm.data.sampler import WindowSampler
from llm.errors import DataError

_DIGEST_TOKENS = 1 << 16
_BLOCK = 1024  # samples whose places are computed at once; a few at a time cost thirty times more
_BLOCKS_KEPT = 4


class TokenStream:
    """A contiguous range of a token file, read as a ring.

    Attributes:
        prefix: The path of the file without its suffix.
        first_byte: Where the range begins in the file's `.bin`.
        tokens: The tokens of the range [num_tokens], mapped, in the dtype of the file.
        num_tokens: Tokens of the range.
        num_documents: Documents of which it holds a part or all; 0 where that is not known.
        num_bytes: UTF-8 bytes of its text; None where it is not known.

    Args:
        token_file: The file.
        start: First token of the range.
        stop: The token after its last.
        num_documents: Documents of which it holds a part or all.
        num_bytes: UTF-8 bytes of its text.
        vocab_size: Ids from here on are refused when they are read; None where the file is known
            to hold none.
    """

    def __init__(
        self,
        token_file: TokenFile | FlatTokenFile,
        *,
        start: int,
        stop: int,
        num_documents: int,
        num_bytes: int | None,
        vocab_size: int | None = None,
    ) -> None:
        self.prefix = token_file.prefix
        self.tokens = token_file.tokens[start:stop]
        self.first_byte = start * self.tokens.itemsize
        self.num_tokens = stop - start
        self.num_documents = num_documents
        self.num_bytes = num_bytes
        self._vocab_size = vocab_size
        self._views: dict[int, NDArray[Any]] = {}

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Copy windows out of the ring.

        Args:
            starts: Positions of the windows' first tokens [num_windows], taken modulo num_tokens.
            length: Tokens of each window; may exceed num_tokens.

        Returns:
            Token ids [num_windows, length] in the dtype of the file.

        Raises:
            DataError: An id is beyond the vocabulary.
        """
        windows = self._copied(starts % self.num_tokens, length)
        if self._vocab_size is not None and windows.size:
            smallest = 0 if windows.dtype.kind == "u" else int(windows.min())
            largest = int(windows.max())
            if smallest < 0 or largest >= self._vocab_size:
                beyond = smallest if smallest < 0 else largest
                error = DataError(
                    f"{self.prefix}.bin holds the token id {beyond}, and the vocabulary of "
                    f"tokenizer and model has {self._vocab_size:,} tokens; train with the "
                    "tokenizer that made the file."
                )
                error.found_here = True  # other ranks read other windows
                raise error
        return windows

    def _copied(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        windows = np.empty((starts.size, length), self.tokens.dtype)
        inside = starts + length <= self.num_tokens
        if inside.any():
            if length not in self._views:  # making one takes as long as a small batch
                self._views[length] = np.lib.stride_tricks.sliding_window_view(self.tokens, length)
            whole = self._views[length]
            if inside.all():
                return whole[starts]
            windows[inside] = whole[starts[inside]]
        around = starts[~inside, None] + np.arange(length)
        windows[~inside] = self.tokens[around % self.num_tokens]
        return windows


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """A source of a split of the corpus.

    Attributes:
        name: For logs and metrics, different from that of the split's other sources.
        weight: Its fraction of the split; those of all sources sum to 1.
        stream: Its tokens.
    """

    name: str
    weight: float
    stream: TokenStream


def digest_of(sources: Sequence[CorpusSource]) -> str:
    """Return a digest of a split: of sizes, and of the tokens at both ends of each source."""
    state = xxhash.xxh3_128()
    for source in sources:
        tokens = source.stream.tokens
        state.update(str(source.stream.num_tokens).encode())
        for end in (tokens[:_DIGEST_TOKENS], tokens[-_DIGEST_TOKENS:]):
            state.update(np.ascontiguousarray(end).tobytes())
    return str(state.hexdigest())


@dataclass(frozen=True, slots=True)
class Corpus:
    """The splits of one run.

    Attributes:
        train: The sources to train on; empty where there are none.
        validation: Those to evaluate on; empty where there are none.
    """

    train: tuple[CorpusSource, ...]
    validation: tuple[CorpusSource, ...]


def whole(
    token_file: TokenFile | FlatTokenFile, num_bytes: int | None, *, vocab_size: int | None = None
) -> TokenStream:
    """A token file from its first token to its last.

    Args:
        token_file: The file.
        num_bytes: UTF-8 bytes of its text, if known.
        vocab_size: Ids from here on are refused when they are read.
    """
    return TokenStream(
        token_file,
        start=0,
        stop=token_file.num_tokens,
        num_documents=token_file.num_documents,
        num_bytes=num_bytes,
        vocab_size=vocab_size,
    )


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
    """Read training samples by their numbers.

    Each source goes through its own windows in its own order, epoch after epoch, and the blend
    chooses the source of each sample. An epoch of a blend has as many samples as all its sources.

    Attributes:
        block_size: Tokens a sample predicts.
        num_windows: Samples of one epoch.

    Args:
        sources: Of the training split; those of weight 0 are never read.
        block_size: Tokens a sample predicts.
        seed: Of the order.

    Raises:
        DataError: A source is too short for one sample.
    """

    def __init__(self, sources: Sequence[CorpusSource], *, block_size: int, seed: int) -> None:
        self.block_size = block_size
        self._streams = [source.stream for source in sources]
        self._dtype = np.result_type(*(stream.tokens.dtype for stream in self._streams))
        self._blend = Blend([source.weight for source in sources])
        self._starts = {
            number: _Starts(
                WindowSampler(
                    num_tokens=source.stream.num_tokens,
                    block_size=block_size,
                    seed=seed,
                    source=number,
                    name="The training text" if len(sources) == 1 else f"The source {source.name}",
                )
            )
            for number, source in enumerate(sources)
            if source.weight > 0
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
