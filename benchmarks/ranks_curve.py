"""Train twice, once on one rank and once stopped and resumed on 1, 4 and 2, and draw both curves.

python -m benchmarks.ranks_curve --plot docs/images/ranks [--steps 400]

The quick start's model trains on the CPU; ranks talk through gloo. Each part of the second run but
the last gets SIGTERM, saves, and ends; the same command with another number of ranks resumes it.
--plot PREFIX writes PREFIX-light.svg and PREFIX-dark.svg, transparent, for pages of both colors.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import CaseFailed, say
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    check_folder,
    machine,
    render,
    run_benchmark,
    table,
)
from benchmarks.training import ROOT
from llm.config.options import option
from llm.runtime.files import read_json_lines

_RANKS = (1, 4, 2)
_COLORS = {1: "#3f7fdb", 4: "#e07b39", 2: "#2f9e6e"}
_LOOK_SECONDS = 0.05

Curve = dict[int, float]
"""Losses by step."""


@dataclass(frozen=True, kw_only=True)
class RanksOptions(ReportOptions):
    """Options of the benchmark."""

    steps: int = option(400, "Steps of a run.", group="Run", at_least=12)
    plot: str | None = option(None, "Prefix of the two pictures to write.", group="Output")


def _command(ranks: int, steps: int, output_dir: Path) -> list[str]:
    every = str(max(1, steps // 80))
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node", str(ranks), "-m", "llm.trainers.gpt"),
        *("--config", "examples/quickstart.toml", "--global_batch_size", "8"),
        *("--per_device_train_batch_size", "2", "--max_train_steps", str(steps)),
        *("--num_warmup_steps", str(steps // 8), "--logging_steps", every),
        *(
            "--eval_steps",
            str(steps),
            "--checkpointing_steps",
            str(steps),
            "--sample_prompt",
            "none",
        ),
        *("--data_cache_dir", str(output_dir.parent / "cache"), "--report_to", "none"),
        *("--output_dir", str(output_dir)),
    ]


def read_curve(output_dir: Path) -> Curve:
    """Return the losses of a run by step."""
    records = read_json_lines(output_dir / "metrics.jsonl")
    return {
        int(record["step"]): record["loss"] for record in records if record and "loss" in record
    }


def train(ranks: int, steps: int, output_dir: Path, stop_at: int | None = None) -> int:
    """Train until the end, or until a step is logged, and return the last step of the log.

    Raises:
        CaseFailed: The run ended with an error.
    """
    log = output_dir.with_suffix(".log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            _command(ranks, steps, output_dir),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        is_stopped = False
        while process.poll() is None:
            if not is_stopped and stop_at and max(read_curve(output_dir), default=0) >= stop_at:
                process.send_signal(signal.SIGTERM)
                is_stopped = True
            time.sleep(_LOOK_SECONDS)
    if process.returncode and not is_stopped:
        raise CaseFailed(f"{output_dir.name}: {log.read_text(errors='replace').strip()[-600:]}")
    last_step = max(read_curve(output_dir))
    say(f"{output_dir.name}: step {last_step} on {ranks} ranks")
    return last_step


def draw(prefix: str, straight: Curve, resumed: Curve, ends: list[int]) -> None:
    """Draw both curves and their difference, for light and for dark pages.

    Args:
        prefix: Path of the pictures without `-light.svg`.
        straight: The run on one rank.
        resumed: The run that was stopped and resumed.
        ends: The last step of each part of the second run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, foreground in (("light", "#333333"), ("dark", "#dddddd")):
        style: Any = {
            **dict.fromkeys(
                ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"),
                foreground,
            ),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": 11,
            "svg.hashsalt": "ranks",
        }
        with pyplot.rc_context(style):
            figure, (top, bottom) = pyplot.subplots(
                2, sharex=True, figsize=(7.2, 4.4), height_ratios=(3, 1), layout="constrained"
            )
            top.plot(
                *zip(*sorted(straight.items()), strict=True), color=foreground, lw=5, alpha=0.25
            )
            start = 0
            for ranks, end in zip(_RANKS, ends, strict=True):
                part = {step: loss for step, loss in resumed.items() if start < step <= end}
                label = f"{ranks} rank{'s' if ranks > 1 else ''}"
                top.plot(
                    *zip(*sorted(part.items()), strict=True), color=_COLORS[ranks], label=label
                )
                differences = [abs(loss - straight[step]) for step, loss in sorted(part.items())]
                bottom.plot(sorted(part), differences, color=_COLORS[ranks])
                start = end
            for axis in (top, bottom):
                for end in ends[:-1]:
                    axis.axvline(end, color=foreground, lw=0.8, ls=":")
            top.plot([], [], color=foreground, lw=5, alpha=0.25, label="1 rank, never stopped")
            top.set_ylabel("training loss")
            top.legend(frameon=False)
            bottom.set_ylabel("difference")
            bottom.ticklabel_format(axis="y", scilimits=(0, 0))
            bottom.set_xlabel("step")
            figure.savefig(f"{prefix}-{name}.svg", transparent=True, metadata={"Date": None})
            pyplot.close(figure)


def report(options: RanksOptions, folder: Path) -> str:
    """Train both runs and return the report.

    Raises:
        CaseFailed: A run ended with an error.
    """
    check_folder("plot", options.plot)
    check_folder("output", options.output)
    train(1, options.steps, folder / "straight")
    stops = [options.steps // 3, 2 * options.steps // 3, None]
    ends = [
        train(ranks, options.steps, folder / "resumed", stop)
        for ranks, stop in zip(_RANKS, stops, strict=True)
    ]
    straight, resumed = read_curve(folder / "straight"), read_curve(folder / "resumed")
    common = sorted(straight.keys() & resumed.keys())
    largest = max(abs(straight[step] - resumed[step]) for step in common)
    if options.plot is not None:
        draw(options.plot, straight, {step: resumed[step] for step in common}, ends)
    rows = [
        [str(ranks), str(end), f"{resumed[max(s for s in common if s <= end)]:.6f}"]
        for ranks, end in zip(_RANKS, ends, strict=True)
    ]
    section = Section(
        title="Curves",
        lines=[
            *table(["ranks", "until step", "last loss"], rows),
            "",
            f"Without a stop, on one rank, the last loss is {straight[common[-1]]:.6f}.",
        ],
        goals=[
            Goal(
                what=f"Largest difference of {len(common)} losses: at most 0.001",
                measured=f"{largest:.2g}",
                met=len(common) > 1 and largest <= 0.001,
            )
        ],
    )
    facts = [*machine(("torch", "transformers", "accelerate")), f"{options.steps} steps, gloo"]
    return render("A run on 1, 4 and 2 ranks", facts, [section])


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "ranks_curve", "Draws a run that resumes on 1, 4 and 2 ranks.", RanksOptions, report
        )
    )
