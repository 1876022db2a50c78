"""Micro-batches of samples on the device, read ahead by one background thread."""

import itertools
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llm.data.batch_plan import BatchPlan
from llm.data.corpus import Samples, TokenStream
from llm.data.order import DocumentBoundaries
from llm.data.skipped_samples import NO_SKIPPED_SAMPLES, SkippedSamples
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
        batch_plan: Which samples make a step, and how they are divided among ranks.
        rank: This data-parallel rank.
        device: Device of the micro-batches.
        document_boundaries: How to keep the documents of a window apart; None ignores them.
        with_sources: Whether micro-batches have the sources of their samples.
        skipped: The samples to leave out; the batch plan's positions are mapped to the others.
    """

    samples: Samples
    batch_plan: BatchPlan
    rank: int
    device: torch.device
    document_boundaries: DocumentBoundaries | None = None
    with_sources: bool = False
    skipped: SkippedSamples = NO_SKIPPED_SAMPLES

    def sample_range(self, first_step: int, end_step: int) -> tuple[int, int]:
        """Return the first sample of consecutive steps, and the sample after the last one.

        Args:
            first_step: The first step, counted from 0.
            end_step: The step after the last one.
        """
        first_position, _ = self.batch_plan.step_positions(first_step)
        _, end_position = self.batch_plan.step_positions(end_step - 1)
        return self.skipped.sample_range((first_position, end_position))

    def read_steps(self, first_step: int) -> Generator[StepBatch, None, None]:
        """Yield the steps from `first_step` to the end of the run; no earlier step is read.

        A thread reads ahead. It ends with the iterator, even if you close it early, and its errors
        are raised here.
        """
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        pending_batches: deque[Future[StepBatch]] = deque()
        try:
            remaining_steps = iter(range(first_step, self.batch_plan.total_steps))
            for step in itertools.islice(remaining_steps, _PREFETCH_STEPS):
                pending_batches.append(pool.submit(self._read_step, step))
            while pending_batches:
                # Wait before submitting the next step: its thread and this one would compete for
                # the global interpreter lock.
                step_batch = pending_batches.popleft().result()
                if (next_step := next(remaining_steps, None)) is not None:
                    pending_batches.append(pool.submit(self._read_step, next_step))
                # Copied here and not in the thread, so that the CUDA stream that uses the copies
                # also queues them.
                micro_batches = [
                    _to_device(micro_batch, self.device) for micro_batch in step_batch.micro_batches
                ]
                yield replace(step_batch, micro_batches=micro_batches)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read_step(self, step: int) -> StepBatch:
        """Return the input of a step, counted from 0, in the memory of the host."""
        first_position, end_position = self.batch_plan.step_positions(step)
        # [accumulation, micro_batch_size]
        positions = self.batch_plan.rank_positions(step, self.rank)
        has_sample = positions >= 0
        # Missing samples read the step's first window, and their labels are ignored.
        samples = self.skipped.sample_indices(np.where(has_sample, positions, first_position))
        num_samples = end_position - first_position
        return StepBatch(
            micro_batches=self._read_micro_batches(samples, has_sample),
            num_samples=num_samples,
            num_tokens=num_samples * self.samples.block_size,
            samples=samples[has_sample],
        )

    def _read_micro_batches(
        self, samples: NDArray[np.int64], has_sample: NDArray[np.bool_]
    ) -> list[MicroBatch]:
        """Return the micro-batches of a step, in the memory of the host.

        Args:
            samples: Sample indices [accumulation, micro_batch_size].
            has_sample: Which samples belong to the step, of the same shape; labels of the others
                are ignored.
        """
        windows = self.samples.read(samples.reshape(-1))
        sources_by_micro_batch: Sequence[NDArray[np.int64] | None] = [None] * len(samples)
        if self.with_sources:
            sample_sources, _ = self.samples.locate(samples.reshape(-1))
            sources_by_micro_batch = [*sample_sources.reshape(samples.shape)]
        # [accumulation, micro_batch_size, block_size + 1]
        windows = windows.reshape(*samples.shape, self.samples.block_size + 1)
        pin_memory = self.device.type == "cuda"
        return [
            _make_micro_batch(
                windows[micro_batch_index],
                has_sample[micro_batch_index],
                self.document_boundaries,
                pin_memory=pin_memory,
                sources=sources_by_micro_batch[micro_batch_index],
            )
            for micro_batch_index in range(len(samples))
        ]


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
        num_windows = math.ceil((self.stream.num_tokens - 1) / self.block_size)
        if self.max_batches is None:
            return num_windows
        return min(num_windows, self.max_batches * self.micro_batch_size)

    def __len__(self) -> int:
        """Return the number of batches of each rank."""
        return math.ceil(self._num_windows() / (self.micro_batch_size * self.world_size))

    @property
    def num_tokens(self) -> int:
        """Labels that count, over all ranks and batches."""
        return min(self.stream.num_tokens - 1, self._num_windows() * self.block_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the batches, on the device."""
        micro_batch_size = self.micro_batch_size
        pin_memory = self.device.type == "cuda"
        for batch_index in range(len(self)):
            first_window = (batch_index * self.world_size + self.rank) * micro_batch_size
            starts = (first_window + np.arange(micro_batch_size, dtype=np.int64)) * self.block_size
            # Windows past the end wrap around; their labels do not count.
            windows = self.stream.read_windows(starts, self.block_size + 1)
            label_mask = starts[:, None] + np.arange(self.block_size) < self.num_tokens
            micro_batch = _make_micro_batch(
                windows, label_mask, self.document_boundaries, pin_memory=pin_memory
            )
            yield _to_device(micro_batch, self.device)


def _copy_to_int64_tensor(values: NDArray[Any], *, pin_memory: bool) -> torch.Tensor:
    """Return values as int64, converted in one copy into the memory that the device reads."""
    tensor = torch.empty(values.shape, dtype=torch.int64, pin_memory=pin_memory)
    tensor.numpy()[...] = values
    return tensor


def _make_micro_batch(
    windows: NDArray[Any],
    label_mask: NDArray[np.bool_],
    document_boundaries: DocumentBoundaries | None,
    *,
    pin_memory: bool,
    sources: NDArray[np.int64] | None = None,
) -> MicroBatch:
    """Return the micro-batch of windows, in the memory of the host.

    Args:
        windows: Token ids [num_windows, block_size + 1].
        label_mask: Which labels count, [num_windows] or [num_windows, block_size].
        document_boundaries: How to keep the documents of a window apart; None ignores them.
        pin_memory: Whether the tensors are in pinned memory, so that copies are asynchronous.
        sources: Number of the source of each window [num_windows]; None leaves them out.
    """
    copy_to_tensor = partial(_copy_to_int64_tensor, pin_memory=pin_memory)
    labels = copy_to_tensor(windows[:, 1:])
    if not label_mask.all():
        labels.numpy()[~label_mask] = IGNORED
    positions = documents = None
    if document_boundaries is not None:
        positions, documents = document_boundaries.split(windows[:, :-1])
    return MicroBatch(
        input_ids=copy_to_tensor(windows[:, :-1]),
        labels=labels,
        positions=None if positions is None else copy_to_tensor(positions),
        documents=None if documents is None else copy_to_tensor(documents),
        sources=None if sources is None else copy_to_tensor(sources),
    )


def _to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    return MicroBatch._make(
        None if tensor is None else tensor.to(device, non_blocking=True) for tensor in micro_batch
    )
