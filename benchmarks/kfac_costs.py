"""What a step of each method of `benchmarks.kfac` costs, in steps of AdamW."""

import statistics
from collections.abc import Mapping

from benchmarks.report import Goal, Section, at_most, table

Taken = dict[str, list[float]]
"""What `benchmarks.kfac_steps` prints: the milliseconds of each step, by method."""


def ratios(taken: Taken) -> Taken:
    """Each step as a multiple of AdamW's step of the same turn.

    They are neighbours in time: what slows the machine down slows both.
    """
    return {
        method: [own / other for own, other in zip(times, taken["adamw"], strict=True)]
        for method, times in taken.items()
    }


def costs(taken: Taken) -> dict[str, float]:
    """The mean step of each method, in steps of AdamW."""
    return {method: statistics.fmean(of) for method, of in ratios(taken).items()}


def section(title: str, taken: Taken, rows: Mapping[str, str], bound: float) -> Section:
    """Table and goals of one model's figures.

    Args:
        title: The model in words.
        taken: Milliseconds of each step by method, adamw among them.
        rows: Other names of methods for the table.
        bound: What ekfac's mean step may cost at most, in steps of AdamW.
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
