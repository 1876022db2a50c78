"""Compare training with nanoGPT, llm-pytorch and Hugging Face's Trainer.

python -m benchmarks.train --help; benchmarks/README.md explains how to install the peers.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.measure import Case, Usage, interleave, median, run
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    at_least,
    at_most,
    machine,
    program_table,
    render,
    run_benchmark,
    spread,
    table,
)
from benchmarks.shapes import SHAPES, Inputs, Shape, make_inputs
from benchmarks.training import ROOT, llm_pytorch_case, nanogpt_case, our_case, peer_case
from llm.config.options import option
from llm.errors import ConfigError

_PACKAGES = ("torch", "transformers", "accelerate", "numpy")
Part = Literal["speed", "start", "scaling", "long"]
OURS, BARE, NANO, ANCESTOR, TRAINER = (
    "llm",
    "bare loop",
    "nanoGPT eager",
    "llm-pytorch",
    "HF Trainer",
)


@dataclass(frozen=True, kw_only=True)
class TrainBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    shapes: tuple[Literal["A", "B", "C", "toy"], ...] = option(
        ("A", "B", "C"), "Models and batches.", group="Run"
    )
    only: tuple[Part, ...] = option(
        ("speed", "start", "scaling", "long"),
        "Parts to measure: speed (and memory), start (to the first step), scaling (two "
        "processes), long (10,000 steps).",
        group="Run",
    )
    repeats: int = option(5, "Runs of each program, interleaved.", group="Run", at_least=1)
    long_steps: int = option(10_000, "Steps of the long run.", group="Run", at_least=20)
    nanogpt: str | None = option(None, "A checkout of nanoGPT.", group="Peers")
    compiled: bool = option(False, "Measure nanoGPT also compiled.", group="Peers")
    llm_pytorch: str | None = option(
        None, "The folder that `pip install --target` has put llm-pytorch into.", group="Peers"
    )
    hf_trainer: bool = option(False, "Also measure Hugging Face's Trainer.", group="Peers")
    peer_python: str = option(
        sys.executable, "The Python that runs nanoGPT and llm-pytorch.", group="Peers"
    )


def check(options: TrainBenchmarkOptions) -> None:
    """Refuse options that cannot work.

    Raises:
        ConfigError: A path does not hold the program that it should.
    """
    for name, file in (("nanogpt", "train.py"), ("llm_pytorch", "llm/trainers/gpt/main.py")):
        path = getattr(options, name)
        if path is not None and not Path(path, file).is_file():
            raise ConfigError(f"--{name} {path} holds no {file}.")
    if shutil.which(options.peer_python) is None:
        raise ConfigError(f"--peer_python {options.peer_python} cannot be run.")


def cases_of(
    options: TrainBenchmarkOptions, shape: Shape, inputs: Inputs, folder: Path
) -> list[Case]:
    """Return all programs, each training one shape."""
    cases = [
        our_case(shape, inputs, folder, name=OURS),
        peer_case(BARE, "bare_loop", shape, inputs, folder),
    ]
    python = str(Path(shutil.which(options.peer_python) or "").absolute())
    if options.nanogpt is not None:
        checkout = Path(options.nanogpt).resolve()
        for compiled in (False, True)[: 1 + options.compiled]:
            cases.append(
                nanogpt_case(
                    shape, inputs, folder, checkout=checkout, python=python, compiled=compiled
                )
            )
    if options.llm_pytorch is not None:
        checkout = Path(options.llm_pytorch).resolve()
        cases.append(llm_pytorch_case(shape, inputs, folder, checkout=checkout, python=python))
    if options.hf_trainer:
        cases.append(peer_case(TRAINER, "hf_trainer", shape, inputs, folder))
    return cases


def matmul_flops(folder: Path) -> float:
    """Return the FLOP/s of large matrix products on this machine, with torch's default threads."""
    command = [sys.executable, "-m", "benchmarks.peers.matmul"]
    case = Case(
        name="matmul",
        command=command,
        folder=folder / "matmul",
        environment={"PYTHONPATH": str(ROOT)},
    )
    return float(run(case).reported["gflops"]) * 1e9


def measure_speed(options: TrainBenchmarkOptions, shape: Shape, folder: Path) -> Section:
    """Measure speed, peak memory and time to the first step of all programs on one shape."""
    inputs = make_inputs(shape, folder / "inputs")
    cases = cases_of(options, shape, inputs, folder)
    run(cases[0])  # warm-up: tokenises, so that no measured run does
    peak = max(matmul_flops(folder), matmul_flops(folder))
    results = interleave(cases, options.repeats)
    peak = max(peak, matmul_flops(folder))

    def cells(name: str, runs: Sequence[Usage]) -> Sequence[str]:
        speed = median(runs, "tokens_per_second")
        ours = median(results[OURS], "tokens_per_second") if results[OURS] else float("nan")
        first = spread(runs, "milestone_seconds", 1)
        return [
            spread(runs, "tokens_per_second", 0),
            f"{ours / speed:.2f}",
            f"{speed * shape.flops_per_token / peak:.0%}",
            spread(runs, "peak_megabytes", 0),
            "" if first.startswith("nan") else first,
        ]

    header = ["program", "tokens/s", "llm is", "of matmul", "peak MB", "first step, s"]
    lines = program_table(header, results, cells)
    note = f"Matrix products reached {peak / 1e9:.0f} GFLOP/s before or after."
    return Section(title=str(shape), lines=[*lines, "", note], goals=goals(shape, results, peak))


def goals(shape: Shape, results: Mapping[str, Sequence[Usage]], peak: float) -> list[Goal]:
    """Return the goals of a shape against the programs that ran."""
    bounds = {
        NANO: {"A": 1.0, "B": 1.35, "C": 1.25},
        ANCESTOR: {"A": 1.5, "B": 1.6, "C": 1.2},
        BARE: {"A": 0.97, "C": 0.99},
    }
    memory = {NANO: {"B": 0.68, "C": 0.86}, ANCESTOR: {"C": 0.59}}
    found = []
    for peer, by_shape in bounds.items():
        if results.get(peer) and shape.name in by_shape:
            ratio = _ratio(results, peer, "tokens_per_second")
            found.append(at_least(f"{shape.name}: speed of {peer}", ratio, by_shape[shape.name]))
    for peer, by_shape in memory.items():
        if results.get(peer) and shape.name in by_shape:
            ratio = _ratio(results, peer, "peak_megabytes")
            what = f"{shape.name}: peak memory of {peer}"
            found.append(at_most(what, ratio, by_shape[shape.name], "x"))
    if shape.name == "C":
        share = median(results[OURS], "tokens_per_second") * shape.flops_per_token / peak
        found.append(at_least("C: share of the matrix product's rate", share, 0.85))
    return found


def _ratio(results: Mapping[str, Sequence[Usage]], peer: str, figure: str) -> float:
    return median(results[OURS], figure) / median(results[peer], figure)


def measure_start(options: TrainBenchmarkOptions, folder: Path) -> Section:
    """Measure the time from the command to the first step, and of importing the model's class."""
    shape = replace(SHAPES["A"], steps=10)
    inputs = make_inputs(shape, folder / "inputs")
    ours = our_case(shape, inputs, folder, name=OURS, flags=("--logging_steps", "1"))
    run(ours)
    source = "from transformers import GPT2LMHeadModel"
    imports = Case(
        name="import of the model's class",
        command=[sys.executable, "-c", source],
        folder=folder / "import",
    )
    helped = Case(
        name="--help",
        command=[sys.executable, "-m", "llm.trainers.gpt", "--help"],
        folder=folder / "help",
        environment={"PYTHONPATH": str(ROOT)},
    )
    others = cases_of(options, shape, inputs, folder)[2:]
    results = interleave([ours, imports, helped, *others], options.repeats)
    figure = {imports.name: "wall_seconds", helped.name: "wall_seconds"}
    lines = program_table(
        ["program", "s"],
        {name: runs for name, runs in results.items() if name != TRAINER},
        lambda name, runs: [spread(runs, figure.get(name, "milestone_seconds"))],
    )
    first = median(results[OURS], "milestone_seconds")
    reached = [
        at_most(
            "first step, beyond the import of the model's class",
            first - median(results[imports.name], "wall_seconds"),
            1.0,
            " s",
        ),
        at_most("--help", median(results[helped.name], "wall_seconds"), 0.3, " s"),
    ]
    if results.get(ANCESTOR):
        ratio = first / median(results[ANCESTOR], "milestone_seconds")
        reached.append(at_most("first step, over llm-pytorch", ratio, 0.8, "x"))
    return Section(title="Start to first step (A)", lines=lines, goals=reached)


def measure_scaling(options: TrainBenchmarkOptions, shape: Shape, folder: Path) -> Section:
    """Compare two processes of one thread with one of two threads, on the same global batch."""
    inputs = make_inputs(shape, folder / "inputs")
    one, two = "1 process x 2 threads", "2 processes x 1 thread"
    cases = [
        our_case(shape, inputs, folder, name=one, threads=2),
        our_case(shape, inputs, folder, name=two, threads=1, ranks=2),
    ]
    run(cases[0])
    results = interleave(cases, options.repeats)
    lines = program_table(
        ["processes", "tokens/s", "peak MB of all"],
        results,
        lambda _, runs: [spread(runs, "tokens_per_second", 0), spread(runs, "peak_megabytes", 0)],
    )
    reached = []
    if results[one] and results[two]:
        ratio = median(results[two], "tokens_per_second") / median(
            results[one], "tokens_per_second"
        )
        reached.append(at_least(f"{shape.name}: two processes", ratio, 0.95))
    return Section(title=f"Data parallelism, {shape}", lines=lines, goals=reached)


def measure_long(options: TrainBenchmarkOptions, folder: Path) -> Section:
    """Measure whether step time and memory grow over thousands of steps."""
    shape = replace(SHAPES["toy"], steps=options.long_steps)
    inputs = make_inputs(shape, folder / "inputs")
    case = our_case(shape, inputs, folder)
    run(case)
    lines = (case.folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    rows = [
        [f"{r['step']:,}", f"{r['ms_per_step']:.2f}", f"{r['memory'] / 1e6:.1f}"] for r in records
    ]
    # The first tenth does not count: allocators, the first log file, TensorBoard.
    memory = records[-1]["memory"] / records[1]["memory"] - 1
    half = len(records) // 2
    early, late = (
        sorted(r["ms_per_step"] for r in part)[len(part) // 2]
        for part in (records[1 : half + 1], records[half:])
    )
    return Section(
        title=f"{options.long_steps:,} steps ({shape})",
        lines=table(["step", "ms a step", "resident MB"], rows),
        goals=[
            at_most("growth of resident memory after the first tenth", 100 * memory, 1.0, " %"),
            at_most("ms per step, second half over the first", late / early, 1.05, "x"),
        ],
    )


def report(options: TrainBenchmarkOptions, folder: Path) -> str:
    """Measure all chosen parts and return the report."""
    check(options)
    facts = [
        *machine(_PACKAGES),
        f"Medians of {options.repeats} interleaved runs, smallest and largest in brackets; the "
        "speed of a run is that of its median step (our log: of its median tenth) after the "
        "first fifth; memory is that of the whole process tree",
    ]
    sections = []
    if "speed" in options.only:
        for name in options.shapes:
            sections.append(measure_speed(options, SHAPES[name], folder / f"speed-{name}"))
    if "start" in options.only:
        sections.append(measure_start(options, folder / "start"))
    if "scaling" in options.only:
        shape = SHAPES["B"] if "B" in options.shapes else SHAPES[options.shapes[0]]
        sections.append(measure_scaling(options, shape, folder / "scaling"))
    if "long" in options.only:
        sections.append(measure_long(options, folder / "long"))
    return render("Training benchmark", facts, sections)


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "train", "Compares training with other programs.", TrainBenchmarkOptions, report
        )
    )
