"""Final losses of gossip and DiLoCo against all-reduce at several lengths, and lags in steps."""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.decentralized_loss import Setting, parse_method
from benchmarks.kfac_report import mean_and_error, steps_to
from benchmarks.kfac_trainings import Trainings
from benchmarks.report import Section, table

_MAX_EXTENSIONS = 3
REFERENCE = "allreduce"
SHARES_OF_LENGTHS = (0.25, 0.5, 0.75, 1.0)
"""All-reduce trains for these shares of each length, so that losses can be read in its steps."""


def make_trainings(setting: Setting, *, jobs: int, kept: Path | None) -> Trainings:
    """Return the trainings of a setting; finished ones are kept by the digest of the text."""
    digest = hashlib.sha256(Path(setting.text).read_bytes()).hexdigest()[:16]
    common = asdict(setting) | {"text_digest": digest}
    return Trainings(common, jobs=jobs, kept=kept, module="benchmarks.decentralized_loss")


def tune(
    trainings: Trainings, methods: Sequence[str], rates: Sequence[float], *, steps: int
) -> dict[str, dict[float, float]]:
    """Return the losses of seed 0 by method and rate.

    Further rates, doubled or halved, are tried while the best rate is the largest or smallest.

    Args:
        trainings: Trains.
        methods: The methods.
        rates: Learning rates to begin with.
        steps: Length of the trainings.
    """
    losses: dict[str, dict[float, float]] = {method: {} for method in methods}
    wanted = [(method, rate) for method in methods for rate in sorted(rates)]
    for _ in range(1 + _MAX_EXTENSIONS):
        results = trainings.run(
            [
                {"method": method, "learning_rate": rate, "steps": steps, "seed": 0}
                for method, rate in wanted
            ]
        )
        for (method, rate), (loss, _) in zip(wanted, results, strict=True):
            losses[method][rate] = loss
        wanted = [
            (method, further)
            for method, by_rate in losses.items()
            if (further := _further_rate(by_rate)) is not None
        ]
    return losses


def _further_rate(loss_by_rate: Mapping[float, float]) -> float | None:
    """Return the rate beyond the best one, if that is the largest or the smallest."""
    best = best_rate(loss_by_rate)
    if best == max(loss_by_rate):
        return 2 * best
    return best / 2 if best == min(loss_by_rate) else None


def best_rate(loss_by_rate: Mapping[float, float]) -> float:
    """Return the rate of the lowest loss."""
    return min(loss_by_rate, key=loss_by_rate.__getitem__)


def lag(loss: float, reference: Mapping[int, float], *, steps: int) -> float:
    """Return how many steps fewer all-reduce takes to a loss than a method that took `steps`.

    Args:
        loss: The method's final loss.
        reference: All-reduce's final losses by length.
        steps: Length of the method's training.

    Returns:
        Steps; infinity if even all-reduce's shortest training ends below the loss, and minus
        infinity if none does.
    """
    if reference[min(reference)] <= loss:
        return math.inf
    return steps - steps_to(reference, loss)


def loss_sections(
    trainings: Trainings,
    setting: Setting,
    *,
    methods: Sequence[str],
    lengths: Sequence[int],
    rates: Sequence[float],
    seeds: int,
) -> list[Section]:
    """Tune each method at each length, train all seeds at its rate, and compare.

    Args:
        trainings: Trains.
        setting: The settings of all trainings.
        methods: The methods, with `REFERENCE`.
        lengths: Steps of the trainings.
        rates: Learning rates to begin with.
        seeds: Trainings of each method at its best rate, the one that chose it included.
    """
    for method in methods:
        parse_method(method)
    rate_by_length: dict[int, float] = {}
    tuning_by_length: dict[int, dict[str, dict[float, float]]] = {}
    results_by_length: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for steps in lengths:
        losses = tune(trainings, methods, rates, steps=steps)
        chosen = {method: best_rate(by_rate) for method, by_rate in losses.items()}
        rate_by_length[steps] = chosen[REFERENCE]
        cases = [(method, seed) for method in methods for seed in range(seeds)]
        results = trainings.run(
            [
                {"method": m, "learning_rate": chosen[m], "steps": steps, "seed": seed}
                for m, seed in cases
            ]
        )
        result_by_case = dict(zip(cases, results, strict=True))
        results_by_length[steps] = {
            method: [result_by_case[method, seed] for seed in range(seeds)] for method in methods
        }
        tuning_by_length[steps] = losses
    references = _reference_curves(trainings, rate_by_length, seeds)
    sections = []
    for steps, results_by_method in results_by_length.items():
        losses = tuning_by_length[steps]
        rows = [
            [
                method,
                f"{best_rate(losses[method]):g}",
                mean_and_error([loss for loss, _ in results], 4),
                f"{statistics.fmean(distance for _, distance in results):.2g}",
                _lag_cell([loss for loss, _ in results], references, steps),
            ]
            for method, results in results_by_method.items()
        ]
        tried = [
            f"- {method}: "
            + ", ".join(f"{loss:.4f} at {rate:g}" for rate, loss in sorted(by_rate.items()))
            for method, by_rate in losses.items()
        ]
        header = ("method", "best rate", "validation loss", "distance from mean", "lag in steps")
        note = ["", "Validation loss of the seed that chose the rate:", "", *tried]
        lines = [_describe(setting, seeds), "", *table(header, rows), *note]
        sections.append(Section(title=f"Final loss after {steps:,} steps", lines=lines))
    return sections


def _reference_curves(
    trainings: Trainings, rate_by_length: Mapping[int, float], seeds: int
) -> list[dict[int, float]]:
    """Return all-reduce's final losses by length, for each seed, at the rate of the next length."""
    rate_by_share = {
        max(10, int(share * steps)): rate
        for steps, rate in sorted(rate_by_length.items(), reverse=True)
        for share in SHARES_OF_LENGTHS
    }
    results = trainings.run(
        [
            {"method": REFERENCE, "learning_rate": rate, "steps": steps, "seed": seed}
            for seed in range(seeds)
            for steps, rate in rate_by_share.items()
        ]
    )
    losses = [loss for loss, _ in results]
    size = len(rate_by_share)
    return [
        dict(sorted(zip(rate_by_share, losses[seed * size : (seed + 1) * size], strict=True)))
        for seed in range(seeds)
    ]


def _lag_cell(
    losses: Sequence[float], references: Sequence[Mapping[int, float]], steps: int
) -> str:
    lags = [lag(loss, curve, steps=steps) for loss, curve in zip(losses, references, strict=True)]
    if any(value == math.inf for value in lags):
        return "more than all-reduce's shortest training"
    if any(value == -math.inf for value in lags):
        return "below all-reduce"
    return mean_and_error(lags, 0)


def _describe(setting: Setting, seeds: int) -> str:
    tokens = setting.batch_size * setting.block_size
    return (
        f"GPT-Neo of {setting.layers} layers, width {setting.width}, on characters; "
        f"{setting.ranks} simulated ranks in nodes of {setting.ranks_per_node}, {tokens:,} "
        f"characters a step over all of them; embeddings at {setting.embedding_factor:g} times the "
        f"rate. AccumAdamW has moments of {setting.accum_steps} steps. Means of {seeds} seeds with "
        "standard errors. The lag is how many steps fewer all-reduce takes to the same loss: equal "
        "at all lengths if a method only begins slowly, and growing if it learns worse."
    )
