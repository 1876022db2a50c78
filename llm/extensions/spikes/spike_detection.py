"""Spikes of the loss: a robust z-score of each step's loss among the previous losses.

The median and the median absolute deviation (MAD) cover the recent past, so a falling loss raises
no alarm and one outlier hides no other. 1.4826 MAD is the standard deviation of a normal
distribution (Rousseeuw & Croux 1993, "Alternatives to the Median Absolute Deviation").
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

WINDOW = 64
"""Steps that a loss is compared with."""
_MIN_STEPS = 32
"""Minimum number of earlier steps to find a spike."""
_MIN_SCORE = 6.0
"""A loss with at least this many deviations above the median is a spike."""
_MIN_RELATIVE_DEVIATION = 0.005
"""Smallest deviation, relative to the median: in large batches the loss hardly varies."""


class Spike(NamedTuple):
    """A loss far above the previous ones.

    Attributes:
        median: Median of the previous losses.
        score: Distance from the median, in deviations.
    """

    median: float
    score: float


def find_spike(loss: float, previous_losses: Sequence[float]) -> Spike | None:
    """Return a spike if a loss is far above the median of the previous losses; otherwise None.

    Args:
        loss: Mean loss of a step.
        previous_losses: The previous losses, `WINDOW` at most.
    """
    if len(previous_losses) < _MIN_STEPS:
        return None
    median_loss = median(previous_losses)
    deviation = 1.4826 * median(abs(value - median_loss) for value in previous_losses)
    score = (loss - median_loss) / max(deviation, _MIN_RELATIVE_DEVIATION * abs(median_loss), 1e-12)
    return Spike(median_loss, score) if score > _MIN_SCORE else None


def append_loss(loss: float, previous_losses: Sequence[float]) -> list[float]:
    """Return the losses for comparison with the next step; includes spikes."""
    return [*previous_losses, loss][-WINDOW:] if math.isfinite(loss) else list(previous_losses)
