"""Count what each optimizer launches in a step on a GPU, on the made-up device of the tests.

python -m benchmarks.launches [--num_layers 12] [--hidden_size 768]
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.measure import CaseFailed
from benchmarks.report import ReportOptions, Section, machine, render, run_benchmark, table
from benchmarks.training import ROOT
from llm.config.options import option
from llm.errors import ConfigError

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, bf16 moments": {"moment_dtype": "bf16"},
    "accumadamw": {"optimizer": "accumadamw"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "soap": {"optimizer": "soap"},
    "ekfac": {"kfac": True},
    "ekfac, Nesterov": {"kfac": True, "nesterov": True},
    "eigen": {"kfac": True, "kfac_method": "eigen"},
}


@dataclass(frozen=True, kw_only=True)
class LaunchesOptions(ReportOptions):
    """Options of the benchmark."""

    num_layers: int = option(12, "Layers of the GPT-2.", group="Run", at_least=1)
    hidden_size: int = option(768, "Its width, a multiple of 64.", group="Run", at_least=64)
    steps: int = option(10, "Steps to count.", group="Run", at_least=1)
    optimizers: tuple[str, ...] = option((), "Rows of the table; by default all.", group="Run")


def count(options: LaunchesOptions, settings: dict[str, Any]) -> list[int]:
    """Return the launches of each step.

    Args:
        options: The model and the number of steps.
        settings: Of the optimizer.
    """
    model = {
        "num_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.hidden_size // 64,
    }
    command = [sys.executable, "-m", "tests.support.made_up_run", json.dumps(model | settings)]
    done = subprocess.run(
        [*command, str(options.steps)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CaseFailed(f"{settings}: {done.stderr[-2000:]}")
    counts: list[int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def report(options: LaunchesOptions, folder: Path) -> str:
    """Count for all optimizers and return the report."""
    unknown = [name for name in options.optimizers if name not in OPTIMIZERS]
    if unknown:
        raise ConfigError(f"--optimizers {unknown[0]} is none of: {'; '.join(OPTIMIZERS)}.")
    rows = []
    for name in options.optimizers or OPTIMIZERS:
        counts = count(options, OPTIMIZERS[name])
        rows.append([name, f"{mean(counts):,.0f} ({max(counts):,})"])
    title = (
        f"Launches of an optimizer step: GPT-2 with {options.num_layers} layers, "
        f"width {options.hidden_size}"
    )
    facts = [
        *machine(("torch", "transformers")),
        f"Means over {options.steps} steps late in a run, the largest in brackets. An operation on "
        "a list of tensors counts once, and so does a decomposition; a GPU launches more for them",
    ]
    section = Section(title=title, lines=table(["optimizer", "launches"], rows))
    return render("Launches", facts, [section])


if __name__ == "__main__":
    sys.exit(
        run_benchmark("launches", "Counts the launches of each optimizer.", LaunchesOptions, report)
    )
