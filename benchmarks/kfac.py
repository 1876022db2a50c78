"""Compare K-FAC with other optimizers: steps and time to AdamW's loss, bases, cost of a step.

python -m benchmarks.kfac --help. Every method gets the same trials of learning rate, rate of the
embeddings and decays of its moments, AdamW longer ones; then all seeds train at each horizon, with
a schedule that ends there. The cost of a step is measured separately, with all methods alternating,
for the trained model and for wider ones. The bases in which they keep second moments are compared
without training in them. A benchmark that is stopped ends its trainings, and goes on from the
finished ones when it is started again.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import kfac_report
from benchmarks.corpus import make_tokens
from benchmarks.kfac_bases import diagonal_shares
from benchmarks.kfac_report import LossesByMethod
from benchmarks.kfac_trainings import Trainings
from benchmarks.report import (
    ReportOptions,
    Section,
    check_folder,
    machine,
    render,
    run_benchmark,
    table,
)
from llm.config.options import option
from llm.errors import ConfigError

Method = Literal[
    "adamw",
    "ekfac",
    "ekfac-soap",
    "muon",
    "muon-polar-express",
    "normuon",
    "soap",
    "soap-nesterov",
    "soap-library",
    "adamw-hyperball",
    "muon-hyperball",
    "normuon-hyperball",
    "soap-hyperball",
]
Part = Literal["convergence", "bases", "step"]
ROWS = {
    "ekfac-soap": "ekfac, soap, Nesterov",
    "soap-nesterov": "soap, Nesterov",
    "soap-library": "soap of pytorch_optimizer",
}
ADAMW_BETAS = ((0.9, 0.95), (0.9, 0.99), (0.9, 0.999))
BETAS = ((0.95, 0.95), (0.95, 0.98), (0.95, 0.995))
FIRST_EMBEDDING_FACTOR = 4.0
HYPERBALL_FACTOR = 8.0
"""The rates of Hyperball's methods over those of the others: its steps are relative to the weights.
The rates of the embeddings are the same."""
BASES_TRAINING = {"learning_rate": 0.004, "betas": (0.95, 0.95)}


@dataclass(frozen=True, kw_only=True)
class KFACBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    methods: tuple[Method, ...] = option(
        ("adamw", "ekfac", "ekfac-soap", "muon", "soap"),
        "Optimizers, adamw among them; ekfac-soap has --optimizer soap and --nesterov beside "
        "--kfac; soap-library needs `pip install pytorch_optimizer`.",
        group="Methods",
    )
    learning_rates: tuple[float, ...] = option(
        (1e-3, 2e-3, 4e-3, 8e-3),
        "Peak rates to begin with, 8 times as high with Hyperball; the neighbours of the best one, "
        "by a factor of sqrt(2), follow.",
        group="Methods",
        above=0,
    )
    embedding_factors: tuple[float, ...] = option(
        (1.0, 2.0, 4.0, 8.0, 16.0),
        "Rates of the embeddings to try, as multiples of the best rate; an eighth of them with "
        "Hyperball.",
        group="Methods",
        above=0,
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
    only: tuple[Part, ...] = option(
        ("convergence", "bases", "step"), "Parts to measure.", group="Run"
    )
    text: str | None = option(
        None,
        "Folder of nanoGPT's train.bin and val.bin, or a text, which is read as characters; if not "
        "given, source code of this machine's Python as 2,048 tokens, made in runs/kfac.",
        group="Training",
    )
    horizons: tuple[int, ...] = option(
        (500, 1000, 2000, 4000),
        "Steps of the trainings, each with a schedule of that length.",
        group="Training",
        at_least=20,
    )
    trial_steps: int = option(
        1000,
        "Steps of a trial; AdamW's trials have those of the longest horizon.",
        group="Training",
        at_least=10,
    )
    batch_size: int = option(8, "Samples of a step.", group="Training", at_least=1)
    block_size: int = option(256, "Tokens of a sample.", group="Training", at_least=2)
    width: int = option(128, "Width of the model.", group="Training", at_least=32)
    layers: int = option(2, "Layers of the model.", group="Training", at_least=1)
    seeds: int = option(3, "Trainings of each method at a horizon.", group="Training", at_least=1)
    mixed_precision: Literal["no", "bf16"] = option(
        "bf16", "Precision of the model's matrix products.", group="Training"
    )
    step_widths: tuple[int, ...] = option(
        (256, 512), "Widths of the models whose steps are timed.", group="Step", at_least=32
    )
    step_tokens: int = option(
        8192, "Tokens of a timed step, in samples of 256.", group="Step", at_least=256
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Where the models train.", group="Run")
    turns: int = option(
        200, "Timed steps, at least; whole intervals between bases.", group="Step", at_least=1
    )
    jobs: int | None = option(
        None,
        "Trainings at once, of one thread each; by default one for each core, or one on a GPU.",
        group="Run",
        at_least=1,
    )
    trainings: str | None = option(
        None,
        "File that keeps the results of finished trainings, from which a benchmark that was "
        "stopped goes on; remove it when the code has changed. OUTPUT.trainings if not given.",
        group="Run",
    )
    plot: str | None = option(
        None, "PNG of the losses; needs `pip install 'llm-trainers[report]'`.", group="Run"
    )


def check(options: KFACBenchmarkOptions) -> None:
    """Refuse options that would fail after hours of training.

    Raises:
        ConfigError: A method, file or package is missing.
    """
    if "adamw" not in options.methods:
        raise ConfigError("--methods must have adamw, whose loss the others should reach.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, and torch sees none; leave the option out.")
    if options.text is not None and not Path(options.text).exists():
        raise ConfigError(f"--text {options.text} is neither a folder of tokens nor a file.")
    if "soap-library" in options.methods and not _installed("pytorch_optimizer"):
        raise ConfigError(
            "--methods soap-library needs a package that is not installed: pip install "
            "pytorch_optimizer, or leave soap-library out."
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
    names = ("device", "batch_size", "block_size", "width", "layers", "max_dim", "mixed_precision")
    intervals = ("factor_update_steps", "inv_update_steps", "soap_update_steps")
    common = {name: getattr(options, name) for name in (*names, *intervals)}
    text = _text(options).resolve()
    # Other machines have other source code under the same name: its results are not kept ones.
    with open(text / "train.bin" if text.is_dir() else text, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return common | {"text": str(text), "text_digest": digest}


def _text(options: KFACBenchmarkOptions) -> Path:
    """Return the text of the options, or make source code into tokens, once."""
    if options.text is not None:
        return Path(options.text)
    folder = Path("runs/kfac")
    if not (folder / "tokens").exists():
        make_tokens(folder, megabytes=140, vocab_size=2048)
    return folder / "tokens"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the trials of a method choose.

    Attributes:
        learning_rate: Peak rate.
        embedding_factor: Rate of the embeddings over it.
        betas: Decays of the moments.
    """

    learning_rate: float
    embedding_factor: float
    betas: tuple[float, float]

    def training(self) -> dict[str, Any]:
        """Return the settings of a training."""
        return {
            "learning_rate": self.learning_rate,
            "embedding_learning_rate": self.learning_rate * self.embedding_factor,
            "betas": list(self.betas),
        }


Trials = dict[str, dict[Setting, float]]
"""The loss of each trial, by method and setting."""


def try_settings(options: KFACBenchmarkOptions, trainings: Trainings) -> Trials:
    """Try settings of each method by trainings of one seed, one kind of setting after the other.

    First come the rates, then the neighbours of the best one by a factor of sqrt(2), other rates of
    the embeddings, and other betas. AdamW, with which all are compared, tries each betas at three
    rates, in trials as long as the longest training: its best rate falls with the length, and a
    rate from short trials would flatter the others.
    """
    trials: Trials = {method: {} for method in options.methods}
    steps = dict.fromkeys(options.methods, options.trial_steps) | {"adamw": max(options.horizons)}

    def run(variants: Callable[[str], Sequence[Setting]]) -> None:
        cases = [
            (method, setting)
            for method in options.methods
            for setting in variants(method)
            if setting not in trials[method]
        ]
        losses = trainings.run(
            [
                {"method": method, "seed": 1000, "steps": steps[method]} | setting.training()
                for method, setting in cases
            ]
        )
        for (method, setting), loss in zip(cases, losses, strict=True):
            trials[method][setting] = loss

    def scale(method: str) -> float:
        return HYPERBALL_FACTOR if "hyperball" in method else 1.0

    def vary(name: str, best: Setting, values: Iterable[Any]) -> list[Setting]:
        return [replace(best, **{name: value}) for value in values]

    def near(best: Setting) -> list[Setting]:
        rates = [float(f"{best.learning_rate * 2**power:.3g}") for power in (-0.5, 0.5)]
        return vary("learning_rate", best, rates)

    def with_rates(method: str) -> list[Setting]:
        betas = (ADAMW_BETAS if method == "adamw" else BETAS)[0]
        factor = scale(method)
        first = Setting(
            learning_rate=0, embedding_factor=FIRST_EMBEDDING_FACTOR / factor, betas=betas
        )
        return vary("learning_rate", first, [factor * rate for rate in options.learning_rates])

    def with_embedding_factors(method: str) -> list[Setting]:
        factors = [factor / scale(method) for factor in options.embedding_factors]
        return vary("embedding_factor", best_of(trials[method]), factors)

    def with_betas(method: str) -> list[Setting]:
        best = best_of(trials[method])
        if method != "adamw":
            return vary("betas", best, BETAS)
        return [s for each in vary("betas", best, ADAMW_BETAS) for s in (each, *near(each))]

    run(with_rates)
    run(lambda method: near(best_of(trials[method])))
    run(with_embedding_factors)
    run(with_betas)
    return trials


def best_of(trials: Mapping[Setting, float]) -> Setting:
    """Return the setting of the lowest loss."""
    return min(trials, key=trials.__getitem__)


def train_all(
    options: KFACBenchmarkOptions, trainings: Trainings, chosen: Mapping[str, Setting]
) -> LossesByMethod:
    """Train every method at each horizon with each seed."""
    trial_keys = [
        (method, steps, seed)
        for seed in range(options.seeds)
        for steps in options.horizons
        for method in chosen
    ]
    losses = trainings.run(
        [
            {"method": method, "seed": seed, "steps": steps} | chosen[method].training()
            for method, steps, seed in trial_keys
        ]
    )
    losses_by_method: dict[str, dict[int, list[float]]] = {}
    for (method, steps, _), loss in zip(trial_keys, losses, strict=True):
        losses_by_method.setdefault(method, {}).setdefault(steps, []).append(loss)
    return losses_by_method


def step_sections(options: KFACBenchmarkOptions, trainings: Trainings) -> list[Section]:
    """Measure the cost of a step for each width."""
    sections: list[Section] = []
    for width in options.step_widths:
        case = {
            "methods": options.methods,
            "width": width,
            "batch_size": options.step_tokens // 256,
            "block_size": 256,
            "turns": 1,
        }
        title = f"A step, width {width}, {options.step_tokens // 256 * 256:,} tokens"
        sections.append(kfac_report.step_section(title, trainings.steps(case), ROWS, bound=1.15))
    return sections


def convergence_section(options: KFACBenchmarkOptions, trainings: Trainings) -> Section:
    """Choose settings, train every method at all horizons, and time its steps."""
    trials_by_method = try_settings(options, trainings)
    chosen = {method: best_of(trials) for method, trials in trials_by_method.items()}
    losses_by_method = train_all(options, trainings, chosen)
    step_times = trainings.steps({"methods": options.methods, "turns": options.turns}, threads=1)
    costs = kfac_report.costs(step_times)
    if options.plot is not None:
        kfac_report.plot(Path(options.plot), losses_by_method, costs, ROWS)
    tokens = options.batch_size * options.block_size
    rows = [
        [
            ROWS.get(method, method),
            f"{setting.learning_rate:g}",
            f"{setting.embedding_factor:g}",
            "{:g}, {:g}".format(*setting.betas),
            f"{loss:.4f}",
        ]
        for method, trials in trials_by_method.items()
        for setting, loss in sorted(trials.items(), key=lambda item: item[1])
    ]
    lines = [
        f"A Llama of {options.layers} layers, width {options.width}, {tokens:,} tokens a step, "
        f"{options.seeds} seeds.",
        "",
        *kfac_report.horizon_lines(losses_by_method, costs, ROWS),
        "",
        f"The trials with another seed, of {options.trial_steps:,} steps, AdamW's of "
        f"{max(options.horizons):,}, best first:",
        "",
        *table(["method", "rate", "embeddings' rate over it", "betas", "validation loss"], rows),
    ]
    return Section(
        title="Convergence", lines=lines, goals=kfac_report.horizon_goals(losses_by_method, costs)
    )


def bases_section(options: KFACBenchmarkOptions) -> Section:
    """Measure how diagonal the second moment of gradients is in several bases."""
    shares = diagonal_shares(_common(options) | {"seed": 0, **BASES_TRAINING})
    bases = [*next(iter(shares.values()))]
    lines = [
        "The share of the second moment of gradients that is on its diagonal, in bases made of "
        "other gradients; means over layers.",
        "",
        *table(
            ["basis", *shares],
            [[basis, *(f"{row[basis]:.3f}" for row in shares.values())] for basis in bases],
        ),
    ]
    return Section(title="Bases", lines=lines)


def report(options: KFACBenchmarkOptions, _: Path) -> str:
    """Measure all chosen parts and return the report."""
    check(options)
    kept = options.trainings or (options.output and f"{options.output}.trainings")
    jobs = options.jobs or (len(os.sched_getaffinity(0)) if options.device == "cpu" else 1)
    trainings = Trainings(_common(options), jobs=jobs, kept=Path(kept) if kept else None)
    sections: list[Section] = []
    if "convergence" in options.only:
        sections.append(convergence_section(options, trainings))
    if "bases" in options.only:
        sections.append(bases_section(options))
    if "step" in options.only:
        sections += step_sections(options, trainings)
    facts = machine(["torch", "transformers"])
    if options.device == "cuda":
        facts.append(f"GPU: {torch.cuda.get_device_name()}")
    return render("K-FAC", facts, sections)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    description = "Compares K-FAC with other optimizers."
    return run_benchmark("kfac", description, KFACBenchmarkOptions, report, argv)


if __name__ == "__main__":
    sys.exit(main())
