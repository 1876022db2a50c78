"""Compare K-FAC with other optimizers: steps and time to AdamW's validation loss, cost of a step.

python -m benchmarks.kfac --help. Every method uses the best of the same learning rates, chosen in
shorter trainings of one seed; then all seeds train in full. The cost of a step is measured
separately, with all methods alternating, for the trained model and for wider ones. A benchmark that
is stopped ends its trainings, and goes on from the finished ones when it is started again.
"""

import importlib.util
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import kfac_report
from benchmarks.kfac_report import Found, Taken, plot, share_of_steps
from benchmarks.kfac_trainings import Trainings
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    at_most,
    check_folder,
    machine,
    render,
    run_benchmark,
    table,
)
from llm.config.options import option
from llm.errors import ConfigError

Method = Literal["adamw", "ekfac", "soap", "muon", "eigen-compat"]
Part = Literal["convergence", "step"]
_ROWS = {"eigen-compat": "eigen, compat"}


@dataclass(frozen=True, kw_only=True)
class KFACBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    methods: tuple[Method, ...] = option(
        ("adamw", "ekfac", "soap", "muon", "eigen-compat"),
        "Optimizers, adamw among them; soap needs `pip install pytorch_optimizer`; eigen-compat is "
        "kfac-pytorch's arithmetic by --kfac_compat.",
        group="Methods",
    )
    learning_rates: tuple[float, ...] = option(
        (1e-3, 2e-3, 4e-3, 8e-3), "Peak rates to choose from.", group="Methods", above=0
    )
    factor_update_steps: int = option(
        50, "Steps between updates of K-FAC's factors.", group="Methods", at_least=1
    )
    inv_update_steps: int = option(
        50, "Steps between updates of K-FAC's bases.", group="Methods", at_least=1
    )
    soap_update_steps: int = option(
        10, "Steps between updates of SOAP's bases.", group="Methods", at_least=1
    )
    max_dim: int | None = option(
        None,
        "Widest block of ekfac's factors; twice the model's width if not given, as in the trainer.",
        group="Methods",
        at_least=1,
    )
    only: tuple[Part, ...] = option(("convergence", "step"), "Parts to measure.", group="Run")
    text: str = option(
        "examples/data/shakespeare.txt", "Text, read as characters.", group="Training"
    )
    steps: int = option(2000, "Steps of a training.", group="Training", at_least=20)
    sweep_steps: int = option(
        400, "Steps of a training that chooses a rate.", group="Training", at_least=10
    )
    shares: tuple[float, ...] = option(
        (0.5,),
        "Fractions of --steps for which all methods but AdamW are also trained, each with a "
        "schedule of that length.",
        group="Training",
        above=0,
        below=1,
    )
    batch_size: int = option(16, "Samples of a step.", group="Training", at_least=1)
    block_size: int = option(128, "Characters of a sample.", group="Training", at_least=2)
    width: int = option(128, "Width of the model.", group="Training", at_least=4)
    layers: int = option(4, "Layers of the model.", group="Training", at_least=1)
    seeds: int = option(3, "Trainings of each method.", group="Training", at_least=1)
    step_widths: tuple[int, ...] = option(
        (256, 512), "Widths of the models whose steps are timed.", group="Step", at_least=4
    )
    step_tokens: int = option(
        8192, "Characters of a timed step, in samples of 256.", group="Step", at_least=256
    )
    step_factor_update_steps: int = option(
        10, "Steps between updates of factors in timed steps.", group="Step", at_least=1
    )
    step_inv_update_steps: int = option(
        100,
        "Steps between updates of bases in timed steps, and their number.",
        group="Step",
        at_least=3,
    )
    turns: int = option(
        200,
        "Timed steps of the model of the trainings, at least; whole intervals between bases.",
        group="Training",
        at_least=1,
    )
    jobs: int = option(
        len(os.sched_getaffinity(0)), "Trainings at once, of one thread each.", group="Run"
    )
    trainings: str | None = option(
        None,
        "File that keeps the results of finished trainings, from which a benchmark that was "
        "stopped goes on; remove it when the code has changed. OUTPUT.trainings if not given.",
        group="Run",
    )
    plot: str | None = option(
        None, "PNG of the curves; needs `pip install 'llm-trainers[report]'`.", group="Run"
    )


def check(options: KFACBenchmarkOptions) -> None:
    """Refuse options that would fail after hours of training.

    Raises:
        ConfigError: A method, file or package is missing.
    """
    if "adamw" not in options.methods:
        raise ConfigError("--methods must have adamw, whose loss the others should reach.")
    if not Path(options.text).is_file():
        raise ConfigError(f"--text {options.text} is no file.")
    if "soap" in options.methods and not _installed("pytorch_optimizer"):
        raise ConfigError(
            "--methods soap needs a package that is not installed: pip install pytorch_optimizer, "
            "or leave soap out."
        )
    if options.plot is not None and "convergence" not in options.only:
        raise ConfigError("--plot draws the curves of convergence, which --only step leaves out.")
    if options.plot is not None and not _installed("matplotlib"):
        raise ConfigError(
            "--plot needs a package that is not installed: pip install matplotlib, or leave it out."
        )
    check_folder("plot", options.plot)
    check_folder("trainings", options.trainings)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _common(options: KFACBenchmarkOptions) -> dict[str, Any]:
    """Return the settings that all trainings share."""
    names = ("batch_size", "block_size", "width", "layers", "max_dim")
    intervals = ("factor_update_steps", "inv_update_steps", "soap_update_steps")
    common = {name: getattr(options, name) for name in (*names, *intervals)}
    return common | {"text": str(Path(options.text).resolve())}


def choose_rates(
    options: KFACBenchmarkOptions, trainings: Trainings
) -> tuple[dict[str, float], list[list[str]]]:
    """Return the best learning rate of each method, and the rows of losses for the table."""
    cases = [
        {
            "method": method,
            "learning_rate": rate,
            "seed": 1000,
            "steps": options.sweep_steps,
            "evaluate_every": options.sweep_steps,
        }
        for method in options.methods
        for rate in options.learning_rates
    ]
    losses = [found["curve"][-1][1] for found in trainings.run(cases)]
    chosen, rows = {}, []
    width = len(options.learning_rates)
    for number, method in enumerate(options.methods):
        own = losses[number * width : (number + 1) * width]
        chosen[method] = options.learning_rates[own.index(min(own))]
        rows.append([_ROWS.get(method, method), *(f"{loss:.4f}" for loss in own)])
    return chosen, rows


def train_all(
    options: KFACBenchmarkOptions, trainings: Trainings, rates: Mapping[str, float], steps: int
) -> dict[str, list[dict[str, Any]]]:
    """Train all seeds of some methods, each at its rate, for a number of steps."""
    cases = [
        {
            "method": method,
            "learning_rate": rate,
            "seed": seed,
            "steps": steps,
            "evaluate_every": max(1, steps // 40),
        }
        for seed in range(options.seeds)
        for method, rate in rates.items()
    ]
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in rates}
    for case, result in zip(cases, trainings.run(cases), strict=True):
        found[case["method"]].append(result)
    return found


def section(
    options: KFACBenchmarkOptions,
    rates: dict[str, float],
    sweep: list[list[str]],
    found: Found,
    taken: Taken,
) -> Section:
    """Return the tables and the goals of the trainings."""
    rows, costs = [], kfac_report.costs(taken)
    for method, runs in found.items():
        losses = [run["curve"][-1][1] for run in runs]
        share = share_of_steps(found, method)
        rows.append(
            [
                _ROWS.get(method, method),
                f"{rates[method]:g}",
                f"{statistics.fmean(losses):.4f} ({min(losses):.4f}-{max(losses):.4f})",
                f"{statistics.median(taken[method]):.0f}",
                f"{costs[method]:.2f}",
                "never" if share is None else f"{share:.2f}",
                "never" if share is None else f"{share * costs[method]:.2f}",
            ]
        )
    tokens = options.batch_size * options.block_size
    header = [
        *("method", "rate", "final validation loss", "median ms a step", "mean, AdamW's step = 1"),
        *("steps to AdamW's loss", "CPU time to it"),
    ]
    lines = [
        f"GPT-Neo of {options.layers} layers, width {options.width}, {tokens:,} characters a step, "
        f"{options.steps:,} steps, {options.seeds} seeds, one thread each.",
        "",
        *table(header, rows),
        "",
        f"Validation loss after {options.sweep_steps} steps of another seed, by learning rate:",
        "",
        *table(["method", *(f"{rate:g}" for rate in options.learning_rates)], sweep),
    ]
    return Section(title="Convergence", lines=lines, goals=_goals(found, costs))


def _goals(found: Found, costs: Mapping[str, float]) -> list[Goal]:
    if "ekfac" not in found:
        return []
    share = share_of_steps(found, "ekfac") or math.inf
    return [
        at_most(f"ekfac's {what} to AdamW's final loss", share * cost, bound, " of AdamW's")
        for what, cost, bound in (("steps", 1.0, 0.5), ("CPU time", costs["ekfac"], 0.6))
    ]


def step_sections(options: KFACBenchmarkOptions, trainings: Trainings) -> list[Section]:
    """Measure the cost of a step for each width."""
    sections: list[Section] = []
    for width in options.step_widths:
        case = {
            "methods": options.methods,
            "width": width,
            "layers": 2,
            "batch_size": options.step_tokens // 256,
            "block_size": 256,
            "factor_update_steps": options.step_factor_update_steps,
            "inv_update_steps": options.step_inv_update_steps,
            "turns": options.step_inv_update_steps,
        }
        title = f"A step, width {width}, {options.step_tokens // 256 * 256:,} characters"
        sections.append(kfac_report.step_section(title, trainings.steps(case), _ROWS, bound=1.15))
    return sections


def convergence_sections(options: KFACBenchmarkOptions, trainings: Trainings) -> list[Section]:
    """Choose rates, train every method in full and for fewer steps, and time its steps."""
    rates, sweep = choose_rates(options, trainings)
    found = train_all(options, trainings, rates, options.steps)
    others = {method: rate for method, rate in rates.items() if method != "adamw"}
    shorter = {
        share: train_all(options, trainings, others, max(1, round(share * options.steps)))
        for share in options.shares
    }
    taken = trainings.steps({"methods": options.methods, "turns": options.turns}, threads=1)
    costs = kfac_report.costs(taken)
    sections = [section(options, rates, sweep, found, taken)]
    if others:
        sections.append(kfac_report.shorter_section(options.steps, found, shorter, costs, _ROWS))
    if options.plot is not None:
        plot(Path(options.plot), found, costs, _ROWS)
    return sections


def report(options: KFACBenchmarkOptions, _: Path) -> str:
    """Measure all chosen parts and return the report."""
    check(options)
    kept = options.trainings or (options.output and f"{options.output}.trainings")
    trainings = Trainings(_common(options), jobs=options.jobs, kept=Path(kept) if kept else None)
    sections: list[Section] = []
    if "convergence" in options.only:
        sections += convergence_sections(options, trainings)
    if "step" in options.only:
        sections += step_sections(options, trainings)
    return render("K-FAC", machine(["torch", "transformers"]), sections)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    description = "Compares K-FAC with other optimizers."
    return run_benchmark("kfac", description, KFACBenchmarkOptions, report, argv)


if __name__ == "__main__":
    sys.exit(main())
