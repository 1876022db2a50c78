"""The arithmetic of a run: samples, batches, accumulation, steps, epochs. Pure."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm.data.options import BatchOptions, device_batch_size
from llm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How many samples a run reads, and how a step's samples are divided among ranks.

    Attributes:
        num_windows: Samples of one epoch.
        micro_batch_size: Samples of one micro-batch on one device.
        world_size: Data-parallel ranks.
        global_batch_size: Samples of one optimizer step.
        total_samples: Samples of the whole run; the last step may have fewer than the others.
    """

    num_windows: int
    micro_batch_size: int
    world_size: int
    global_batch_size: int
    total_samples: int

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step on each device; the last may be empty on some."""
        return math.ceil(self.global_batch_size / (self.micro_batch_size * self.world_size))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return math.ceil(self.total_samples / self.global_batch_size)

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.total_samples / self.num_windows

    def step_samples(self, step: int) -> tuple[int, int]:
        """Return the samples of one step, counted from 0, as a range [first, stop)."""
        first = min(step * self.global_batch_size, self.total_samples)
        return first, min(first + self.global_batch_size, self.total_samples)

    def rank_samples(self, step: int, rank: int) -> NDArray[np.int64]:
        """Return the samples of one rank in one step.

        Sample j of a step belongs to micro-batch m and rank r where
        j = (m * world_size + r) * micro_batch_size + k: which samples make a step depends
        neither on the ranks nor on the accumulation.

        Returns:
            Global sample numbers, int64 [accumulation, micro_batch_size]; -1 where the samples
            of the step or of the run are used up.
        """
        first, stop = self.step_samples(step)
        places = self.accumulation * self.world_size * self.micro_batch_size
        samples = first + np.arange(places, dtype=np.int64)
        samples[samples >= stop] = -1
        return samples.reshape(-1, self.world_size, self.micro_batch_size)[:, rank]

    def ends_epoch(self, num_steps: int) -> bool:
        """Return whether the last of `num_steps` steps uses up the samples of an epoch."""
        before, after = self.step_samples(num_steps - 1)
        return after // self.num_windows > before // self.num_windows


_LARGEST_AUTO = 1024
"""The most samples of a micro-batch that `auto` tries; larger ones are no faster."""


def micro_batch_sizes(options: BatchOptions, *, world_size: int) -> list[int]:
    """Return the sizes that `--per_device_train_batch_size auto` chooses from, the smallest first.

    Args:
        options: Sizes of batches.
        world_size: Data-parallel ranks.
    """
    batch = options.global_batch_size
    if not isinstance(batch, int):
        return [2**n for n in range(_LARGEST_AUTO.bit_length())]
    most = min(_LARGEST_AUTO, max(1, batch // world_size))
    return [size for size in range(1, most + 1) if batch % (size * world_size) == 0] or [1]


def plan_batches(
    options: BatchOptions,
    *,
    num_windows: int,
    world_size: int,
    global_batch_size: int | None = None,
) -> BatchPlan:
    """Return the plan of a run; `max_train_*` take precedence over epochs.

    Args:
        options: Sizes of batches, and length of the run.
        num_windows: Samples of one epoch.
        world_size: Data-parallel ranks.
        global_batch_size: Global batch size of the run that is resumed; replaces the option.

    Raises:
        ConfigError: The global batch cannot be divided evenly.
    """
    micro_batch_size = device_batch_size(options)
    together = micro_batch_size * world_size
    batch = global_batch_size or options.global_batch_size
    if batch is None:
        batch = together * options.gradient_accumulation_steps
    elif batch % together:
        raise ConfigError(
            f"--global_batch_size {batch} is no multiple of --per_device_train_batch_size "
            f"{micro_batch_size} times {world_size} ranks = {together}; change one of them."
        )
    if options.max_train_steps is not None:
        total_samples = options.max_train_steps * batch
    elif options.max_train_samples is not None:
        total_samples = options.max_train_samples
    else:
        total_samples = options.num_train_epochs * num_windows
    return BatchPlan(
        num_windows=num_windows,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        global_batch_size=batch,
        total_samples=total_samples,
    )
