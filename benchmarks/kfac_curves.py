"""Validation curves of `benchmarks.kfac`: when one is at another's last loss, and how all look."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""What `benchmarks.kfac_run` printed for each seed, by method."""


def reached(curve: Sequence[Sequence[float]], loss: float) -> tuple[float, float] | None:
    """Step and processor seconds at which a curve first is at a loss, if it ever is.

    Between two evaluations the curve is a straight line.
    """
    for before, after in zip([curve[0], *curve], curve, strict=False):
        if after[2] <= loss:
            fall = before[2] - after[2]
            share = (before[2] - loss) / fall if fall > 0 else 1.0
            step, seconds = (before[i] + share * (after[i] - before[i]) for i in (0, 1))
            return step, seconds
    return None


def to_the_same_loss(found: Found, method: str) -> tuple[float, float] | None:
    """Steps and processor time to AdamW's final loss as shares of AdamW's, means over the seeds."""
    shares = []
    for own, adamw in zip(found[method], found["adamw"], strict=True):
        steps, seconds, loss = adamw["curve"][-1]
        there = reached(own["curve"], loss)
        if there is None:
            return None
        shares.append((there[0] / steps, there[1] / seconds))
    return statistics.fmean(s for s, _ in shares), statistics.fmean(t for _, t in shares)


def plot(path: Path, found: Found, rows: Mapping[str, str]) -> None:
    """Draw validation loss against steps and against processor time, the mean of the seeds.

    Args:
        path: The PNG.
        found: The trainings of each method.
        rows: Other names of methods for the legend.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for method, runs in found.items():
        curves = [run["curve"] for run in runs]
        losses = [statistics.fmean(point[2] for point in at) for at in zip(*curves, strict=True)]
        for axis, column in zip(axes, (0, 1), strict=True):
            xs = [
                statistics.fmean(point[column] for point in at) for at in zip(*curves, strict=True)
            ]
            axis.plot(xs, losses, label=rows.get(method, method))
    axes[0].set_xlabel("steps")
    axes[1].set_xlabel("processor seconds")
    axes[0].set_ylabel("validation loss, nats a character")
    lowest = min(run["curve"][-1][2] for runs in found.values() for run in runs)
    axes[0].set_ylim(lowest - 0.05, lowest + 1.2)
    axes[0].legend()
    figure.savefig(path, dpi=120)
