"""The figures of `benchmarks.kfac`: costs of a step, losses at each horizon, plot."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import Goal, Section, at_most, table

Taken = dict[str, list[float]]
"""The milliseconds of each step by method, as `benchmarks.kfac_run steps` prints them."""

Found = Mapping[str, Mapping[int, Sequence[float]]]
"""The last validation loss of each seed, by method and number of steps."""


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
    return Section(title=title, lines=lines, goals=goals)


def steps_to(losses: Mapping[int, float], target: float) -> float:
    """Return the length of the training that would end at a loss.

    The loss at the end is a parabola in the logarithm of the length, fitted to all of them.

    Args:
        losses: The loss at the end of trainings, by their steps.
        target: The loss.

    Returns:
        Steps; infinity if all trainings end above the loss, and the shortest length, which is an
        upper bound, if that one ends below it.
    """
    if min(losses.values()) > target:
        return math.inf
    shortest, longest = min(losses), max(losses)
    if losses[shortest] <= target:
        return float(shortest)
    steps = np.geomspace(shortest, longest, 2001)
    fit = np.polyfit(np.log(list(losses)), list(losses.values()), min(2, len(losses) - 1))
    below = np.polyval(fit, np.log(steps)) <= target
    return float(steps[below.argmax()] if below.any() else longest)


def shares(found: Found, method: str) -> list[float]:
    """Return, for each seed, the steps to the loss of AdamW's longest training, in its steps."""
    longest = max(found["adamw"])
    return [
        steps_to({n: of[seed] for n, of in found[method].items()}, target) / longest
        for seed, target in enumerate(found["adamw"][longest])
    ]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of some values; zero where a value is infinite."""
    if not all(map(math.isfinite, values)):
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def mean_and_error(values: Sequence[float], digits: int) -> str:
    """Return the mean of some values and its standard error."""
    mean, error = statistics.fmean(values), standard_error(values)
    if math.isinf(mean):
        return "never"
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def horizon_lines(found: Found, costs: Mapping[str, float], rows: Mapping[str, str]) -> list[str]:
    """Return the table of last losses, and of the steps to AdamW's best one.

    Args:
        found: The losses.
        costs: The mean step of each method, in steps of AdamW.
        rows: Other names of methods for the table.
    """
    horizons = list(found["adamw"])
    header = ["method", *(f"{steps:,} steps" for steps in horizons)]
    header += ["a step, AdamW's = 1", "steps to AdamW's last loss", "processor time to it"]
    return table(
        header,
        [
            [
                rows.get(method, method),
                *(mean_and_error(its[steps], 4) for steps in horizons),
                f"{costs[method]:.2f}",
                mean_and_error(shares(found, method), 3),
                mean_and_error([share * costs[method] for share in shares(found, method)], 3),
            ]
            for method, its in found.items()
        ],
    )


def horizon_goals(found: Found, costs: Mapping[str, float]) -> list[Goal]:
    """Return the goals of ekfac: shares of AdamW's steps and time, and a lead over the others.

    With SOAP for what it does not cover, if that was measured.
    """
    ekfac = "ekfac-soap" if "ekfac-soap" in found else "ekfac"
    if ekfac not in found:
        return []
    own, cost = shares(found, ekfac), costs[ekfac]
    share = statistics.fmean(own)
    goals = [
        at_most("ekfac's steps to AdamW's last loss", share, 0.4, " of AdamW's"),
        at_most("ekfac's processor time to it", share * cost, 0.45, " of AdamW's"),
    ]
    for other in ("soap", "muon"):
        if other not in found:
            continue
        theirs = shares(found, other)
        if not all(map(math.isfinite, (*own, *theirs))):
            continue  # The table says which never arrives.
        leads = [its - ours for its, ours in zip(theirs, own, strict=True)]
        goals.append(
            Goal(
                what=f"ekfac's lead over {other}: at least two standard errors",
                measured=f"{mean_and_error(leads, 3)} of AdamW's steps",
                met=statistics.fmean(leads) >= 2 * standard_error(leads),
            )
        )
        goals.append(at_most("ekfac's step", cost / costs[other], 1, f" of {other}'s"))
    return goals


def plot(path: Path, found: Found, costs: Mapping[str, float], rows: Mapping[str, str]) -> None:
    """Draw the last loss against the length of a training, in steps and in processor time.

    Args:
        path: The PNG.
        found: The losses.
        costs: The mean step of each method, in steps of AdamW.
        rows: Other names of methods for the legend.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for method, its in found.items():
        means = [statistics.fmean(losses) for losses in its.values()]
        spread = [statistics.pstdev(losses) for losses in its.values()]
        for axis, cost in zip(axes, (1.0, costs[method]), strict=True):
            lengths = [cost * steps for steps in its]
            axis.errorbar(lengths, means, spread, marker="o", label=rows.get(method, method))
    axes[0].set_xlabel("steps of the training")
    axes[1].set_xlabel("processor time of the training, in steps of AdamW")
    axes[0].set_ylabel("validation loss at its end, nats a token")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.axhline(statistics.fmean([*found["adamw"].values()][-1]), color="gray", lw=0.8, ls=":")
    axes[0].legend()
    figure.savefig(path, dpi=120)
