"""Compare this checkout with an earlier one of the same project.

python -m benchmarks.before --earlier ../llm-before --corpus corpus.jsonl --vocab_file vocab.json
    --merges_file merges.txt
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.corpus import cut
from benchmarks.measure import Case, CaseFailed, figures, interleave, run
from benchmarks.preparation import prepare_command
from benchmarks.report import (
    ReportOptions,
    Section,
    machine,
    render,
    run_benchmark,
    spread,
    table,
)
from benchmarks.shapes import SHAPES, make_inputs
from benchmarks.training import ROOT, our_case
from llm.config.options import option
from llm.errors import ConfigError

_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "tokenizers")
Part = Literal["training", "start", "prepare", "save"]


@dataclass(frozen=True, kw_only=True)
class BeforeOptions(ReportOptions):
    """Options of the benchmark."""

    earlier: str = option("", "A checkout of the commit to compare with.", group="Run")
    only: tuple[Part, ...] = option(
        ("training", "start", "prepare", "save"),
        "Parts to measure: training, start (to the first step, tokens cached), prepare (text to "
        "token files), save (how long a checkpoint blocks training).",
        group="Run",
    )
    shapes: tuple[Literal["A", "B", "C", "toy"], ...] = option(
        ("A", "B"),
        "Models and batches to train; the start is measured with the first one.",
        group="Run",
    )
    repeats: int = option(5, "Runs of each, interleaved.", group="Run", at_least=1)
    corpus: str | None = option(None, "JSONL file with the key text.", group="Input")
    sizes: tuple[float, ...] = option(
        (16.0, 300.0),
        "MB of JSONL to prepare; a corpus that is too short is repeated.",
        group="Input",
        above=0,
    )
    vocab_file: str | None = option(None, "GPT-2's vocab.json.", group="Input")
    merges_file: str | None = option(None, "GPT-2's merges.txt.", group="Input")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same case for both checkouts.

    Attributes:
        title: The section's heading.
        cases: The case of this checkout, and of the earlier one.
        figures: Names of figures, each with its number of digits.
        warm_up: Whether each case first runs once, unmeasured, to fill its cache.
    """

    title: str
    cases: tuple[Case, Case]
    figures: dict[str, int]
    warm_up: bool = True


def check(options: BeforeOptions) -> None:
    """Refuse options that cannot work.

    Raises:
        ConfigError: A path is missing or wrong.
    """
    if not Path(options.earlier, "llm", "trainers").is_dir() or not options.earlier:
        raise ConfigError(
            f"--earlier {options.earlier!r} is not a checkout: llm/trainers is missing."
        )
    if "prepare" in options.only:
        for name in ("corpus", "vocab_file", "merges_file"):
            path = getattr(options, name)
            if path is None or not Path(path).is_file():
                raise ConfigError(f"--{name} {path} is no file; --only prepare needs it.")


def both(case: Case, earlier: Path) -> tuple[Case, Case]:
    """Return a case for this checkout and the same for the earlier one, each in its own folder."""

    def at(name: str, checkout: Path) -> Case:
        command = list(case.command)
        if "--data_cache_dir" in command:
            # Separate caches: the two checkouts may write different files.
            command[command.index("--data_cache_dir") + 1] += f"-{name}"
        return replace(
            case,
            name=name,
            command=command,
            folder=case.folder / name,
            environment={**case.environment, "PYTHONPATH": str(checkout)},
        )

    return at("now", ROOT), at("before", earlier)


def comparisons(options: BeforeOptions, folder: Path) -> Iterator[Comparison]:
    """Yield the comparisons of all chosen parts, and make the inputs of each before it."""
    earlier = Path(options.earlier).resolve()
    if "training" in options.only:
        for name in options.shapes:
            shape = SHAPES[name]
            inputs = make_inputs(shape, folder / name)
            case = our_case(shape, inputs, folder, name=f"train {name}")
            counted = {"tokens_per_second": 0, "cpu_seconds": 1, "peak_megabytes": 0}
            yield Comparison(title=f"Training {shape}", figures=counted, cases=both(case, earlier))
    if "start" in options.only:
        shape = replace(SHAPES[options.shapes[0]], steps=10)
        inputs = make_inputs(shape, folder / "start")
        case = our_case(shape, inputs, folder, name="start", flags=("--logging_steps", "1"))
        yield Comparison(
            title=f"From the command to the first step ({shape.name})",
            figures={"milestone_seconds": 2},
            cases=both(case, earlier),
        )
    if "prepare" in options.only:
        vocab_file, merges_file = (
            Path(path or "").resolve() for path in (options.vocab_file, options.merges_file)
        )
        for size in options.sizes:
            text = cut(Path(options.corpus or ""), folder / "input.jsonl", size).path
            for workers in (1, 2):
                command = prepare_command(text, workers, vocab_file, merges_file)
                case = Case(name="prepare", command=command, folder=folder / "prepare")
                yield Comparison(
                    title=f"Text to token files, {size:g} MB, --workers {workers}",
                    figures={"wall_seconds": 2, "cpu_seconds": 2, "peak_megabytes": 0},
                    warm_up=False,
                    cases=both(case, earlier),
                )
    if "save" in options.only:
        case = Case(
            name="save",
            command=[sys.executable, "-m", "benchmarks.save", "--repeats", "3"],
            folder=folder / "save",
            read=_held_up,
        )
        yield Comparison(
            title="A checkpoint of GPT-2 124M",
            figures={"held_up_seconds": 3, "written_seconds": 2, "blocking_seconds": 2},
            warm_up=False,
            cases=both(case, earlier),
        )


def _held_up(folder: Path) -> dict[str, Any]:
    """Read the figures from a report of `benchmarks.save`."""
    text = (folder / "log.txt").read_text()
    background = re.search(r"in the background \(written in ([\d.]+) s\) *\| *([\d.]+)", text)
    blocking = re.search(r"--no_async_checkpoint *\| *([\d.]+)", text)
    if background is None or blocking is None:
        raise CaseFailed(f"benchmarks.save printed no table: {text[-300:]}")
    return {
        "held_up_seconds": float(background[2]),
        "written_seconds": float(background[1]),
        "blocking_seconds": float(blocking[1]),
    }


def measure(options: BeforeOptions, comparison: Comparison) -> Section:
    """Run both cases alternately; the ratio is the median of the pairs' ratios."""
    cases = comparison.cases
    if comparison.warm_up:
        for case in cases:
            run(case)
    results = interleave(cases, options.repeats)
    now, before = (results[case.name] for case in cases)
    if not now or not before:
        raise CaseFailed(f"{comparison.title}: a run failed (see above)")
    rows = []
    for name, digits in comparison.figures.items():
        ratios = [a / b for a, b in zip(figures(now, name), figures(before, name), strict=True)]
        rows.append(
            [
                name.replace("_", " "),
                spread(before, name, digits),
                spread(now, name, digits),
                f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            ]
        )
    header = ["figure", "before", "now", "now / before"]
    return Section(title=comparison.title, lines=table(header, rows))


def report(options: BeforeOptions, folder: Path) -> str:
    """Measure all chosen parts and return the report."""
    check(options)
    facts = [
        *machine(_PACKAGES),
        f"Medians of {options.repeats} interleaved runs, smallest and largest in brackets; a "
        "ratio is the median of those of the pairs",
    ]
    sections = [measure(options, one) for one in comparisons(options, folder)]
    return render("This checkout compared with an earlier one", facts, sections)


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "before", "Compares this checkout with an earlier one.", BeforeOptions, report
        )
    )
