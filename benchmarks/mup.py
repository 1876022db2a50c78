"""How far the best learning rate moves with the width of a model, with and without muP.

python -m benchmarks.mup --help. GPT-2s of several widths train on the characters of a text at each
of several learning rates, without muP and with it. The narrowest is the base model of the others.
Finished trainings are kept in a file, so that a stopped benchmark goes on where it was.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.characters import Text, validation_loss
from benchmarks.measure import say
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
from llm.models.build import build_model
from llm.models.configuration import load_config
from llm.models.loss import LanguageModelLoss
from llm.optim.adamw_and_sgd import make_optimizer
from llm.optim.groups import scale_learning_rates
from llm.optim.options import OptimizerOptions
from llm.optim.schedule import make_schedule
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import list_transforms, make_extensions

HEAD_DIM = 16

Losses = Mapping[int, Mapping[float, float]]
"""Validation losses by width and learning rate."""


@dataclass(frozen=True, kw_only=True)
class MuPBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    widths: tuple[int, ...] = option(
        (64, 128, 256, 512), "Widths, the base model's first.", group="Training", at_least=HEAD_DIM
    )
    learning_rates: tuple[float, ...] = option(
        tuple(2.0**power for power in range(-11, -5)),
        "Peak rates, in rising order, with and without muP.",
        group="Training",
        above=0,
    )
    text: str = option(
        "examples/data/shakespeare.txt", "Text, read as characters.", group="Training"
    )
    steps: int = option(200, "Steps of a training.", group="Training", at_least=2)
    batch_size: int = option(8, "Samples of a step.", group="Training", at_least=1)
    block_size: int = option(32, "Characters of a sample.", group="Training", at_least=2)
    layers: int = option(2, "Layers of the models.", group="Training", at_least=1)
    initializer_range: float = option(
        0.06,
        "Initial deviation of the base model's weights, which all widths have without muP.",
        group="Training",
        above=0,
    )
    seed: int = option(0, "Seed of weights and samples.", group="Training", at_least=0)
    kept: str = option(
        "runs/mup.jsonl", "File to which each finished training is added.", group="Run"
    )
    plot: str | None = option(
        None, "PNG of the losses; needs `pip install 'llm-trainers[report]'`.", group="Run"
    )


def train(options: MuPBenchmarkOptions, case: Mapping[str, Any]) -> float:
    """Train a model of the benchmark.

    Args:
        options: What all trainings share.
        case: Its `width`, `learning_rate` and whether it trains under `mup`.

    Returns:
        Validation loss in nats a character.
    """
    text = Text(Path(options.text), batch_size=options.batch_size, block_size=options.block_size)
    size = {"vocab_size": len(text.vocab), "n_positions": options.block_size}
    zero = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id")
    overrides = size | dict.fromkeys(zero, 0) | {"initializer_range": options.initializer_range}
    shape = GPTConfig(
        model_type="gpt2",
        num_layers=options.layers,
        hidden_size=case["width"],
        num_attention_heads=case["width"] // HEAD_DIM,
        config_overrides=",".join(f"{name}={value}" for name, value in overrides.items()),
        mup=case["mup"],
        mup_base_width=options.widths[0],
    )
    config = load_config(shape)
    transforms = list_transforms(make_extensions(shape), config)
    model = build_model(
        shape,
        config,
        weights_from=None,
        seed=options.seed,
        device=torch.device("cpu"),
        vocab_size=len(text.vocab),
        transforms=transforms,
    )
    settings = OptimizerOptions(
        learning_rate=case["learning_rate"],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    optimizer = make_optimizer(settings, model)
    for transform in transforms:
        scale_learning_rates(optimizer, model, transform.rate_factor)
    schedule = make_schedule(settings, total_steps=options.steps, warmup_steps=options.steps // 10)
    loss = LanguageModelLoss(model)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        objective, _ = loss(*text.batch("train", generator))
        (objective / (options.batch_size * options.block_size)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step) * group.get("rate_factor", 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return validation_loss(loss, text)


class Trainings:
    """Trainings that run once each, also over several starts of the benchmark.

    Args:
        options: What all trainings share, and the file of finished ones.
    """

    def __init__(self, options: MuPBenchmarkOptions) -> None:
        self._options = options
        names = ("text", "steps", "batch_size", "block_size", "layers", "initializer_range", "seed")
        self._shared = {name: getattr(options, name) for name in names} | {
            "base": options.widths[0]
        }
        self._path = Path(options.kept)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._kept: dict[str, float] = {}
        for line in lines:
            case, loss = json.loads(line)
            self._kept[json.dumps(case)] = loss

    def losses(self, *, mup: bool) -> Losses:
        """Train at every width and rate; at the base width muP changes nothing."""
        widths, rates = self._options.widths, self._options.learning_rates
        return {
            width: {rate: self._loss(mup and width > widths[0], width, rate) for rate in rates}
            for width in widths
        }

    def _loss(self, mup: bool, width: int, rate: float) -> float:
        case = {**self._shared, "mup": mup, "width": width, "learning_rate": rate}
        key = json.dumps(case)
        if key not in self._kept:
            self._kept[key] = train(self._options, case)
            with self._path.open("a") as file:
                file.write(json.dumps([case, self._kept[key]]) + "\n")
            say(f"mup={mup} width={width} learning_rate={rate:g}: {self._kept[key]:.4f}")
        return self._kept[key]


def best(losses: Mapping[float, float]) -> float:
    """Return the learning rate of the smallest loss; one that is not a number is the largest."""
    return min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])


def section(title: str, losses: Losses) -> Section:
    """Return the table of the losses of one way, the best of each width in bold."""
    widths = [*losses]
    rates = [*losses[widths[0]]]
    first = best(losses[widths[0]])
    rows = []
    for width, of_width in losses.items():
        own = best(of_width)
        cells = [f"**{of_width[r]:.3f}**" if r == own else f"{of_width[r]:.3f}" for r in rates]
        cost = of_width[first] - of_width[own]
        rows.append([str(width), *cells, f"{own:.2g}", f"{cost:.3f}"])
    header = ["width", *(f"{rate:.2g}" for rate in rates), "best rate", f"lost at {first:.2g}"]
    return Section(title=title, lines=table(header, rows))


def shift(losses: Losses) -> float:
    """Return how many factors of two lie between the best rates of the first and last width."""
    widths = [*losses]
    return abs(math.log2(best(losses[widths[-1]]) / best(losses[widths[0]])))


def plot(path: str, found: Mapping[str, Losses]) -> None:
    """Draw loss against learning rate, a panel for each way and a curve for each width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot

    figure, axes = pyplot.subplots(
        1, len(found), figsize=(5 * len(found), 4), sharey=True, layout="constrained"
    )
    for axis, (title, losses) in zip(axes, found.items(), strict=True):
        colors = colormaps["viridis"].resampled(len(losses) + 1)
        for number, (width, of_width) in enumerate(losses.items()):
            rate = best(of_width)
            axis.plot([*of_width], [*of_width.values()], color=colors(number), label=f"{width}")
            axis.plot([rate], [of_width[rate]], "o", color=colors(number))
        axis.set_xscale("log", base=2)
        axis.set_title(title)
        axis.set_xlabel("learning rate")
    lowest = min(of_width[best(of_width)] for of in found.values() for of_width in of.values())
    axes[0].set_ylim(lowest - 0.03, lowest + 0.5)
    axes[0].set_ylabel("validation loss, nats a character")
    axes[0].legend(title="width")
    figure.savefig(path, dpi=120)


def report(options: MuPBenchmarkOptions, _: Path) -> str:
    """Train everything that is not kept, and return the report."""
    if not Path(options.text).is_file():
        raise ConfigError(f"--text {options.text} is no file.")
    check_folder("plot", options.plot)
    Path(options.kept).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    trainings = Trainings(options)
    found = {
        "without --mup": trainings.losses(mup=False),
        "with --mup": trainings.losses(mup=True),
    }
    if options.plot is not None:
        plot(options.plot, found)
    shifts = {title: shift(losses) for title, losses in found.items()}
    span = f"from width {options.widths[0]} to {options.widths[-1]}"
    goals: list[Goal] = [
        at_most(f"best rate {span} with --mup", shifts["with --mup"], 1, " factors of two")
    ]
    tokens = options.batch_size * options.block_size
    moved = Section(
        title="How far the best rate moves",
        lines=[
            f"GPT-2 of {options.layers} layers, heads of {HEAD_DIM}, {tokens:,} characters a step, "
            f"{options.steps} steps, a linear schedule, AdamW with betas 0.9 and 0.95 and weight "
            f"decay 0.1, initial deviation {options.initializer_range:g}, seed {options.seed}; "
            f"`--mup_base_width {options.widths[0]}`. Validation losses in nats a character; the "
            f"last column is what a width loses at the best rate of width {options.widths[0]}.",
            "",
            *(f"- {title}: {value:g} factors of two {span}" for title, value in shifts.items()),
        ],
        goals=goals,
    )
    sections = [section(title, losses) for title, losses in found.items()]
    return render("muP", machine(["torch", "transformers"]), [moved, *sections])


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    description = "Measures how far the best learning rate moves with the width, by muP or not."
    return run_benchmark("mup", description, MuPBenchmarkOptions, report, argv)


if __name__ == "__main__":
    sys.exit(main())
