"""The global batch size, which may grow with the tokens: its notation and its phases."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from llm.config.duration import Tokens
from llm.errors import ConfigError


class BatchPhase(NamedTuple):
    """Consecutive steps of one global batch size.

    Attributes:
        first_step: First step, counted from 0.
        first_sample: The first sample of that step.
        global_batch_size: Samples of each step.
    """

    first_step: int
    first_sample: int
    global_batch_size: int


def parse_batch_schedule(schedule: int | str) -> list[tuple[int, int]]:
    """Return the global batch sizes of a run, each with its first token.

    Args:
        schedule: The value of `global_batch_size`: 256, or 256@0,512@2B.

    Raises:
        ConfigError: It is neither a number nor a schedule, or its phases are not in order.
    """
    if isinstance(schedule, int):
        return [(schedule, 0)]
    phases = []
    try:
        for phase_text in schedule.split(","):
            batch_size, _, first_token = phase_text.partition("@")
            phases.append((int(Tokens(batch_size)), int(Tokens(first_token))))
    except ValueError as error:
        raise ConfigError(
            f"--global_batch_size {schedule} is neither a number of samples nor a schedule "
            "such as 256@0,512@2B, which is 256 samples at first and 512 from token 2 billion "
            "on."
        ) from error
    first_tokens = [token for _, token in phases]
    if first_tokens[0] != 0 or first_tokens != sorted(set(first_tokens)):
        raise ConfigError(
            f"--global_batch_size {schedule} does not begin at token 0, or its phases are not in "
            "order; write it as 256@0,512@2B."
        )
    if not all(size for size, _ in phases):
        raise ConfigError(
            f"--global_batch_size {schedule} has a phase of 0 samples; give one or more."
        )
    return phases


def plan_batch_phases(schedule: int | str, *, block_size: int) -> list[BatchPhase]:
    """Return the phases of a global batch size.

    A phase ends with the step that reaches the first token of the next phase. A phase without a
    step is left out.

    Args:
        schedule: A number of samples, or a schedule such as 256@0,512@2B.
        block_size: Tokens of a sample.
    """
    phases: list[BatchPhase] = []
    for global_batch_size, first_token in parse_batch_schedule(schedule):
        first_step, first_sample = 0, 0
        if phases:
            previous_phase = phases[-1]
            phase_samples = Fraction(first_token, block_size) - previous_phase.first_sample
            num_steps = max(0, math.ceil(phase_samples / previous_phase.global_batch_size))
            first_step = previous_phase.first_step + num_steps
            first_sample = (
                previous_phase.first_sample + num_steps * previous_phase.global_batch_size
            )
        phases = [phase for phase in phases if phase.first_step < first_step]
        phases.append(BatchPhase(first_step, first_sample, global_batch_size))
    return phases


def count_steps(phases: Sequence[BatchPhase], samples: float | Fraction) -> float:
    """Return the number of steps, possibly a fraction, that read so many samples."""
    phase = [phases[0], *(p for p in phases if p.first_sample <= samples)][-1]
    return phase.first_step + float((samples - phase.first_sample) / phase.global_batch_size)
