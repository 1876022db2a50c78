"""Micro-batches of samples on the device, read ahead by one background thread."""

import itertools
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llm.data.batch_plan import BatchPlan
from llm.data.corpus import Samples, TokenStream
from llm.data.order import DocumentBoundaries
from llm.data.skipped_samples import NONE_SKIPPED, SkippedSamples
from llm.errors import DataError
from llm.runtime.labels import IGNORED

_PREFETCH_STEPS = 2


class MicroBatch(NamedTuple):
    """The input of one forward pass; tensors int64 `[micro_batch_size, block_size]`.

    Attributes:
        input_ids: The tokens.
        labels: The token that follows each of them; -100 is ignored.
        positions: Position of each token in its document; None for positions in the window.
        documents: Number of each token's document in its window; None if attention may cross
            documents.
        sources: Number of each sample's source `[micro_batch_size]`; None without per-source
            losses.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    sources: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The input of one optimizer step on one rank.

    Attributes:
        micro_batches: The micro-batches, on the device.
        num_samples: Samples of this step, over all ranks.
        num_tokens: Labels that count in this step, over all ranks.
        samples: This rank's sample indices, int64 [at most micro-batches * their size].
    """

    micro_batches: list[MicroBatch]
    num_samples: int
    num_tokens: int
    samples: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TrainLoader:
    """The micro-batches of one rank in every training step.

    Every rank takes part in every micro-batch of every step, and shapes never change: if the last
    step is smaller, the labels of the missing samples are ignored.

    Attributes:
        samples: The tokens of every sample.
        plan: Which samples make a step, and how they are divided among ranks.
        rank: This data-parallel rank.
        device: Device of the micro-batches.
        document_boundaries: How to keep the documents of a window apart; None ignores them.
        with_sources: Whether micro-batches have the sources of their samples.
        skipped: The samples to leave out; the plan's positions are mapped to the others.
    """

    samples: Samples
    plan: BatchPlan
    rank: int
    device: torch.device
    document_boundaries: DocumentBoundaries | None = None
    with_sources: bool = False
    skipped: SkippedSamples = NONE_SKIPPED

    def sample_range(self, first: int, stop: int) -> tuple[int, int]:
        """Return the range of samples of the steps first to stop - 1, counted from 0."""
        begin, _ = self.plan.step_positions(first)
        _, end = self.plan.step_positions(stop - 1)
        return self.skipped.span((begin, end))

    def steps(self, start: int) -> Generator[StepBatch, None, None]:
        """Yield the steps from `start` to the end of the run; nothing before `start` is read.

        A thread reads ahead. It ends with the iterator, even if you close it early, and its errors
        are raised here.
        """
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        pending: deque[Future[StepBatch]] = deque()
        try:
            remaining = iter(range(start, self.plan.total_steps))
            for step in itertools.islice(remaining, _PREFETCH_STEPS):
                pending.append(pool.submit(self._read_step, step))
            while pending:
                # Wait before submitting the next step: the thread would compete for the interpreter
                # lock with the training step that waits here.
                batch = pending.popleft().result()
                for step in itertools.islice(remaining, 1):
                    pending.append(pool.submit(self._read_step, step))
                # Copied here and not in the thread, so that the CUDA stream that uses the copies
                # also queues them.
                micro_batches = [_to_device(micro, self.device) for micro in batch.micro_batches]
                yield replace(batch, micro_batches=micro_batches)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read_step(self, step: int) -> StepBatch:
        first, stop = self.plan.step_positions(step)
        positions = self.plan.rank_positions(step, self.rank)  # [accumulation, micro_batch_size]
        is_real = positions >= 0
        block_size = self.samples.block_size
        # Missing samples read the step's first window, and their labels are ignored.
        samples = self.skipped.sample_indices(np.where(is_real, positions, first))
        windows = self.samples.read(samples.reshape(-1))
        sources: Sequence[NDArray[np.int64] | None] = [None] * len(samples)
        if self.with_sources:
            sources = [*self.samples.locate(samples.reshape(-1))[0].reshape(samples.shape)]
        # [accumulation, micro_batch_size, block_size + 1]
        windows = windows.reshape(*samples.shape, block_size + 1)
        pin = self.device.type == "cuda"
        return StepBatch(
            micro_batches=[
                _micro_batch(window, label_mask, self.document_boundaries, pin, source)
                for window, label_mask, source in zip(windows, is_real, sources, strict=True)
            ],
            num_samples=stop - first,
            num_tokens=(stop - first) * block_size,
            samples=samples[is_real],
        )


@dataclass(frozen=True, kw_only=True)
class EvalLoader:
    """One rank's batches of an evaluation, which predicts every token of a stream except the first.

    Windows are adjacent, and the stream does not wrap around. The last window is padded with
    ignored labels. Every rank yields the same number of batches, if needed with ignored labels
    only: otherwise some ranks would wait in a collective that others have left. Iterating again
    gives the same batches.

    Attributes:
        stream: The tokens.
        block_size: Tokens that a window predicts.
        micro_batch_size: Windows of a batch.
        rank: This data-parallel rank.
        world_size: Data-parallel ranks.
        device: Device of the batches.
        max_batches: Maximum batches over all ranks; None takes the whole stream.
        document_boundaries: How to keep the documents of a window apart; None ignores them.
        name: Name of the stream, for messages.

    Raises:
        DataError: The stream has fewer than two tokens.
    """

    stream: TokenStream
    block_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    device: torch.device
    max_batches: int | None
    document_boundaries: DocumentBoundaries | None = None
    name: str = "The validation text"

    def __post_init__(self) -> None:
        """Refuse a stream without a token to predict."""
        if self.stream.num_tokens < 2:
            raise DataError(
                f"{self.name} has {self.stream.num_tokens} token(s), and predicting one takes "
                "two; give more with --validation_file, --validation_split_percentage or --split."
            )

    def _num_windows(self) -> int:
        windows = math.ceil((self.stream.num_tokens - 1) / self.block_size)
        if self.max_batches is None:
            return windows
        return min(windows, self.max_batches * self.micro_batch_size)

    def __len__(self) -> int:
        """Return the number of batches of each rank."""
        return math.ceil(self._num_windows() / (self.micro_batch_size * self.world_size))

    @property
    def num_tokens(self) -> int:
        """Labels that count, over all ranks and batches."""
        return min(self.stream.num_tokens - 1, self._num_windows() * self.block_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the batches, on the device."""
        size = self.micro_batch_size
        pin = self.device.type == "cuda"
        for batch in range(len(self)):
            first = (batch * self.world_size + self.rank) * size
            starts = (first + np.arange(size, dtype=np.int64)) * self.block_size
            # Windows past the end wrap around; their labels do not count.
            tokens = self.stream.windows(starts, self.block_size + 1)
            label_mask = starts[:, None] + np.arange(self.block_size) < self.num_tokens
            yield _to_device(
                _micro_batch(tokens, label_mask, self.document_boundaries, pin), self.device
            )


def _micro_batch(
    windows: NDArray[Any],
    label_mask: NDArray[np.bool_],
    document_boundaries: DocumentBoundaries | None,
    pin: bool,
    sources: NDArray[np.int64] | None = None,
) -> MicroBatch:
    """Make a micro-batch of windows [num_windows, block_size + 1].

    Args:
        windows: Token ids.
        label_mask: Which labels count, per window or per token.
        document_boundaries: How to keep the documents of a window apart.
        pin: Whether to allocate the tensors in pinned memory, so that copies are asynchronous.
        sources: Number of the source of each window.
    """

    def tensor(values: NDArray[Any]) -> torch.Tensor:
        # One copy, from the file's dtype to int64 in the memory that the device reads.
        result = torch.empty(values.shape, dtype=torch.int64, pin_memory=pin)
        result.numpy()[...] = values
        return result

    labels = tensor(windows[:, 1:])
    if not label_mask.all():
        labels.numpy()[~label_mask] = IGNORED
    positions, documents = (
        (None, None) if document_boundaries is None else document_boundaries.split(windows[:, :-1])
    )
    return MicroBatch(
        tensor(windows[:, :-1]),
        labels,
        None if positions is None else tensor(positions),
        None if documents is None else tensor(documents),
        None if sources is None else tensor(sources),
    )


def _to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    return MicroBatch._make(
        None if tensor is None else tensor.to(device, non_blocking=True) for tensor in micro
    )
