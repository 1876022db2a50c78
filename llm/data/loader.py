"""From windows to micro-batches on the right device, read ahead by one background thread."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llm.data.batch_plan import BatchPlan
from llm.data.corpus import TokenStream
from llm.data.sampler import WindowSampler
from llm.errors import DataError

IGNORED = -100  # the label that torch's cross-entropy leaves out
_STEPS_AHEAD = 2

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank needs for one optimizer step.

    Attributes:
        micro_batches: (input_ids, labels), each int64 [micro_batch_size, block_size] on the
            device. `labels[:, t]` is the token that follows `input_ids[:, t]`; -100 is ignored.
        num_samples: Of this step, over all ranks.
        num_tokens: Labels that count in this step, over all ranks.
        samples: This rank's global sample numbers, int64 [at most micro-batches * their size].
    """

    micro_batches: list[MicroBatch]
    num_samples: int
    num_tokens: int
    samples: NDArray[np.int64]


class TrainLoader:
    """One rank's share of every training step.

    Every rank takes part in every micro-batch of every step and shapes never change: where the
    last step is smaller, the missing samples are windows whose labels are all ignored.

    Args:
        stream: The tokens.
        sampler: Where samples lie in it.
        plan: Which samples make a step, and how they are shared out.
        rank: This data-parallel rank.
        device: Where the micro-batches shall lie.
    """

    def __init__(
        self,
        *,
        stream: TokenStream,
        sampler: WindowSampler,
        plan: BatchPlan,
        rank: int,
        device: torch.device,
    ) -> None:
        self._stream = stream
        self._sampler = sampler
        self._plan = plan
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
            for step in range(start, self._plan.total_steps):
                pending.append(pool.submit(self._read, step))
                if len(pending) > _STEPS_AHEAD:
                    yield self._to_device(pending.popleft().result())
            while pending:
                yield self._to_device(pending.popleft().result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> StepBatch:
        first, stop = self._plan.step_samples(step)
        samples = self._plan.rank_samples(step, self._rank)
        present = samples >= 0
        block_size = self._sampler.block_size
        # Missing samples read the step's first window, whose labels are then ignored.
        starts = self._sampler.starts(np.where(present, samples, first))
        windows = self._stream.windows(starts.reshape(-1), block_size + 1).astype(np.int64)
        windows = windows.reshape(*samples.shape, block_size + 1)
        pin = self._device.type == "cuda"
        micro_batches = []
        for window, counts in zip(windows, present, strict=True):
            labels = np.where(counts[:, None], window[:, 1:], IGNORED)
            micro_batches.append((_tensor(window[:, :-1], pin), _tensor(labels, pin)))
        return StepBatch(
            micro_batches=micro_batches,
            num_samples=stop - first,
            num_tokens=(stop - first) * block_size,
            samples=samples[present],
        )

    def _to_device(self, batch: StepBatch) -> StepBatch:
        # Copied by the consumer, not by the thread, so that the copies are queued on the stream
        # that will use them.
        return StepBatch(
            micro_batches=[_moved(pair, self._device) for pair in batch.micro_batches],
            num_samples=batch.num_samples,
            num_tokens=batch.num_tokens,
            samples=batch.samples,
        )


class EvalLoader:
    """One rank's share of a pass over a stream that predicts each of its tokens but the first once.

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
    ) -> None:
        if stream.num_tokens < 2:
            raise DataError(
                f"The validation text has {stream.num_tokens} token(s), and predicting one takes "
                "two; give more with --validation_file or --validation_split_percentage."
            )
        self._stream = stream
        self._block_size = block_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._device = device
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
        """Yields (input_ids, labels), each int64 [micro_batch_size, block_size] on the device."""
        size = self._micro_batch_size
        pin = self._device.type == "cuda"
        for batch in range(self._num_batches):
            first = (batch * self._world_size + self._rank) * size
            starts = (first + np.arange(size, dtype=np.int64)) * self._block_size
            # Windows past the end wrap around; their labels do not count.
            tokens = self._stream.windows(starts, self._block_size + 1).astype(np.int64)
            predicts = starts[:, None] + np.arange(self._block_size) < self._num_labels
            labels = np.where(predicts, tokens[:, 1:], IGNORED)
            yield _moved((_tensor(tokens[:, :-1], pin), _tensor(labels, pin)), self._device)


def _tensor(values: NDArray[np.int64], pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if pin else tensor


def _moved(pair: MicroBatch, device: torch.device) -> MicroBatch:
    inputs, labels = pair
    return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
