"""The arithmetic of a run: samples, batches, accumulation, steps, epochs. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from llm.config.duration import Duration
from llm.data.batch_schedule import BatchPhase, count_steps, parse_batch_schedule, plan_batch_phases
from llm.data.options import BatchOptions, device_batch_size
from llm.errors import ConfigError
from llm.runtime.logging import counted


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How many samples a run reads, and how a step's samples are divided among ranks.

    Attributes:
        num_windows: Samples of one epoch.
        micro_batch_size: Samples of one micro-batch on one device; fewer in a phase with a smaller
            global batch.
        world_size: Data-parallel ranks.
        global_batch_size: Samples of one optimizer step, in the first phase.
        total_samples: Samples of the whole run; the last step may be smaller than the others.
        later_phases: The phases after the first one, if the global batch changes.
    """

    num_windows: int
    micro_batch_size: int
    world_size: int
    global_batch_size: int
    total_samples: int
    later_phases: tuple[BatchPhase, ...] = ()

    @property
    def phases(self) -> tuple[BatchPhase, ...]:
        """All phases, in order; the run may end before the last ones."""
        first_phase = BatchPhase(
            first_step=0, first_sample=0, global_batch_size=self.global_batch_size
        )
        return (first_phase, *self.later_phases)

    def phase(self, step: float) -> BatchPhase:
        """Return the phase of a step, counted from 0."""
        return [phase for phase in self.phases if phase.first_step <= step][-1]

    def micro_batch_shape(self, step: int) -> tuple[int, int]:
        """Return the number of micro-batches of a step on each device, and their samples.

        A smaller batch has fewer micro-batches; below one per device, the micro-batches are
        smaller. The last micro-batch of a step may be empty on some devices.
        """
        global_batch_size = self.phase(step).global_batch_size
        micro_batch_size = self.micro_batch_size
        if self.later_phases:
            micro_batch_size = min(micro_batch_size, global_batch_size // self.world_size)
        return math.ceil(global_batch_size / (micro_batch_size * self.world_size)), micro_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step on each device, in the first phase."""
        return self.micro_batch_shape(0)[0]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return math.ceil(self.count_steps(self.total_samples))

    def count_steps(self, samples: float | Fraction) -> float:
        """Return the number of steps, possibly a fraction, that read `samples` samples."""
        return count_steps(self.phases, samples)

    def count_samples(self, num_steps: int) -> int:
        """Return the number of samples in the first `num_steps` steps of an endless run."""
        phase = self.phase(num_steps)
        return phase.first_sample + (num_steps - phase.first_step) * phase.global_batch_size

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.total_samples / self.num_windows

    def step_positions(self, step: int) -> tuple[int, int]:
        """Return the positions of one step as a range: the first, and the one after the last.

        Args:
            step: The step, counted from 0.
        """
        first_position, end_position = self.count_samples(step), self.count_samples(step + 1)
        return min(first_position, self.total_samples), min(end_position, self.total_samples)

    def rank_positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Return the positions that one rank trains in one step.

        A position counts the samples that the run trains; skipped samples have none. Position j of
        a step belongs to micro-batch m and rank r where
        j = (m * world_size + r) * micro_batch_size + k: which samples make a step depends
        neither on the ranks nor on the accumulation.

        Returns:
            int64 [accumulation, micro_batch_size], which `SkippedSamples.sample_indices` maps to
            samples; -1 follows the last sample of the step or of the run.
        """
        first_position, end_position = self.step_positions(step)
        num_micro_batches, micro_batch_size = self.micro_batch_shape(step)
        positions = first_position + np.arange(
            num_micro_batches * self.world_size * micro_batch_size, dtype=np.int64
        )
        positions[positions >= end_position] = -1
        return positions.reshape(-1, self.world_size, micro_batch_size)[:, rank]

    def count_duration_samples(self, duration: Duration, *, block_size: int) -> int | Fraction:
        """Return a duration in samples, tokens or epochs as samples, possibly a fraction."""
        if duration.unit == "tokens":
            return Fraction(int(duration.value), block_size)
        return int(duration.value) * (self.num_windows if duration.unit == "epochs" else 1)

    def count_duration_steps(self, duration: Duration, *, block_size: int) -> float:
        """Return a duration from the start of the run as a number of steps, possibly a fraction."""
        if duration.unit == "steps":
            return duration.value
        return self.count_steps(self.count_duration_samples(duration, block_size=block_size))

    def is_interval_end(self, num_steps: int, interval: Duration, *, block_size: int) -> bool:
        """Return whether an interval ends with the last of `num_steps` steps."""
        if interval.unit == "steps":
            return num_steps % interval.value == 0
        interval_samples = self.count_duration_samples(interval, block_size=block_size)
        first_position, end_position = self.step_positions(num_steps - 1)
        return end_position // interval_samples > first_position // interval_samples

    def format_batch_schedule(self, block_size: int) -> int | str:
        """Return the global batch size in the notation of the option: 256, or 256@0,512@2000000.

        A phase begins with a whole step.
        """
        if not self.later_phases:
            return self.global_batch_size
        return ",".join(
            f"{phase.global_batch_size}@{phase.first_sample * block_size}" for phase in self.phases
        )


_MAX_AUTO_MICRO_BATCH = 1024
"""Largest micro-batch that `auto` tries; larger ones are not faster."""


_MAX_STEP_SAMPLES = 2**24
"""Largest step in samples; all of its sample indices are in memory at once."""


def list_micro_batch_sizes(options: BatchOptions, *, world_size: int) -> list[int]:
    """Return the sizes that `--per_device_train_batch_size auto` chooses from, smallest first."""
    if options.global_batch_size is None:
        return [2**exponent for exponent in range(_MAX_AUTO_MICRO_BATCH.bit_length())]
    global_batch_sizes = [
        global_batch_size
        for global_batch_size, _ in parse_batch_schedule(options.global_batch_size)
    ]
    return _find_even_micro_batch_sizes(global_batch_sizes, world_size=world_size) or [1]


def _find_even_micro_batch_sizes(
    global_batch_sizes: Sequence[int], *, world_size: int
) -> list[int]:
    """Return the micro-batch sizes that divide every global batch evenly among the ranks."""
    if any(global_batch_size % world_size for global_batch_size in global_batch_sizes):
        return []
    samples_per_rank = [global_batch_size // world_size for global_batch_size in global_batch_sizes]
    candidate_sizes = range(1, 1 + min(_MAX_AUTO_MICRO_BATCH, max(samples_per_rank)))
    return [
        size
        for size in candidate_sizes
        if all(num_samples % min(size, num_samples) == 0 for num_samples in samples_per_rank)
    ]


def plan_batches(
    options: BatchOptions,
    *,
    num_windows: int,
    world_size: int,
    block_size: int,
    num_parameters: int | None = None,
    global_batch_size: int | str | None = None,
) -> BatchPlan:
    """Plan the batches of a run from its options.

    Args:
        options: Sizes of batches, and length of the run.
        num_windows: Samples of one epoch.
        world_size: Data-parallel ranks.
        block_size: Tokens of a sample.
        num_parameters: Parameters of the model, for a length in tokens per parameter.
        global_batch_size: Global batch size of the run that is resumed; replaces the option.

    Raises:
        ConfigError: The global batch is too large, cannot be divided evenly, or is more than the
            whole run.
    """
    micro_batch_size = device_batch_size(options)
    batch_schedule = global_batch_size or options.global_batch_size
    if batch_schedule is None:
        batch_schedule = micro_batch_size * world_size * options.gradient_accumulation_steps
    first_phase, *later_phases = plan_batch_phases(batch_schedule, block_size=block_size)
    phase_sizes = [phase.global_batch_size for phase in (first_phase, *later_phases)]
    _check_phase_sizes(phase_sizes, batch_schedule, micro_batch_size, world_size)
    plan = BatchPlan(
        num_windows=num_windows,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        global_batch_size=first_phase.global_batch_size,
        total_samples=0,
        later_phases=tuple(later_phases),
    )
    total_samples = _count_total_samples(options, plan, block_size, num_parameters)
    return replace(plan, total_samples=total_samples)


def _check_phase_sizes(
    phase_sizes: Sequence[int], batch_schedule: int | str, micro_batch_size: int, world_size: int
) -> None:
    """Refuse a phase that is too large, or that ranks and micro-batches cannot divide."""
    for phase_size in phase_sizes:
        if phase_size > _MAX_STEP_SAMPLES:
            raise ConfigError(
                f"A step of {phase_size:,} samples exceeds the limit of {_MAX_STEP_SAMPLES:,}; "
                "make --global_batch_size, --per_device_train_batch_size or "
                "--gradient_accumulation_steps smaller."
            )
        # A batch that grows may begin with smaller micro-batches.
        has_several_phases = len(phase_sizes) > 1
        max_rank_share = phase_size // world_size if has_several_phases else micro_batch_size
        sample_divisor = min(micro_batch_size, max_rank_share)
        if sample_divisor == 0 or phase_size % (sample_divisor * world_size):
            raise _indivisible_batch_error(
                batch_schedule, phase_size, phase_sizes, micro_batch_size, world_size
            )


def _indivisible_batch_error(
    batch_schedule: int | str,
    indivisible_size: int,
    phase_sizes: Sequence[int],
    micro_batch_size: int,
    world_size: int,
) -> ConfigError:
    """Return the error of a global batch with a phase that the ranks cannot divide evenly.

    The smaller micro-batch comes first, because another global batch changes the training.
    """
    step_divisor = micro_batch_size * world_size
    lower_multiple = indivisible_size // step_divisor * step_divisor
    upper_multiple = lower_multiple + step_divisor
    if len(phase_sizes) > 1:
        phase_clause = f" has a phase of {indivisible_size} samples, which"
        batch_advice = f"one, or a smaller multiple of {world_size}"
    else:
        phase_clause = ""
        multiples = [multiple for multiple in (lower_multiple, upper_multiple) if multiple]
        batch_advice = " or ".join(map(str, multiples))

    candidate_sizes = _find_even_micro_batch_sizes(phase_sizes, world_size=world_size)
    smaller_sizes = [size for size in candidate_sizes if size < micro_batch_size]
    size_advice = ""
    if smaller_sizes:
        size_advice = (
            f"--per_device_train_batch_size {smaller_sizes[-1]}, which keeps the batch, or "
        )
    return ConfigError(
        f"--global_batch_size {batch_schedule}{phase_clause} is not a multiple of {step_divisor} "
        f"(--per_device_train_batch_size {micro_batch_size} x {counted(world_size, 'rank')}); take "
        f"{size_advice}{batch_advice}."
    )


def _count_total_samples(
    options: BatchOptions, plan: BatchPlan, block_size: int, num_parameters: int | None
) -> int:
    """Return the samples of the run; a budget in tokens ends with the sample that reaches it."""
    duration = options.max_duration
    if duration.unit == "steps":
        return plan.count_samples(int(duration.value))
    if duration.unit == "tokens per parameter":
        assert num_parameters is not None
        duration = Duration(f"{math.ceil(duration.value * num_parameters)} tokens")
    step_tokens = plan.global_batch_size * block_size
    if duration.unit == "tokens" and duration.value < step_tokens:
        raise ConfigError(
            f"--max_duration {options.max_duration} is a budget of {duration.value:,} tokens, less "
            f"than the {step_tokens:,} of one step; raise it, or make the global batch smaller."
        )
    return math.ceil(plan.count_duration_samples(duration, block_size=block_size))
