"""Splits of a corpus: memory-mapped token streams, and training samples by index."""

import ctypes
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.flat import AnyTokenFile
from llm.data.formats.megatron import add_suffix, mapping_of
from llm.data.formats.parts import PartedTokens, TokenFileParts, Tokens, arrays_of
from llm.data.formats.sidecar import Sidecar
from llm.data.order import Mixture, MixtureStage, WindowSampler
from llm.errors import DataError

_READ_BYTES = 32 * 2**20

logger = logging.getLogger("llm.data")


class TokenStream:
    """A contiguous range of a token file, read as a ring.

    Attributes:
        file: The token file.
        first_byte: Where the range begins in the file's `.bin`, or in all parts together.
        tokens: The tokens of the range [num_tokens], memory-mapped, in the dtype of the file.
        num_tokens: Tokens of the range.
        num_documents: Documents in the range, in whole or in part; 0 if not known.
        num_bytes: UTF-8 bytes of its text; None if not known.

    Args:
        file: The token file.
        start: First token of the range.
        stop: The token after its last; None for the end of the file.
        num_documents: Documents of the range; None for all documents of the file.
        num_bytes: UTF-8 bytes of its text.
        vocab_size: Ids from here on are refused when they are read; None if the file cannot contain
            any.
    """

    def __init__(
        self,
        file: AnyTokenFile,
        *,
        start: int = 0,
        stop: int | None = None,
        num_documents: int | None = None,
        num_bytes: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.file = file
        self.tokens = file.tokens[start:stop]
        self.first_byte = start * self.tokens.itemsize
        self.num_tokens = int(self.tokens.size)
        self.num_documents = file.num_documents if num_documents is None else num_documents
        self.num_bytes = num_bytes
        self._vocab_size = vocab_size
        self._window_views: dict[int, NDArray[Any]] = {}

    def read_windows(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Copy windows out of the ring.

        Args:
            starts: Positions of the windows' first tokens [num_windows], taken modulo num_tokens.
            length: Tokens of each window; may exceed num_tokens.

        Returns:
            Token ids [num_windows, length] in the dtype of the file.

        Raises:
            DataError: An id is beyond the vocabulary, or the file has become shorter.
        """
        starts = starts % self.num_tokens
        if isinstance(self.tokens, PartedTokens):
            windows = self._copy_from_parts(self.tokens, starts, length)
        else:
            windows = self._copy_windows(self.tokens, starts, length)
        # Checked here, because a check on opening would read the whole file.
        if self._vocab_size is not None and windows.size:
            self._check_vocabulary(windows, self._vocab_size)
        return windows

    def _check_vocabulary(self, windows: NDArray[Any], vocab_size: int) -> None:
        """Refuse token ids that are negative or beyond the vocabulary."""
        smallest_id = 0 if windows.dtype.kind == "u" else int(windows.min())
        largest_id = int(windows.max())
        if smallest_id < 0 or largest_id >= vocab_size:
            invalid_id = smallest_id if smallest_id < 0 else largest_id
            error = vocabulary_error(self.file.prefix, invalid_id, vocab_size)
            error.found_here = True  # other ranks read other windows
            raise error

    def _check_size(self, tokens: Tokens) -> None:
        """Refuse to read from a truncated file: the kernel would end this process (SIGBUS)."""
        for array in arrays_of(tokens):
            mapping = mapping_of(array)
            if mapping is None:
                continue
            try:
                size = mapping.size()
            except OSError:  # removed on a network file system
                size = 0
            if size < len(mapping):
                error = DataError(
                    f"{self.path_of(array)} was cut while it was in use: {size:,} of its "
                    f"{len(mapping):,} bytes are left. Restore it and resume the run."
                )
                error.found_here = True  # other ranks may read other files
                raise error

    def path_of(self, array: NDArray[Any]) -> Path:
        """Return the file that an array of `tokens` is mapped from."""
        parts = self.file.parts if isinstance(self.file, TokenFileParts) else []
        matching_parts = [part for part in parts if mapping_of(part.tokens) is mapping_of(array)]
        return add_suffix(matching_parts[0].prefix if matching_parts else self.file.prefix, ".bin")

    def _copy_windows(
        self, tokens: NDArray[Any], starts: NDArray[np.int64], length: int
    ) -> NDArray[Any]:
        """Copy windows of one mapped file [num_windows, length], around the end of the ring too."""
        self._check_size(tokens)
        windows = np.empty((starts.size, length), tokens.dtype)
        is_contiguous = starts + length <= self.num_tokens
        if is_contiguous.any():
            if length not in self._window_views:  # creating one takes as long as a small batch
                self._window_views[length] = np.lib.stride_tricks.sliding_window_view(
                    tokens, length
                )
            view = self._window_views[length]
            if is_contiguous.all():
                return view[starts]  # one copy in C instead of a loop over windows
            windows[is_contiguous] = view[starts[is_contiguous]]
        wrapped_positions = starts[~is_contiguous, None] + np.arange(length)
        windows[~is_contiguous] = tokens[wrapped_positions % self.num_tokens]
        return windows

    def _copy_from_parts(
        self, tokens: PartedTokens, starts: NDArray[np.int64], length: int
    ) -> NDArray[Any]:
        """Copy windows of numbered parts [num_windows, length], one after another."""
        windows = np.empty((starts.size, length), tokens.dtype)
        for window_index, start in enumerate(starts.tolist()):
            window = tokens[start : start + length]
            if window.size == length:
                self._check_size(window)
                windows[window_index] = np.asarray(window)
            else:  # around the end of the ring
                self._check_size(tokens)
                ring_positions = (start + np.arange(length)) % self.num_tokens
                windows[window_index] = tokens.take(ring_positions)
        return windows


def vocabulary_error(prefix: Path, token_id: int, vocab_size: int) -> DataError:
    """Return the error for a token file with an id outside the run's vocabulary."""
    return DataError(
        f"{prefix}.bin holds the token id {token_id}, and the vocabulary of tokenizer and model "
        f"has {vocab_size:,} tokens; train with the tokenizer that made the file."
    )


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """A source of a split of the corpus.

    Attributes:
        name: For logs and metrics, unique in the split.
        weight: Its fraction of the split, or the mean over the stages; the weights sum to 1.
        stream: Its tokens.
        sidecar: The sidecar of its token file, if there is one.
    """

    name: str
    weight: float
    stream: TokenStream
    sidecar: Sidecar | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """The splits of one run.

    Attributes:
        train: The sources to train on; may be empty.
        validation: The sources to evaluate on; may be empty.
        stages: Weights of the training sources if they change during the run.
    """

    train: tuple[CorpusSource, ...]
    validation: tuple[CorpusSource, ...]
    stages: tuple[MixtureStage, ...] = ()


class Samples:
    """Training samples, read by their indices.

    Each source serves its windows in a separate order for every epoch, and the mixture chooses the
    source of each sample. An epoch has as many samples as all sources together.

    Attributes:
        block_size: Tokens that a sample predicts.
        num_windows: Samples of one epoch.

    Args:
        sources: The sources of the training split; sources of weight 0 are never read.
        stages: Their weights if they change during the run.
        block_size: Tokens that a sample predicts.
        seed: Seed of the order.

    Raises:
        ConfigError: A stage is too short for one sample.
        DataError: A source is too short for one sample.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        *,
        stages: Sequence[MixtureStage] = (),
        block_size: int,
        seed: int,
    ) -> None:
        self.block_size = block_size
        self._streams = [source.stream for source in sources]
        self._dtype = np.result_type(*(stream.tokens.dtype for stream in self._streams))
        constant_stage = MixtureStage(
            until=None, weights=tuple(source.weight for source in sources)
        )
        self._mixture = Mixture(stages or [constant_stage], block_size=block_size)
        self._samplers = {
            source_index: WindowSampler(
                num_tokens=source.stream.num_tokens,
                block_size=block_size,
                seed=seed,
                source=source_index,
                name="The training text" if len(sources) == 1 else f"The source {source.name}",
            )
            for source_index, source in enumerate(sources)
            if source.weight > 0
        }
        self.num_windows = sum(sampler.num_windows for sampler in self._samplers.values())

    def read(self, samples: NDArray[np.int64]) -> NDArray[Any]:
        """Read the tokens of samples.

        Args:
            samples: Sample indices, counted from 0 over all epochs [num_samples].

        Returns:
            Token ids [num_samples, block_size + 1], in a dtype that holds the ids of all files.

        Raises:
            DataError: A source holds an id beyond the vocabulary.
        """
        length = self.block_size + 1
        source_indices, window_starts = self.locate(samples)
        if len(self._streams) == 1:
            return self._streams[0].read_windows(window_starts, length)
        tokens = np.empty((samples.size, length), self._dtype)
        for source_index in np.unique(source_indices).tolist():
            is_from_source = source_indices == source_index
            tokens[is_from_source] = self._streams[source_index].read_windows(
                window_starts[is_from_source], length
            )
        return tokens

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source and the position of each sample.

        Args:
            samples: Sample indices, counted from 0 over all epochs [num_samples].

        Returns:
            The index of each sample's source, and the position of its first token in the source's
            stream, each int64 [num_samples].
        """
        source_indices, indices_in_source = self._mixture.locate(samples)
        starts = np.empty_like(indices_in_source)
        for source_index in np.unique(source_indices).tolist():
            is_from_source = source_indices == source_index
            starts[is_from_source] = self._samplers[source_index].locate_windows(
                indices_in_source[is_from_source]
            )
        return source_indices, starts

    def stage_of(self, sample: int) -> int:
        """Return the stage of a sample, counted from 0; 0 if the weights never change."""
        return self._mixture.stage_of(sample)

    def epoch_samples(self, source: int) -> int:
        """Return the samples of one epoch of a source; 0 for a source of weight 0."""
        sampler = self._samplers.get(source)
        return 0 if sampler is None else sampler.num_windows

    def samples_per_source(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples come from each source."""
        return self._mixture.samples_per_source(num_samples)


def pin_in_memory(sources: Iterable[CorpusSource]) -> None:
    """Read all bytes of sources once, in order, and pin their pages if the system allows it.

    All processes on a node map the same files and share their pages, so one process reads and pins
    them for all. The pages stay pinned until it ends; the system may evict others.

    Args:
        sources: Sources of weight 0 are left out, because a run never reads them.
    """
    for stream in (source.stream for source in sources if source.weight > 0):
        lock_error = None
        for array in arrays_of(stream.tokens):
            _read_into_cache(stream.path_of(array), array)
            lock_error = lock_error or _lock_pages(array.ctypes.data, array.nbytes)
        outcome = (
            f"read ahead but not pinned ({lock_error}; see `ulimit -l`)" if lock_error else "pinned"
        )
        num_bytes = stream.tokens.nbytes
        logger.info(f"in memory: {num_bytes / 1e9:.3g} GB of {stream.file.prefix}.bin, {outcome}")


def _read_into_cache(path: Path, array: NDArray[Any]) -> None:
    """Bring the bytes of an array that is mapped from a file into the page cache."""
    mapping = mapping_of(array)
    if mapping is None:
        return
    first_byte = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    # Large sequential reads are faster than the page faults of a memory map.
    buffer = memoryview(bytearray(_READ_BYTES))
    num_remaining = array.nbytes
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), first_byte, num_remaining, os.POSIX_FADV_SEQUENTIAL)
        file.seek(first_byte)
        # If the file was cut short since it was mapped, the next access to the map raises.
        while num_remaining > 0 and (num_read := file.readinto(buffer[:num_remaining])):
            num_remaining -= num_read


def _lock_pages(address: int, num_bytes: int) -> str | None:
    """Lock mapped pages; return the reason if this fails."""
    try:
        lock = ctypes.CDLL(None, use_errno=True).mlock
    except (OSError, AttributeError, TypeError):  # the system lacks it
        return "this system has no mlock"
    lock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    lock.restype = ctypes.c_int
    if lock(address, num_bytes) != 0:
        return os.strerror(ctypes.get_errno())
    return None
