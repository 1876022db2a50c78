"""Measure training on a GPU: speed, model FLOP utilization and memory of several programs.

python -m benchmarks.gpu --help. Each result is kept and the report written as soon as a program has
been measured, and a benchmark that was stopped continues from there. Without a GPU `--models toy
toy-llama toy-moe` runs everything on the CPU, which only shows that the benchmark works.
"""

import importlib.metadata
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_programs import (
    MODELS,
    Model,
    Training,
    flops_per_token,
    nanogpt_program,
    our_program,
    peer_program,
    write_model,
    write_tokens,
)
from benchmarks.gpu_timing import Period, Program, is_out_of_memory, time_program
from benchmarks.measure import CaseFailed, say
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    at_least,
    at_most,
    check_folder,
    machine,
    render,
    run_benchmark,
    table,
    write_report,
)
from llm.config.options import option
from llm.errors import ConfigError

ModelName = Literal["124M", "350M", "1.1B", "3B", "8B", "OLMoE", "toy", "toy-llama", "toy-moe"]
_TOYS = {"toy", "toy-llama", "toy-moe"}
Part = Literal["speed", "precisions", "optimizers", "kfac"]
_BF16 = ("--mixed_precision", "bf16", "--torch_compile")
_KFAC_INTERVAL = 50
"""Steps between the updates of K-FAC's factors and bases."""
_KFAC_FLAGS = (
    *("--kfac", "--kfac_factor_update_steps", str(_KFAC_INTERVAL)),
    *("--kfac_inv_update_steps", str(_KFAC_INTERVAL)),
)
_PRECISIONS = {
    "llm, not compiled": ("--mixed_precision", "bf16", "--no_torch_compile"),
    "llm, fp16": ("--mixed_precision", "fp16", "--torch_compile"),
    "llm, TF32": ("--mixed_precision", "no", "--torch_compile"),
    "llm, fp8": ("--mixed_precision", "fp8", "--torch_compile"),
}
"""Precisions other than compiled bf16."""
_RECOMPUTED = "llm, recomputed"
_OPTIMIZERS = {
    "llm, Muon": ("--optimizer", "muon"),
    "llm, SOAP": ("--optimizer", "soap"),
    "llm, EKFAC": _KFAC_FLAGS,
}
_FUSED = "llm, all fused kernels"
_FP8_HEAD = "llm, fp8 head"
_FLAGS = {
    _FUSED: ("--fused_kernels", "all"),
    _FP8_HEAD: ("--fp8_head",),
    _RECOMPUTED: ("--activation_checkpointing", "full", "--moment_dtype", "bf16"),
    **_OPTIMIZERS,
    "llm, K-FAC, 8k tokens": _KFAC_FLAGS,
}
"""Options besides the precision."""
_PEERS = {"plain loop": "plain_loop", "HF Trainer": "hf_trainer"}
_NANOGPT = "nanoGPT"
_KFAC = ("llm, AdamW, 8k tokens", "llm, K-FAC, 8k tokens")
_KFAC_TOKENS = 8192
_PROGRAMS = (
    *("llm", _NANOGPT, *_PEERS, _RECOMPUTED),
    *(*_PRECISIONS, _FUSED, _FP8_HEAD, *_OPTIMIZERS, *_KFAC),
)
_WARM_UP = 30
_LIMIT = 600.0
_LEAST_MFU = {"124M": 0.5, "350M": 0.5, "1.1B": 0.55}
_TORCHTITAN = (
    "torchtitan publishes 6,667 tokens/s per GPU, 33 to 39 % MFU, for Llama 3.1 8B on 8 H100, "
    "compiled, in bf16 (its benchmarks of December 2024)"
)


@dataclass(frozen=True, kw_only=True)
class GPUBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    models: tuple[ModelName, ...] = option(
        ("124M", "350M", "1.1B", "OLMoE"), "Models to train.", group="Run"
    )
    lengths: tuple[int, ...] = option(
        (1024, 2048, 4096),
        "Tokens of a sample. Only the first one is used for other parts than speed.",
        group="Run",
        at_least=2,
    )
    only: tuple[Part, ...] = option(
        ("speed", "precisions", "optimizers", "kfac"),
        "Parts to measure: all programs in bf16; our other precisions, uncompiled steps, and all "
        "fused kernels; our other optimizers; K-FAC's step and AdamW's with few tokens.",
        group="Run",
    )
    programs: tuple[str, ...] = option(
        (),
        "Programs to measure, in this order, such as llm and nanoGPT, which alternate with "
        "repeats; by default all of the parts.",
        group="Run",
    )
    seconds: float = option(
        10.0, "Seconds of steps that count, at least, after 30 steps.", group="Run", above=0
    )
    repeats: int = option(1, "Runs of each program, interleaved.", group="Run", at_least=1)
    rows: str | None = option(
        None,
        "File that keeps the results, so that a benchmark that was stopped continues; remove it "
        "when the code has changed. OUTPUT.rows if not given.",
        group="Run",
    )
    nanogpt: str | None = option(None, "A checkout of nanoGPT, for 124M and 350M.", group="Peers")
    peer_python: str = option(sys.executable, "The Python that runs nanoGPT.", group="Peers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A program to measure.

    Attributes:
        model: Name of the model.
        length: Tokens of a sample.
        program: Name of the program.
        repeat: Number of the run, from 0.
    """

    model: str
    length: int
    program: str
    repeat: int


@dataclass(frozen=True)
class Card:
    """The GPU.

    Attributes:
        name: As torch names it.
        memory: Bytes.
    """

    name: str
    memory: float


def check(options: GPUBenchmarkOptions, card: Card | None) -> None:
    """Refuse options that cannot work.

    Raises:
        ConfigError: The GPU, nanoGPT or a folder is missing.
    """
    if card is None and set(options.models) - _TOYS:
        raise ConfigError(
            "--models " + " ".join(options.models) + " need a GPU, and torch sees none; --models "
            "toy runs the programs without one."
        )
    unknown = [name for name in options.programs if name not in _PROGRAMS]
    if unknown:
        raise ConfigError(f"--programs {unknown[0]} is none of: {'; '.join(_PROGRAMS)}.")
    if options.nanogpt is not None and not Path(options.nanogpt, "train.py").is_file():
        raise ConfigError(f"--nanogpt {options.nanogpt} holds no train.py.")
    if shutil.which(options.peer_python) is None:
        raise ConfigError(f"--peer_python {options.peer_python} cannot be run.")
    check_folder("rows", options.rows)


def find_card() -> Card | None:
    """Return the GPU, which another process reads, so that this one takes none of its memory."""
    source = (
        "import json, torch\n"
        "if torch.cuda.is_available():\n"
        "    found = torch.cuda.get_device_properties(0)\n"
        "    print(json.dumps([found.name, found.total_memory]))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    return Card(*json.loads(done.stdout)) if done.stdout.strip() else None


def rows_of(options: GPUBenchmarkOptions) -> list[Row]:
    """Return what to measure: every program once before any of them is repeated."""
    found = []
    for repeat in range(options.repeats):
        for model in options.models:
            for length in options.lengths:
                programs = _programs_of(
                    options, MODELS[model], is_first=length == options.lengths[0]
                )
                found += [
                    Row(model=model, length=length, program=program, repeat=repeat)
                    for program in programs
                ]
    return found


def _programs_of(options: GPUBenchmarkOptions, shape: Model, *, is_first: bool) -> list[str]:
    """Return the programs to measure for a model at one length.

    Args:
        options: The options.
        shape: The model.
        is_first: Whether it is the first length, which all parts use.
    """
    programs: list[str] = []
    is_gpt2 = not (shape.is_llama or shape.num_experts)
    if "speed" in options.only and shape.recomputes:
        programs.append(_RECOMPUTED)
    elif "speed" in options.only:
        has_peer = options.nanogpt is not None and is_gpt2
        programs += ["llm", *[_NANOGPT] * has_peer, *_PEERS]
    if is_first and not shape.recomputes:
        if "precisions" in options.only:
            # GPT-2's layers have another type than those that multiply in float8.
            programs += [name for name in _PRECISIONS if name != "llm, fp8" or shape.is_llama]
            programs += [_FUSED, _FP8_HEAD]
        if not shape.num_experts:
            programs += _OPTIMIZERS if "optimizers" in options.only else ()
            programs += _KFAC if "kfac" in options.only else ()
    if not options.programs:
        return programs
    return [name for name in options.programs if name in programs]


class Kept:
    """The figures of finished rows, by row.

    Args:
        path: File with a line for each; None keeps none.
        conditions: GPU, version of torch and duration. Rows with other conditions are not used.
    """

    def __init__(self, path: Path | None, conditions: Mapping[str, Any]) -> None:
        self._path, self._conditions = path, dict(conditions)
        self.figures: dict[Row, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A benchmark that was killed may have left a line without its end.
        lines = [line for line in lines if line.endswith("\n")]
        path.write_text("".join(lines), encoding="utf-8")
        for row, of, figures in map(json.loads, lines):
            if of == self._conditions:
                self.figures[Row(**row)] = figures

    def add(self, row: Row, figures: dict[str, Any]) -> None:
        """Keep the figures of a row; a program that failed runs again next time."""
        self.figures[row] = figures
        say(f"{row.model}, {row.length}, {row.program}: {json.dumps(figures)}")
        if self._path is not None and "failed" not in figures:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([asdict(row), self._conditions, figures]) + "\n")


class Measurer:
    """Runs the programs.

    Args:
        options: The options.
        card: The GPU, if there is one.
        folder: Where inputs and working folders are.
    """

    def __init__(self, options: GPUBenchmarkOptions, card: Card | None, folder: Path) -> None:
        self._options, self._card, self._folder = options, card, folder
        self.model_folder = cache(self._model_folder)
        self._tokens_folder = cache(self._write_tokens)

    def _model_folder(self, model: str, length: int) -> Path:
        """Return the folder of a model's configuration."""
        folder = self._folder / "models" / f"{model}-{length}"
        write_model(MODELS[model], length, folder)
        return folder

    def _write_tokens(self, vocab_size: int) -> Path:
        folder = self._folder / f"tokens-{vocab_size}"
        write_tokens(vocab_size, folder)
        return folder

    def measure(self, row: Row) -> dict[str, Any]:
        """Return a program's figures, with half the batch while memory is short.

        Returns:
            The figures of `Timed` and `batch_size`, or the program's last words as `failed`.
        """
        shape = MODELS[row.model]
        memory = 80e9 if self._card is None else self._card.memory
        training = Training(
            model=self.model_folder(row.model, row.length),
            tokens=self._tokens_folder(shape.vocab_size),
            shape=shape,
            length=row.length,
            batch_size=shape.batch_size(row.length, memory=memory),
            on_gpu=self._card is not None,
        )
        period = Period(warm_up=_WARM_UP, seconds=self._options.seconds)
        if row.program in (*_OPTIMIZERS, *_KFAC):
            # Its first steps update more often; then whole intervals, with the steps that update.
            period = replace(period, warm_up=2 * _KFAC_INTERVAL, multiple=_KFAC_INTERVAL)
        if row.program in _KFAC:
            samples = max(1, _KFAC_TOKENS // row.length)
            training = replace(training, batch_size=min(training.batch_size, samples))
        while True:
            try:
                timed = time_program(self.program(row, training), period, limit=_LIMIT)
            except CaseFailed as error:
                if not is_out_of_memory(str(error)) or training.batch_size == 1:
                    return {"failed": str(error)}
                training = replace(training, batch_size=training.batch_size // 2)
                continue
            return {"batch_size": training.batch_size, **timed.as_json()}

    def program(self, row: Row, training: Training) -> Program:
        """Return the program of a row."""
        folder = self._folder / "run"
        if row.program in _PEERS:
            return peer_program(_PEERS[row.program], training, folder)
        if row.program == _NANOGPT:
            assert self._options.nanogpt is not None
            python = str(Path(shutil.which(self._options.peer_python) or "").absolute())
            checkout = Path(self._options.nanogpt).resolve()
            return nanogpt_program(training, folder, checkout=checkout, python=python)
        flags = _FLAGS.get(row.program, ())
        if self._card is not None:  # else in the precision that is fast there, and not compiled
            flags = (*_PRECISIONS.get(row.program, _BF16), *flags)
        return our_program(training, folder, flags)


Figures = dict[str, list[dict[str, Any]]]
"""The figures of every run of one model at one length, by program."""


def section(
    model: str, length: int, found: Figures, *, flops: float, peak: float | None
) -> Section:
    """Return the table of one model at one length, and its goals.

    Args:
        model: Name of the model.
        length: Tokens of a sample.
        found: The figures.
        flops: FLOPs per token.
        peak: FLOP/s of the GPU in half precision, if they are known.
    """
    header = [
        *("program", "samples", "tokens/s", "ms per step", "median ms", "MFU"),
        *("allocated, GB", "in use, GB", "first reading, s", "MHz", "W", "°C"),
    ]
    lines, rows = [], []
    for program, runs in found.items():
        failed = [run["failed"] for run in runs if "failed" in run]
        if failed:
            lines += ["", f"{program} failed: {' '.join(failed[0].split())[-300:]}"]
            continue
        if any(run.get("runs_uncompiled") for run in runs):
            lines += ["", f"{program}: torch could not compile a part, and ran it as it is."]
        speeds = [1000 * run["batch_size"] * length / run["ms"] for run in runs]
        speed = statistics.median(speeds)
        spread = f" ({min(speeds):,.0f}-{max(speeds):,.0f})" if len(runs) > 1 else ""
        knows_peak = peak is not None and "TF32" not in program
        rows.append(
            [
                program,
                _cell(runs, "batch_size"),
                f"{speed:,.0f}{spread}",
                _cell(runs, "ms", digits=2),
                _cell(runs, "ms_median", digits=2),
                f"{speed * flops / peak:.1%}" if knows_peak and peak else "",
                _cell(runs, "allocated", unit=1e9, digits=2),
                _cell(runs, "used", unit=1e9, digits=2),
                _cell(runs, "first_line", digits=1),
                *(_cell(runs, name) for name in ("mhz", "watts", "celsius")),
            ]
        )
    return Section(
        title=f"{MODELS[model].name}, {length:,} tokens",
        lines=[*table(header, rows), *lines],
        goals=goals(model, length, found, flops=flops, peak=peak),
    )


def _cell(runs: Sequence[Mapping[str, Any]], name: str, *, unit: float = 1, digits: int = 0) -> str:
    value = _median(runs, name)
    return "" if value is None else f"{value / unit:,.{digits}f}"


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.median(values) if values else None


def goals(
    model: str, length: int, found: Figures, *, flops: float, peak: float | None
) -> list[Goal]:
    """Return the goals that the figures can answer; arguments as above."""
    if model not in _LEAST_MFU:
        return []
    name = f"{MODELS[model].name}, {length:,} tokens"
    reached: list[Goal] = []
    speeds = {
        program: statistics.median(run["batch_size"] * length / run["ms"] for run in runs)
        for program, runs in found.items()
        if runs and not any("failed" in run for run in runs)
    }
    ours = speeds.get("llm")
    if ours is not None and peak is not None:
        mfu = 1000 * ours * flops / peak
        reached.append(at_least(f"{name}: MFU in bf16", mfu, _LEAST_MFU[model]))
    if ours is not None and _NANOGPT in speeds:
        ratio = ours / speeds[_NANOGPT]
        reached.append(at_least(f"{name}: speed, nanoGPT's = 1", ratio, 1.1))
    if ours is not None and "llm, fp16" in speeds:
        ratio = speeds["llm, fp16"] / ours
        reached.append(at_least(f"{name}: fp16's speed, bf16's = 1", ratio, 0.95))
    adamw, kfac = (speeds.get(program) for program in _KFAC)
    if adamw is not None and kfac is not None:
        # Of whole intervals, with the steps that update factors and bases.
        reached.append(at_most(f"{name}: K-FAC's step, AdamW's = 1", adamw / kfac, 1.15, ""))
    return reached


def report(options: GPUBenchmarkOptions, folder: Path) -> str:
    """Measure what is not measured yet; return the report, and write it after every row."""
    card = find_card()
    check(options, card)
    path = options.rows or (options.output and f"{options.output}.rows")
    conditions = {
        "card": card.name if card else "none",
        "torch": importlib.metadata.version("torch"),
        "seconds": options.seconds,
    }
    kept = Kept(Path(path) if path else None, conditions)
    rows, measurer = rows_of(options), Measurer(options, card, folder)

    @cache
    def flops(model: str, length: int) -> float:
        return flops_per_token(measurer.model_folder(model, length), length)

    def write() -> str:
        text = render_rows(rows, kept.figures, card, flops)
        write_report(options, text)
        return text

    for row in rows:
        if row not in kept.figures:
            kept.add(row, measurer.measure(row))
            write()
    return write()


def render_rows(
    rows: Sequence[Row],
    figures: Mapping[Row, dict[str, Any]],
    card: Card | None,
    flops: Callable[[str, int], float],
) -> str:
    """Return the report of the rows that have figures, and name the others.

    Args:
        rows: All rows.
        figures: Figures of the finished rows.
        card: The GPU, if there is one.
        flops: Returns the FLOPs per token of a model and a length.
    """
    from llm.metrics.hardware import peak_flops

    missing = [row for row in rows if row not in figures]
    facts = [
        *machine(("torch", "transformers", "accelerate")),
        f"GPU: {card.name if card else 'none, so that the figures say nothing'}",
        "Programs read their loss every 10 steps; the time is the mean over all counted steps",
        _TORCHTITAN,
    ]
    if missing:
        names = ", ".join(f"{row.model} {row.length} {row.program}" for row in missing)
        facts.append(f"Not measured yet: {names}")
    found: dict[tuple[str, int], Figures] = {}
    for row in rows:
        if row in figures:
            runs = found.setdefault((row.model, row.length), {}).setdefault(row.program, [])
            runs.append(figures[row])
    peak = peak_flops(card.name) if card else None
    sections = [
        section(model, length, runs, flops=flops(model, length), peak=peak)
        for (model, length), runs in found.items()
    ]
    return render("Training on a GPU", facts, sections)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    return run_benchmark("gpu", "Measures training on a GPU.", GPUBenchmarkOptions, report, argv)


if __name__ == "__main__":
    sys.exit(main())
