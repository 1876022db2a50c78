"""Trainings of fewer steps in `benchmarks.kfac`: which of them still end at AdamW's last loss."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kfac_curves import Found
from benchmarks.report import Goal, Section, at_most, table


def section(
    steps: int,
    found: Found,
    shorter: Mapping[float, Found],
    costs: Mapping[str, float],
    rows: Mapping[str, str],
) -> Section:
    """Last losses by share of the steps, and goals for ekfac.

    A run that is to take half as long gets a schedule of half the length, so that this says more
    of what a method saves than where its long run passes a loss.

    Args:
        steps: Of the whole trainings.
        found: These.
        shorter: The trainings that end after a share of the steps.
        costs: What a step of each method takes, in steps of AdamW.
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
    """The mean of the seeds."""
    return statistics.fmean(run["curve"][-1][1] for run in runs)
