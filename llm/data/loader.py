"""From windows to micro-batches on the right device, read ahead by one background thread."""

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llm.data.batch_plan import BatchPlan
from llm.data.corpus import Samples, TokenStream
from llm.data.documents import DocumentEnds
from llm.data.micro_batch import MicroBatch
from llm.errors import DataError

IGNORED = -100  # the label that torch's cross-entropy leaves out
_STEPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank needs for one optimizer step.

    Attributes:
        micro_batches: On the device. `labels[:, t]` is the token that follows
            `input_ids[:, t]`; -100 is ignored.
        num_samples: Of this step, over all ranks.
        num_tokens: Labels that count in this step, over all ranks.
        samples: This rank's global sample numbers, int64 [at most micro-batches * their size].
    """

    micro_batches: list[MicroBatch]
    num_samples: int
    num_tokens: int
    samples: NDArray[np.int64]


class TrainLoader:
    """The micro-batches of one rank in every training step.

    Every rank takes part in every micro-batch of every step and shapes never change: where the
    last step is smaller, the missing samples are windows whose labels are all ignored.

    Args:
        samples: The tokens of every sample.
        plan: Which samples make a step, and how they are divided among ranks.
        rank: This data-parallel rank.
        device: Where the micro-batches shall lie.
        ends: How to keep the documents of a window apart; None lets windows run over them.
    """

    def __init__(
        self,
        *,
        samples: Samples,
        plan: BatchPlan,
        rank: int,
        device: torch.device,
        ends: DocumentEnds | None = None,
    ) -> None:
        self._samples = samples
        self._ends = ends
        self.plan = plan
        self._rank = rank
        self._device = device

    def steps(self, start: int) -> Generator[StepBatch, None, None]:
        """The steps from `start` to the end of the run; what lies before is not read.

        A thread reads ahead. It ends with the iterator, also when that is closed early, and its
        errors are raised here.
        """
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        pending: deque[Future[StepBatch]] = deque()
        try:
            todo = iter(range(start, self.plan.total_steps))
            for step in itertools.islice(todo, _STEPS_AHEAD):
                pending.append(pool.submit(self._read, step))
            while pending:
                # Taken before the thread is given more to do: it would compete for the
                # interpreter with the step that waits.
                batch = pending.popleft().result()
                for step in itertools.islice(todo, 1):
                    pending.append(pool.submit(self._read, step))
                # Copied here, not by the thread, so that the copies are queued on the stream that
                # will use them.
                yield replace(
                    batch,
                    micro_batches=[_moved(micro, self._device) for micro in batch.micro_batches],
                )
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> StepBatch:
        first, stop = self.plan.step_samples(step)
        samples = self.plan.rank_samples(step, self._rank)
        present = samples >= 0
        block_size = self._samples.block_size
        # Missing samples read the step's first window, whose labels are then ignored.
        windows = self._samples.read(np.where(present, samples, first).reshape(-1))
        windows = windows.reshape(*samples.shape, block_size + 1)
        pin = self._device.type == "cuda"
        micro_batches = []
        for window, counts in zip(windows, present, strict=True):
            micro_batches.append(_micro_batch(window, counts, self._ends, pin))
        return StepBatch(
            micro_batches=micro_batches,
            num_samples=stop - first,
            num_tokens=(stop - first) * block_size,
            samples=samples[present],
        )


class EvalLoader:
    """One rank's batches of an evaluation, which predicts each token of a stream but the first.

    Windows lie side by side and the stream is no ring here. The last window is filled up with
    ignored labels, and every rank yields the same number of batches, some of them ignored as a
    whole. Iterating again gives the same batches.

    Args:
        stream: The tokens.
        block_size: Tokens a window predicts.
        micro_batch_size: Windows in a batch.
        rank: This data-parallel rank.
        world_size: Data-parallel ranks.
        device: Where the batches shall lie.
        max_batches: Batches at most, over all ranks; None takes the whole stream.
        ends: How to keep the documents of a window apart; None lets windows run over them.
        name: Of the stream, for messages.

    Raises:
        DataError: The stream has fewer than two tokens.
    """

    def __init__(
        self,
        *,
        stream: TokenStream,
        block_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        max_batches: int | None,
        ends: DocumentEnds | None = None,
        name: str = "The validation text",
    ) -> None:
        if stream.num_tokens < 2:
            raise DataError(
                f"{name} has {stream.num_tokens} token(s), and predicting one takes "
                "two; give more with --validation_file, --validation_split_percentage or --split."
            )
        self._stream = stream
        self._block_size = block_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._ends = ends
        windows = -(-(stream.num_tokens - 1) // block_size)
        if max_batches is not None:
            windows = min(windows, max_batches * micro_batch_size)
        self._num_batches = -(-windows // (micro_batch_size * world_size))
        self._num_labels = min(stream.num_tokens - 1, windows * block_size)

    def __len__(self) -> int:
        """Batches that each rank yields."""
        return self._num_batches

    @property
    def num_tokens(self) -> int:
        """Labels that count, over all ranks and batches."""
        return self._num_labels

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yields the batches, on the device."""
        size = self._micro_batch_size
        pin = self._device.type == "cuda"
        for batch in range(self._num_batches):
            first = (batch * self._world_size + self._rank) * size
            starts = (first + np.arange(size, dtype=np.int64)) * self._block_size
            # Windows past the end wrap around; their labels do not count.
            tokens = self._stream.windows(starts, self._block_size + 1)
            predicts = starts[:, None] + np.arange(self._block_size) < self._num_labels
            yield _moved(_micro_batch(tokens, predicts, self._ends, pin), self._device)


def _micro_batch(
    windows: NDArray[Any], counts: NDArray[np.bool_], ends: DocumentEnds | None, pin: bool
) -> MicroBatch:
    """Inputs and labels of windows [num_windows, block_size + 1]; `counts` picks the labels."""
    labels = _tensor(windows[:, 1:], pin)
    if not counts.all():
        labels.numpy()[~counts] = IGNORED
    positions, documents = (None, None) if ends is None else ends.split(windows[:, :-1])
    return MicroBatch(
        _tensor(windows[:, :-1], pin),
        labels,
        None if positions is None else _tensor(positions, pin),
        None if documents is None else _tensor(documents, pin),
    )


def _tensor(values: NDArray[Any], pin: bool) -> torch.Tensor:
    """Copied once, from the file's dtype to where the device fetches it."""
    tensor = torch.empty(values.shape, dtype=torch.int64, pin_memory=pin)
    tensor.numpy()[...] = values
    return tensor


def _moved(micro: MicroBatch, device: torch.device) -> MicroBatch:
    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    return MicroBatch(
        micro.input_ids.to(device, non_blocking=True),
        micro.labels.to(device, non_blocking=True),
        moved(micro.positions),
        moved(micro.documents),
    )
