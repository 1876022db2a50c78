"""Validation curves of `benchmarks.kfac`: when one is at another's last loss, and how all look."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""What `benchmarks.kfac_run` printed for each seed, by method."""


def reached(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The step at which a curve first is at a loss, if it ever is.

    Between two evaluations the curve is a straight line.
    """
    for (start, before), (end, after) in zip([curve[0], *curve], curve, strict=False):
        if after <= loss:
            return end - (end - start) * (loss - after) / (before - after) if start < end else end
    return None


def share_of_steps(found: Found, method: str) -> float | None:
    """Steps to AdamW's final loss as a share of AdamW's: mean of the seeds, if all get there."""
    shares = []
    for own, adamw in zip(found[method], found["adamw"], strict=True):
        steps, loss = adamw["curve"][-1]
        there = reached(own["curve"], loss)
        if there is None:
            return None
        shares.append(there / steps)
    return statistics.fmean(shares)


def plot(path: Path, found: Found, costs: Mapping[str, float], rows: Mapping[str, str]) -> None:
    """Draw validation loss against steps and against processor time, the mean of the seeds.

    Args:
        path: The PNG.
        found: The trainings of each method.
        costs: What a step of each takes, in steps of AdamW.
        rows: Other names of methods for the legend.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for method, runs in found.items():
        points = list(zip(*(run["curve"] for run in runs), strict=True))
        losses = [statistics.fmean(loss for _, loss in at) for at in points]
        for axis, cost in zip(axes, (1.0, costs[method]), strict=True):
            axis.plot([cost * at[0][0] for at in points], losses, label=rows.get(method, method))
    axes[0].set_xlabel("steps")
    axes[1].set_xlabel("processor time, in steps of AdamW")
    axes[0].set_ylabel("validation loss, nats a character")
    lowest = min(run["curve"][-1][1] for runs in found.values() for run in runs)
    axes[0].set_ylim(lowest - 0.05, lowest + 1.2)
    axes[0].legend()
    figure.savefig(path, dpi=120)
