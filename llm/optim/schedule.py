"""The learning rate as a pure function of the step: a linear warm-up, then one of several shapes.

Schedules of a name that `transformers.get_scheduler` has agree with its schedules;
`linear` and `cosine` can also end at a minimum and stay there.
"""

import math
from collections.abc import Callable
from functools import partial

from llm.errors import ConfigError
from llm.optim.options import OptimizerOptions, scheduler_kwargs

Schedule = Callable[[float], float]
"""Number of optimizer steps done -> learning rate of the next step."""


def make_schedule(
    options: OptimizerOptions, *, total_steps: int, global_batch_size: int
) -> Schedule:
    """Make the schedule that `lr_scheduler_type` names.

    Args:
        options: Name and phases of the schedule, peak and minimum of the learning rate.
        total_steps: Optimizer steps of the run.
        global_batch_size: Samples of a step, to convert a warm-up in samples to steps.

    Raises:
        ConfigError: Warm-up and the other phases do not fit into `total_steps`.
    """
    kind, constant_steps = options.lr_scheduler_type, options.num_constant_steps
    warmup_steps: float = options.num_warmup_steps
    if options.num_warmup_samples is not None:
        warmup_steps = options.num_warmup_samples / global_batch_size
    start, end = warmup_steps, total_steps - constant_steps
    if kind == "warmup_stable_decay":
        decay = options.num_decay_steps or max(1, total_steps // 10)
        if warmup_steps + decay > total_steps:
            raise ConfigError(
                f"Warm-up ({warmup_steps:g} steps) and --num_decay_steps ({decay}) are longer "
                f"than the run of {total_steps} steps."
            )
        start, end = total_steps - decay, total_steps
    elif constant_steps and warmup_steps + constant_steps >= total_steps:
        raise ConfigError(
            f"Warm-up ({warmup_steps:g} steps) and --num_constant_steps ({constant_steps}) "
            f"leave nothing of the {total_steps} steps to decay in."
        )
    shape = partial(_SHAPES[kind], **scheduler_kwargs(options))
    peak = options.learning_rate
    # transformers ends its polynomial decay (of power 1) at 1e-7 rather than at 0.
    floor = min(options.min_learning_rate or (1e-7 if kind == "polynomial" else 0.0), peak)

    def schedule(step: float) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        return floor + (peak - floor) * shape(step, start=start, end=end)

    return schedule


def constant(step: float, *, start: float, end: float) -> float:
    """Stay at 1."""
    return 1.0


def linear(step: float, *, start: float, end: float) -> float:
    """Fall from 1 at `start` to 0 at `end` on a straight line."""
    return max(0.0, (end - step) / max(1.0, end - start))


def polynomial(step: float, *, start: float, end: float, power: float = 1.0) -> float:
    """Fall from 1 at `start` to 0 at `end` as a power of the steps that are left."""
    return math.pow(linear(step, start=start, end=end), power)


def cosine(step: float, *, start: float, end: float, num_cycles: float = 0.5) -> float:
    """Fall from 1 at `start` to 0 at `end` on half a cosine (Loshchilov & Hutter 2017)."""
    progress = min(1.0, (step - start) / max(1.0, end - start))
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def cosine_with_restarts(step: float, *, start: float, end: float, num_cycles: float = 1) -> float:
    """Fall from 1 to 0 on half a cosine `num_cycles` times (Loshchilov & Hutter 2017)."""
    progress = (step - start) / max(1.0, end - start)
    return cosine(num_cycles * progress % 1.0, start=0.0, end=1.0) if progress < 1.0 else 0.0


def stable_then_decay(step: float, *, start: float, end: float) -> float:
    """Stay at 1 until `start`, then fall to 0 at `end` on a straight line.

    The decay phase of warmup-stable-decay (Hu et al. 2024; Haegele et al. 2024).
    """
    return 1.0 if step < start else linear(step, start=start, end=end)


_SHAPES: dict[str, Callable[..., float]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant,
    "warmup_stable_decay": stable_then_decay,
}
"""By `lr_scheduler_type`, the course between the peak (1) and the minimum (0) after the warm-up."""


def is_constant(kind: str | None) -> bool:
    """Return whether the learning rate after the warm-up is the same for any length of the run."""
    return kind is not None and _SHAPES[kind] is constant
