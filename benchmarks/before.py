"""Measures this checkout beside an earlier one of the same project: what a change costs or saves.

python -m benchmarks.before --earlier ../llm-before --corpus corpus.jsonl --vocab_file vocab.json
    --merges_file merges.txt
"""

import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.corpus import cut
from benchmarks.measure import Case, CaseFailed, figures, interleave, run
from benchmarks.report import Section, machine, render, spread, table
from benchmarks.shapes import SHAPES, make_inputs
from benchmarks.training import ROOT, our_case
from llm.config.command_line import parse
from llm.config.options import option
from llm.errors import ConfigError, LLMError

_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "tokenizers")
Part = Literal["training", "start", "prepare", "save"]


@dataclass(frozen=True, kw_only=True)
class BeforeOptions:
    """What to measure."""

    earlier: str = option("", "A checkout of the commit to compare with.", group="Run")
    only: tuple[Part, ...] = option(
        (),
        "Parts to measure; none means all: training, start (to the first step, tokens "
        "cached), prepare (text to token files, and a run that makes its own), save (how long a "
        "checkpoint holds training up).",
        group="Run",
    )
    shapes: tuple[Literal["A", "B", "C", "toy"], ...] = option(
        ("A", "B"),
        "Models and batches that are trained; the first one's start counts.",
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
    output: str | None = option(None, "File for the report, besides the console.", group="Run")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case of either checkout, and the figures that count.

    Attributes:
        title: For the table.
        now: The case of this checkout.
        before: The same of the earlier one.
        figures: Of `Usage`, each with its number of digits.
        warm_up: Whether each runs once before, uncounted (caches are then there).
    """

    title: str
    now: Case
    before: Case
    figures: dict[str, int]
    warm_up: bool = True


def check(options: BeforeOptions) -> None:
    """Refuses what cannot be measured.

    Raises:
        ConfigError: A path is missing or is not what it should be.
    """
    if not Path(options.earlier, "llm", "trainers").is_dir() or not options.earlier:
        raise ConfigError(f"--earlier {options.earlier!r} is no checkout: llm/trainers is missing.")
    if wanted(options, "prepare"):
        for name in ("corpus", "vocab_file", "merges_file"):
            path = getattr(options, name)
            if path is None or not Path(path).is_file():
                raise ConfigError(f"--{name} {path} is no file; --only prepare needs it.")


def wanted(options: BeforeOptions, part: Part) -> bool:
    """Whether a part is to be measured."""
    return not options.only or part in options.only


def both(case: Case, earlier: Path) -> dict[str, Case]:
    """Return a case for this checkout and the same for the earlier one, each in its own folder."""
    return {
        name: replace(
            case,
            name=name,
            folder=case.folder / name,
            environment={**case.environment, "PYTHONPATH": str(checkout)},
        )
        for name, checkout in (("now", ROOT), ("before", earlier))
    }


def comparisons(options: BeforeOptions, folder: Path) -> Iterator[Comparison]:
    """Everything that is wanted, its inputs made when it is its turn."""
    earlier = Path(options.earlier).resolve()
    if wanted(options, "training"):
        for name in options.shapes:
            shape = SHAPES[name]
            inputs = make_inputs(shape, folder / name)
            case = our_case(shape, inputs, folder, name=f"train {name}")
            counted = {"tokens_per_second": 0, "cpu_seconds": 1, "peak_megabytes": 0}
            # Each with a cache of its own: the two may not write the same files.
            pair = {
                key: replace(one, command=_cache_apart(one.command, folder / f"{name}-{key}"))
                for key, one in both(case, earlier).items()
            }
            yield Comparison(title=f"Training {shape}", figures=counted, **pair)
    if wanted(options, "start"):
        shape = replace(SHAPES[options.shapes[0]], steps=10)
        inputs = make_inputs(shape, folder / "start")
        case = our_case(shape, inputs, folder, name="start", flags=("--logging_steps", "1"))
        pair = {
            key: replace(one, command=_cache_apart(one.command, folder / f"start-{key}"))
            for key, one in both(case, earlier).items()
        }
        yield Comparison(
            title=f"From the command to the first step ({shape.name})",
            figures={"milestone_seconds": 2},
            **pair,
        )
    if wanted(options, "prepare"):
        for size in options.sizes:
            text = cut(Path(options.corpus or ""), folder / "input.jsonl", size).path
            for workers in (1, 2):
                case = prepare_case(options, text, folder / "prepare", workers)
                yield Comparison(
                    title=f"Text to token files, {size:g} MB, --workers {workers}",
                    figures={"wall_seconds": 2, "cpu_seconds": 2, "peak_megabytes": 0},
                    warm_up=False,
                    **both(case, earlier),
                )
    if wanted(options, "save"):
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
            **both(case, earlier),
        )


def prepare_case(options: BeforeOptions, text: Path, folder: Path, workers: int) -> Case:
    """`llm.data.prepare` with GPT-2's vocabulary."""
    command = [sys.executable, "-m", "llm.data.prepare", "--input", str(text)]
    command += ["--json_key", "text", "--append_eod", "--workers", str(workers)]
    command += ["--vocab_file", str(Path(options.vocab_file or "").resolve())]
    command += ["--merges_file", str(Path(options.merges_file or "").resolve())]
    return Case(name="prepare", command=[*command, "--output_prefix", "out"], folder=folder)


def _cache_apart(command: Sequence[str], cache: Path) -> list[str]:
    command = list(command)
    command[command.index("--data_cache_dir") + 1] = str(cache)
    return command


def _held_up(folder: Path) -> dict[str, Any]:
    """The figures of a report of `benchmarks.save`."""
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
    """Run both in turns; the ratio is the median of those of the pairs."""
    cases = [comparison.now, comparison.before]
    if comparison.warm_up:
        for case in cases:
            run(case)
    results = interleave(cases, options.repeats, say)
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
    return Section(
        title=comparison.title,
        lines=table(["figure", "before", "now", "now / before"], rows),
        goals=(),
    )


def say(message: str) -> None:
    """Tells what has been done, beside the report."""
    print(message, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the report as Markdown, and returns 0, or 2 when that is not possible."""
    # So that a run that is cut short ends the program it measures, and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        options = parse(
            BeforeOptions,
            sys.argv[1:] if argv is None else argv,
            prog="python -m benchmarks.before",
            description="Measures this checkout beside an earlier one.",
        )
        check(options)
        facts = [
            *machine(_PACKAGES),
            f"Medians of {options.repeats} interleaved runs, smallest and largest in brackets; a "
            "ratio is the median of those of the pairs",
        ]
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            sections = [measure(options, one) for one in comparisons(options, Path(folder))]
            report = render("This checkout beside an earlier one", facts, sections)
    except (LLMError, CaseFailed) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(report)
    if options.output is not None:
        Path(options.output).write_text(report, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
