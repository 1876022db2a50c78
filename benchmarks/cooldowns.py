"""Branches with cooldowns against runs of their lengths, and means of checkpoints against the last.

python -m benchmarks.cooldowns [--lengths 300 450 600] [--seeds 5]
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import CaseFailed, say
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    at_most,
    machine,
    render,
    run_benchmark,
    table,
)
from llm.config.options import option

_ROOT = Path(__file__).parent.parent
_STEP_TOKENS = 8 * 128
"""Of the quick start."""


@dataclass(frozen=True, kw_only=True)
class CooldownsBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    lengths: tuple[int, ...] = option((300, 450, 600), "Steps of the runs.", group="Run")
    cooldown: float = option(
        0.2, "Share of a length in which the rate falls.", group="Run", above=0, below=1
    )
    cooldown_shape: Literal["linear", "sqrt", "cosine"] = option(
        "sqrt", "How it falls.", group="Run"
    )
    learning_rate: float = option(6e-3, "Rate of the stable runs.", group="Run", above=0)
    cosine_rates: tuple[float, ...] = option(
        (6e-3, 1.2e-2),
        "Peaks of the separate runs, of which the best counts.",
        group="Run",
        above=0,
    )
    model: str = option("n_layer=2,n_embd=64,n_head=2", "Changes to the model.", group="Run")
    seeds: int = option(5, "Stable runs whose checkpoints are averaged.", group="Run", at_least=1)
    every: int = option(20, "Steps between these checkpoints.", group="Run", at_least=1)


class Runs:
    """Trainings of the quick start's text in one folder; each is a process of its own.

    Args:
        options: What they have in common.
        folder: Where they write.
    """

    def __init__(self, options: CooldownsBenchmarkOptions, folder: Path) -> None:
        self.folder = folder
        self._common = {
            "config": _ROOT / "examples" / "quickstart.toml",
            "config_overrides": options.model,
            "learning_rate": options.learning_rate,
            "num_warmup_steps": min(options.lengths) // 10,
            "sample_prompt": "none",
            "keep_checkpoints": "none",
            "report_to": "none",
            "device_peak_tflops": 1,
            "data_cache_dir": folder / "cache",
            "overwrite_output_dir": True,
            "no_resume_from_checkpoint": True,
        }

    def train(self, name: str, *, steps: int, **options: Any) -> float:
        """Train and return the validation loss at the end, in nats a token."""
        given = {"max_train_steps": steps, "checkpointing_steps": steps, **options}
        self._start(name, {**self._common, "eval_steps": steps, **given})
        return self._loss(name, "all_results.json", "eval_loss")

    def branch(self, name: str, parent: Path, **options: Any) -> float:
        """Train a branch by its parent's options; return the validation loss at the end."""
        self._start(name, {"branch_from": parent, **options})
        return self._loss(name, "all_results.json", "eval_loss")

    def evaluate(self, model: Path) -> float:
        """Return the validation loss of an exported model, in nats a token."""
        name = f"evaluation-of-{model.name}"
        evaluation = {"model_name_or_path": model, "config_overrides": "none", "eval_only": True}
        self._start(name, {**self._common, **evaluation})
        return self._loss(name, "eval_results.json", "loss")

    def average(self, name: str, number: int) -> Path:
        """Write the mean of the last checkpoints of a run; return its folder."""
        output = self.folder / f"mean-of-{name}"
        words = ["average", self.folder / name, "--last", number, "--output", output]
        self._run("llm", ["checkpoints", *words])
        return output

    def _start(self, name: str, options: Mapping[str, Any]) -> None:
        say(name)
        words: list[Any] = []
        for key, value in {"output_dir": self.folder / name, **options}.items():
            words += [f"--{key}"] if value is True else [f"--{key}", value]
        self._run("llm.trainers.gpt", words)

    def _run(self, module: str, words: Sequence[Any]) -> None:
        command = [sys.executable, "-m", module, *map(str, words)]
        done = subprocess.run(command, cwd=_ROOT, env=os.environ, capture_output=True, text=True)
        if done.returncode:
            raise CaseFailed(f"{module}: {(done.stdout + done.stderr)[-600:]}")

    def _loss(self, name: str, file: str, key: str) -> float:
        return float(json.loads((self.folder / name / file).read_text(encoding="utf-8"))[key])


STABLE = {"lr_scheduler_type": "constant_with_warmup", "min_learning_rate": 0}


def measure_branches(options: CooldownsBenchmarkOptions, runs: Runs) -> Section:
    """Compare the branches of one stable run with cosine runs of the same lengths."""
    lengths = sorted(options.lengths)
    cooldowns = {length: max(1, round(options.cooldown * length)) for length in lengths}
    starts = {length: length - cooldowns[length] for length in lengths}
    every = math.gcd(*starts.values())
    runs.train("stable", steps=starts[lengths[-1]], checkpointing_steps=every, **STABLE)
    rows, above = [], []
    for length in lengths:
        alone, rate = min(
            (runs.train(f"cosine-{length}-at-{rate:g}", steps=length, learning_rate=rate), rate)
            for rate in options.cosine_rates
        )
        branch = runs.branch(
            f"branch-{length}",
            runs.folder / "stable" / str(starts[length]),
            cooldown_tokens=cooldowns[length] * _STEP_TOKENS,
            cooldown_shape=options.cooldown_shape,
        )
        above.append(branch - alone)
        cells = [str(length), str(cooldowns[length]), f"{rate:g}", f"{alone:.4f}"]
        rows.append([*cells, f"{branch:.4f}", f"{branch - alone:+.4f}"])
    separate = sum(lengths)
    shared = starts[lengths[-1]] + sum(cooldowns.values())
    head = ["steps", "of them cooldown", "best rate", "cosine run", "branch", "difference"]
    return Section(
        title="One stable run, and a branch with a cooldown for each length",
        lines=[
            f"Validation loss in nats a token. The stable run and its branches take {shared:,} "
            f"steps, the separate runs {separate:,} at each of their peaks, "
            f"{', '.join(f'{rate:g}' for rate in options.cosine_rates)}, of which the best counts.",
            "",
            *table(head, rows),
        ],
        goals=[
            at_most("steps, relative to separate runs", shared / separate, 0.7, "x"),
            at_most("largest loss above that of a separate run", max(above), 0.02, " nats"),
        ],
    )


def measure_averages(options: CooldownsBenchmarkOptions, runs: Runs) -> Section:
    """Compare the mean of the last five checkpoints of stable runs with the last one."""
    steps = max(options.lengths) - round(options.cooldown * max(options.lengths))
    rows, better = [], 0
    for seed in range(1, options.seeds + 1):
        name = f"seed-{seed}"
        last = runs.train(name, steps=steps, seed=seed, checkpointing_steps=options.every, **STABLE)
        mean = runs.evaluate(runs.average(name, 5))
        better += mean < last
        rows.append([str(seed), f"{last:.4f}", f"{mean:.4f}", f"{mean - last:+.4f}"])
    return Section(
        title="The mean of the last five stable checkpoints",
        lines=[
            f"Validation loss after {steps:,} steps at a constant rate, in nats a token, with a "
            f"checkpoint every {options.every} steps.",
            "",
            *table(["seed", "last checkpoint", "mean of five", "difference"], rows),
        ],
        goals=[
            Goal(
                what="seeds on which the mean beats the last checkpoint: at least 4 of 5",
                measured=f"{better} of {options.seeds}",
                met=better >= 0.8 * options.seeds,
            )
        ],
    )


def report(options: CooldownsBenchmarkOptions, folder: Path) -> str:
    """Measure both and return the report."""
    runs = Runs(options, folder)
    facts = [
        *machine(["torch", "transformers"]),
        f"the quick start's text and recipe, with --config_overrides {options.model} and "
        f"a stable rate of {options.learning_rate:g}; cooldowns by {options.cooldown_shape}",
    ]
    sections = [measure_branches(options, runs), measure_averages(options, runs)]
    return render("Branches, cooldowns and means", facts, sections)


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "cooldowns",
            "Compares branches of one stable run with separate runs, and means of checkpoints.",
            CooldownsBenchmarkOptions,
            report,
        )
    )
