"""The figures of `benchmarks.kfac`: costs of a step, losses at each horizon, plot."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import Goal, Section, at_most, table

StepTimes = dict[str, list[float]]
"""The milliseconds of each step by method, as `benchmarks.kfac_run steps` prints them."""

LossesByMethod = Mapping[str, Mapping[int, Sequence[float]]]
"""The last validation loss of each seed, by method and number of steps."""


def ratios(step_times: StepTimes) -> StepTimes:
    """Return each step's time as a multiple of AdamW's step in the same round.

    They run one after the other, so a slow machine slows both.
    """
    return {
        method: [
            step_time / adamw_time
            for step_time, adamw_time in zip(times, step_times["adamw"], strict=True)
        ]
        for method, times in step_times.items()
    }


def costs(step_times: StepTimes) -> dict[str, float]:
    """Return the mean step of each method, in steps of AdamW."""
    return {
        method: statistics.fmean(step_ratios) for method, step_ratios in ratios(step_times).items()
    }


def step_section(
    title: str, step_times: StepTimes, label_by_method: Mapping[str, str], bound: float
) -> Section:
    """Return the table and the goals of one model's steps.

    Args:
        title: The model in words.
        step_times: Milliseconds of each step by method, adamw among them.
        label_by_method: Other names of methods for the table.
        bound: Goal for ekfac's mean step, in steps of AdamW.
    """
    mean_cost = costs(step_times)
    slowest_ratio = {
        method: max(step_ratios) / statistics.median(step_ratios)
        for method, step_ratios in ratios(step_times).items()
    }
    lines = table(
        ["method", "median ms a step", "mean, AdamW's step = 1", "slowest, median = 1"],
        [
            [
                label_by_method.get(method, method),
                f"{statistics.median(times):.0f}",
                f"{mean_cost[method]:.2f}",
                f"{slowest_ratio[method]:.2f}",
            ]
            for method, times in step_times.items()
        ],
    )
    goals: list[Goal] = []
    if "ekfac" in step_times:
        goals = [
            at_most(f"{title}: ekfac's step", mean_cost["ekfac"], bound, " of AdamW's"),
            at_most(f"{title}: ekfac's slowest step", slowest_ratio["ekfac"], 2, " of its median"),
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
    coefficients = np.polyfit(np.log(list(losses)), list(losses.values()), min(2, len(losses) - 1))
    is_below_target = np.polyval(coefficients, np.log(steps)) <= target
    return float(steps[is_below_target.argmax()] if is_below_target.any() else longest)


def shares(losses: LossesByMethod, method: str) -> list[float]:
    """Return, for each seed, the steps to the loss of AdamW's longest training, in its steps."""
    longest = max(losses["adamw"])
    return [
        steps_to(
            {num_steps: seed_losses[seed] for num_steps, seed_losses in losses[method].items()},
            target,
        )
        / longest
        for seed, target in enumerate(losses["adamw"][longest])
    ]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of some finite values; nan for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def mean_and_error(values: Sequence[float], digits: int) -> str:
    """Return the mean of some values and its standard error, or how many are infinite."""
    num_infinite = sum(map(math.isinf, values))
    if num_infinite == len(values):
        return "never"
    if num_infinite:
        return f"never in {num_infinite} of {len(values)}"
    mean, error = statistics.fmean(values), standard_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def horizon_lines(
    losses: LossesByMethod, costs: Mapping[str, float], label_by_method: Mapping[str, str]
) -> list[str]:
    """Return the table of last losses, and of the steps to AdamW's best one.

    Args:
        losses: The losses.
        costs: The mean step of each method, in steps of AdamW.
        label_by_method: Other names of methods for the table.
    """
    horizons = list(losses["adamw"])
    header = ["method", *(f"{steps:,} steps" for steps in horizons)]
    header += ["a step, AdamW's = 1", "steps to AdamW's last loss", "processor time to it"]
    return table(
        header,
        [
            [
                label_by_method.get(method, method),
                *(mean_and_error(losses_by_steps[steps], 4) for steps in horizons),
                f"{costs[method]:.2f}",
                mean_and_error(shares(losses, method), 3),
                mean_and_error([share * costs[method] for share in shares(losses, method)], 3),
            ]
            for method, losses_by_steps in losses.items()
        ],
    )


def horizon_goals(losses: LossesByMethod, costs: Mapping[str, float]) -> list[Goal]:
    """Return the goals of ekfac: shares of AdamW's steps and time, and a lead over the others.

    If ekfac was measured with SOAP for the other weights, the goals are for this combination.
    """
    ekfac = "ekfac-soap" if "ekfac-soap" in losses else "ekfac"
    if ekfac not in losses:
        return []
    ekfac_shares, ekfac_cost = shares(losses, ekfac), costs[ekfac]
    mean_share = statistics.fmean(ekfac_shares)
    goals = [
        at_most("ekfac's steps to AdamW's last loss", mean_share, 0.4, " of AdamW's"),
        at_most("ekfac's processor time to it", mean_share * ekfac_cost, 0.45, " of AdamW's"),
    ]
    for other_method in ("soap", "muon"):
        if other_method not in losses:
            continue
        other_shares = shares(losses, other_method)
        if not all(map(math.isfinite, (*ekfac_shares, *other_shares))):
            continue  # The table says which never arrives.
        leads = [
            other_share - ekfac_share
            for other_share, ekfac_share in zip(other_shares, ekfac_shares, strict=True)
        ]
        goals.append(
            Goal(
                what=f"ekfac's lead over {other_method}: at least two standard errors",
                measured=f"{mean_and_error(leads, 3)} of AdamW's steps",
                met=statistics.fmean(leads) >= 2 * standard_error(leads),
            )
        )
        goals.append(
            at_most("ekfac's step", ekfac_cost / costs[other_method], 1, f" of {other_method}'s")
        )
    return goals


def plot(
    path: Path,
    losses: LossesByMethod,
    costs: Mapping[str, float],
    label_by_method: Mapping[str, str],
) -> None:
    """Draw the last loss against the length of a training, in steps and in processor time.

    Args:
        path: The PNG.
        losses: The losses.
        costs: The mean step of each method, in steps of AdamW.
        label_by_method: Other names of methods for the legend.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for method, losses_by_steps in losses.items():
        means = [statistics.fmean(seed_losses) for seed_losses in losses_by_steps.values()]
        deviations = [statistics.pstdev(seed_losses) for seed_losses in losses_by_steps.values()]
        for axis, cost in zip(axes, (1.0, costs[method]), strict=True):
            lengths = [cost * steps for steps in losses_by_steps]
            axis.errorbar(
                lengths, means, deviations, marker="o", label=label_by_method.get(method, method)
            )
    axes[0].set_xlabel("steps of the training")
    axes[1].set_xlabel("processor time of the training, in steps of AdamW")
    axes[0].set_ylabel("validation loss at its end, nats a token")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.axhline(
            statistics.fmean([*losses["adamw"].values()][-1]), color="gray", lw=0.8, ls=":"
        )
    axes[0].legend()
    figure.savefig(path, dpi=120)
