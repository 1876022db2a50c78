"""The figures of `benchmarks.kfac`: costs of a step, validation curves, shorter trainings, plot."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Goal, Section, at_most, table

Taken = dict[str, list[float]]
"""The milliseconds of each step by method, as `benchmarks.kfac_run steps` prints them."""

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""The results of `benchmarks.kfac_run train` for each seed, by method."""


def ratios(taken: Taken) -> Taken:
    """Return each step's time as a multiple of AdamW's step beside it.

    The two are neighbours in time, so a slow machine slows both.
    """
    return {
        method: [own / other for own, other in zip(times, taken["adamw"], strict=True)]
        for method, times in taken.items()
    }


def costs(taken: Taken) -> dict[str, float]:
    """Return the mean step of each method, in steps of AdamW."""
    return {method: statistics.fmean(of) for method, of in ratios(taken).items()}


def step_section(title: str, taken: Taken, rows: Mapping[str, str], bound: float) -> Section:
    """Return the table and the goals of one model's steps.

    Args:
        title: The model in words.
        taken: Milliseconds of each step by method, adamw among them.
        rows: Other names of methods for the table.
        bound: Goal for ekfac's mean step, in steps of AdamW.
    """
    cost = costs(taken)
    spike = {method: max(of) / statistics.median(of) for method, of in ratios(taken).items()}
    lines = table(
        ["method", "median ms a step", "mean, AdamW's step = 1", "slowest, median = 1"],
        [
            [
                rows.get(method, method),
                f"{statistics.median(times):.0f}",
                f"{cost[method]:.2f}",
                f"{spike[method]:.2f}",
            ]
            for method, times in taken.items()
        ],
    )
    goals: list[Goal] = []
    if "ekfac" in taken:
        goals = [
            at_most(f"{title}: ekfac's step", cost["ekfac"], bound, " of AdamW's"),
            at_most(f"{title}: ekfac's slowest step", spike["ekfac"], 2, " of its median"),
        ]
        if "eigen-compat" in taken:
            ratio = cost["ekfac"] / cost["eigen-compat"]
            goals.append(at_most(f"{title}: ekfac's step", ratio, 1, " of kfac-pytorch's way"))
    return Section(title=title, lines=lines, goals=goals)


def reached(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Return the step at which a curve first reaches a loss, or None.

    The curve is linear between two evaluations.
    """
    for (start, before), (end, after) in zip([curve[0], *curve], curve, strict=False):
        if after <= loss:
            return end - (end - start) * (loss - after) / (before - after) if start < end else end
    return None


def share_of_steps(found: Found, method: str) -> float | None:
    """Return the mean over seeds of steps to AdamW's final loss, in AdamW's, if all reach it."""
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
        costs: The mean step of each method, in steps of AdamW.
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


def shorter_section(
    steps: int,
    found: Found,
    shorter: Mapping[float, Found],
    costs: Mapping[str, float],
    rows: Mapping[str, str],
) -> Section:
    """Return the last losses of shorter trainings, and goals for ekfac.

    A shorter training has a shorter schedule, so its last loss shows the savings of a method
    better than the step at which its long training passes a loss.

    Args:
        steps: Steps of the whole trainings.
        found: The whole trainings.
        shorter: The trainings that end after a fraction of the steps, by that fraction.
        costs: The mean step of each method, in steps of AdamW.
        rows: Other names of methods for the table.
    """
    shares = sorted(shorter)
    target = last_loss(found["adamw"])
    lines = [
        f"Each with a schedule that ends at its last step; AdamW's loss after {steps:,} steps is "
        f"{target:.4f}.",
        "",
        *table(
            ["method", *(f"after {round(share * steps):,}" for share in shares)],
            [
                [
                    rows.get(method, method),
                    *(f"{last_loss(shorter[s][method]):.4f}" for s in shares),
                ]
                for method in shorter[shares[0]]
            ],
        ),
    ]
    goals: list[Goal] = []
    if "ekfac" in found:
        enough = [share for share in shares if last_loss(shorter[share]["ekfac"]) <= target]
        share = min(enough, default=math.inf)
        goals = [
            at_most(f"{what} of ekfac's shortest training to AdamW's final loss", figure, bound, "")
            for what, figure, bound in (
                ("steps", share, 0.5),
                ("CPU time", share * costs["ekfac"], 0.6),
            )
        ]
    return Section(title="Trainings of fewer steps", lines=lines, goals=goals)


def last_loss(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean last loss of the seeds."""
    return statistics.fmean(run["curve"][-1][1] for run in runs)
