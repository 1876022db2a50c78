"""The learning rate as a pure function of the step: a linear warm-up, then one of several shapes.

Schedules with a name from `transformers.get_scheduler` agree with its schedules; `linear` and
`cosine` can also end at a minimum and stay there.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from llm.errors import ConfigError
from llm.optim.options import OptimizerOptions, parse_scheduler_kwargs
from llm.runtime.logging import SAME_ON_ALL_RANKS

Schedule = Callable[[float], float]
"""Number of optimizer steps done -> learning rate of the next step."""

logger = logging.getLogger("llm")


class Shape(Protocol):
    """The course of the learning rate between its peak (1) and its minimum (0)."""

    def __call__(self, step: float, *, start: float, end: float) -> float:
        """Return the fraction of the peak above the minimum, for a decay from `start` to `end`."""


def make_schedule(
    options: OptimizerOptions,
    *,
    total_steps: int,
    warmup_steps: float = 0,
    decay_steps: float | None = None,
    cooldown_from: int | None = None,
) -> Schedule:
    """Create the schedule of `lr_scheduler_type`.

    Args:
        options: Name and phases of the schedule, peak and minimum of the learning rate.
        total_steps: Optimizer steps of the run.
        warmup_steps: Steps of the warm-up.
        decay_steps: Steps of the decay of `warmup_stable_decay`; by default a tenth of all steps.
        cooldown_from: Steps done when the rate of a branch begins to fall, instead of the decay of
            `lr_scheduler_type`; None without a cooldown.

    Raises:
        ConfigError: Warm-up and the other phases do not fit into `total_steps`.
    """
    shape_name, decay_start, decay_end = _resolve_decay(
        options,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        cooldown_from=cooldown_from,
    )
    if warmup_steps >= total_steps:
        logger.warning(
            f"The warm-up of {warmup_steps:g} steps is not shorter than the run of {total_steps} "
            "steps: the learning rate never reaches its peak.",
            extra=SAME_ON_ALL_RANKS,
        )
    shape = _make_shape(options, shape_name)
    peak = options.learning_rate
    # transformers ends its polynomial decay (of power 1) at 1e-7 rather than at 0.
    floor = min(options.min_learning_rate or (1e-7 if shape_name == "polynomial" else 0.0), peak)

    def schedule(step: float) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        return floor + (peak - floor) * shape(step, start=decay_start, end=decay_end)

    return schedule


def _make_shape(options: OptimizerOptions, shape_name: str) -> Shape:
    """Return the decay from 1 to 0 with a name in `_SHAPES`, with the settings of the options."""
    settings = parse_scheduler_kwargs(options.lr_scheduler_kwargs, kind=options.lr_scheduler_type)
    if shape_name != "warmup_stable_decay":
        return partial(_SHAPES[shape_name], **settings)
    decay = _DECAY_BY_COOLDOWN_SHAPE[options.cooldown_shape]
    # A cooldown of another schedule has the shape of `cooldown_shape` only.
    if options.lr_scheduler_type == shape_name and "power" in settings:
        decay = partial(polynomial, power=settings["power"])
    return partial(stable_then_decay, decay=decay)


def _resolve_decay(
    options: OptimizerOptions,
    *,
    total_steps: int,
    warmup_steps: float,
    decay_steps: float | None,
    cooldown_from: int | None,
) -> tuple[str, float, float]:
    """Return the name of the decay in `_SHAPES`, and the steps where it starts and ends.

    Raises:
        ConfigError: The phases do not fit into `total_steps`.
    """
    shape_name, num_constant_steps = options.lr_scheduler_type, options.num_constant_steps
    if cooldown_from is not None:
        if warmup_steps > cooldown_from:
            raise ConfigError(
                f"The cooldown begins after step {cooldown_from}, in the warm-up of "
                f"{warmup_steps:g} steps; branch from a later checkpoint."
            )
        return "warmup_stable_decay", cooldown_from, total_steps
    if shape_name == "warmup_stable_decay":
        decay_steps = decay_steps or max(1, total_steps // 10)
        if warmup_steps + decay_steps > total_steps:
            raise ConfigError(
                f"--warmup ({warmup_steps:g} steps) and --decay ({decay_steps:g} steps) are longer "
                f"than the run of {total_steps} steps; shorten one of them, or train longer."
            )
        return shape_name, total_steps - decay_steps, total_steps
    if num_constant_steps and warmup_steps + num_constant_steps >= total_steps:
        raise ConfigError(
            f"Warm-up ({warmup_steps:g} steps) and --num_constant_steps ({num_constant_steps}) "
            f"leave nothing of the {total_steps} steps for the decay."
        )
    return shape_name, warmup_steps, total_steps - num_constant_steps


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


def sqrt(step: float, *, start: float, end: float) -> float:
    """Fall from 1 at `start` to 0 at `end` by the root of the progress (Haegele et al. 2024)."""
    progress = min(1.0, (step - start) / max(1.0, end - start))
    return 1.0 - math.sqrt(progress)


def stable_then_decay(step: float, *, start: float, end: float, decay: Shape = linear) -> float:
    """Stay at 1 until `start`, then fall to 0 at `end`.

    The decay phase of warmup-stable-decay (Hu et al. 2024; Haegele et al. 2024).
    """
    return 1.0 if step < start else decay(step, start=start, end=end)


_DECAY_BY_COOLDOWN_SHAPE: dict[str, Shape] = {"linear": linear, "sqrt": sqrt, "cosine": cosine}

_SHAPES: dict[str, Callable[..., float]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant,
    "warmup_stable_decay": stable_then_decay,
}
"""Course between the peak (1) and the minimum (0) after the warm-up, by `lr_scheduler_type`."""


def is_constant(kind: str | None) -> bool:
    """Return whether the learning rate after the warm-up is the same for any length of the run."""
    return kind is not None and _SHAPES[kind] is constant
