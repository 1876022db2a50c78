"""The learning rate as a pure function of the step.

The shapes agree with those of `transformers.get_scheduler` where it has the name;
`linear` and `cosine` can also end at a minimum and stay there.
"""

import math
from collections.abc import Callable
from functools import partial

from llm.errors import ConfigError

Schedule = Callable[[float], float]
"""Optimizer steps done -> learning rate of the next one."""


def make_schedule(
    kind: str,
    *,
    learning_rate: float,
    min_learning_rate: float,
    total_steps: int,
    warmup_steps: float,
    constant_steps: int,
    decay_steps: int | None,
) -> Schedule:
    """Choose a schedule by the name that `lr_scheduler_type` has.

    Args:
        kind: Name of the schedule.
        learning_rate: Peak.
        min_learning_rate: Where the decay ends.
        total_steps: Optimizer steps of the run.
        warmup_steps: Steps of the rise from 0; may be a fraction when given in samples.
        constant_steps: Last steps at the minimum (linear and cosine).
        decay_steps: Last steps that decay (warmup_stable_decay); None is a tenth of all.

    Raises:
        ConfigError: Warm-up and the other phases do not fit into `total_steps`.
    """
    end = total_steps - constant_steps
    if kind == "warmup_stable_decay":
        decay = max(1, total_steps // 10) if decay_steps is None else decay_steps
        if warmup_steps + decay > total_steps:
            raise ConfigError(
                f"Warm-up ({warmup_steps:g} steps) and --num_decay_steps ({decay}) are longer "
                f"than the run of {total_steps} steps."
            )
        body: Schedule = partial(stable_then_decay, start=total_steps - decay, end=total_steps)
    else:
        if constant_steps and warmup_steps + constant_steps >= total_steps:
            raise ConfigError(
                f"Warm-up ({warmup_steps:g} steps) and --num_constant_steps ({constant_steps}) "
                f"leave nothing of the {total_steps} steps to decay in."
            )
        bodies: dict[str, Schedule] = {
            "linear": partial(linear, start=warmup_steps, end=end),
            "cosine": partial(cosine, start=warmup_steps, end=end),
            "cosine_with_restarts": partial(cosine, start=warmup_steps, end=end),
            "polynomial": partial(linear, start=warmup_steps, end=end),
            "constant": constant,
            "constant_with_warmup": constant,
        }
        body = bodies[kind]
    # transformers ends its polynomial decay (of power 1) at 1e-7 rather than at 0.
    floor = 1e-7 if kind == "polynomial" and not min_learning_rate else min_learning_rate
    floor = min(floor, learning_rate)
    return partial(
        rate, body=body, learning_rate=learning_rate, floor=floor, warmup_steps=warmup_steps
    )


def rate(
    step: float, *, body: Schedule, learning_rate: float, floor: float, warmup_steps: float
) -> float:
    """Rise linearly from 0 over `warmup_steps`, then follow `body` between peak and floor."""
    if step < warmup_steps:
        return learning_rate * step / warmup_steps
    return floor + (learning_rate - floor) * body(step)


def constant(step: float) -> float:
    """Stay at 1."""
    return 1.0


def linear(step: float, *, start: float, end: float) -> float:
    """Fall from 1 at `start` to 0 at `end` on a straight line."""
    return max(0.0, (end - step) / max(1.0, end - start))


def cosine(step: float, *, start: float, end: float) -> float:
    """Fall from 1 at `start` to 0 at `end` on half a cosine (Loshchilov & Hutter 2017)."""
    progress = min(1.0, (step - start) / max(1.0, end - start))
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def stable_then_decay(step: float, *, start: float, end: float) -> float:
    """Stay at 1 until `start`, then fall to 0 at `end` on a straight line.

    The decay phase of warmup-stable-decay (Hu et al. 2024; Haegele et al. 2024).
    """
    return 1.0 if step < start else linear(step, start=start, end=end)
