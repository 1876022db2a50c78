"""What all benchmarks share: the program around the measurement, tables, goals, the machine."""

import datetime
import importlib.metadata
import math
import os
import platform
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.measure import CaseFailed, Usage, figures, median
from llm.config.command_line import parse_options
from llm.config.options import option
from llm.errors import ConfigError, LLMError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of every benchmark."""

    output: str | None = option(
        None, "File to write the report to, besides printing it.", group="Run"
    )


OptionsT = TypeVar("OptionsT", bound=ReportOptions)


def run_benchmark(
    name: str,
    description: str,
    options_class: type[OptionsT],
    report: Callable[[OptionsT, Path], str],
    argv: Sequence[str] | None = None,
) -> int:
    """Run the program `benchmarks.NAME`: read its options, measure, print the report.

    Args:
        name: The module in `benchmarks`.
        description: The program in one line, for --help.
        options_class: The options.
        report: Measures, with an empty temporary folder, and returns the report as Markdown.
        argv: The command line; by default that of the process.

    Returns:
        The exit code: 0, 2 if something cannot be measured, 130 after Ctrl-C.
    """
    # A benchmark that is terminated still ends the program it measures and removes its files.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        options = parse_options(
            options_class,
            sys.argv[1:] if argv is None else argv,
            prog=f"python -m benchmarks.{name}",
            description=description,
        )
        # Checked first: a report of hours should not be lost at its end.
        check_folder("output", options.output)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            text = report(options, Path(folder))
    except (LLMError, CaseFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(text)
    write_report(options, text)
    return 0


def write_report(options: ReportOptions, text: str) -> None:
    """Write a report into the file of `--output`, if there is one.

    Benchmarks that may be stopped call it after each measurement.
    """
    if options.output is not None:
        Path(options.output).write_text(text, encoding="utf-8")


def check_folder(name: str, path: str | None) -> None:
    """Refuse an option whose file would lie in a folder that does not exist.

    Raises:
        ConfigError: There is no such folder.
    """
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"--{name} {path} is in a folder that does not exist; make it first.")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal of a measurement.

    Attributes:
        what: The goal in words, with its bound.
        measured: The figure, with its unit.
        met: Whether the goal was met.
    """

    what: str
    measured: str
    met: bool


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report.

    Attributes:
        title: The heading.
        lines: Markdown.
        goals: Goals of the section, which the report lists at its end.
    """

    title: str
    lines: Sequence[str]
    goals: Sequence[Goal] = ()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table whose columns are right-aligned, except the first."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(header) - 1), *lines[1:]]


def program_table(
    header: Sequence[str],
    results: Mapping[str, Sequence[Usage]],
    cells: Callable[[str, Sequence[Usage]], Sequence[str]],
) -> list[str]:
    """Return a table with a row for each program, without figures for a program that failed.

    Args:
        header: The column titles, the first for the programs' names.
        results: The runs of each program by name.
        cells: Returns the cells of a program after its name.
    """
    failed = ["FAILED, see the log", *[""] * (len(header) - 2)]
    rows = [(name, *(cells(name, runs) if runs else failed)) for name, runs in results.items()]
    return table(header, rows)


def spread(runs: Sequence[Usage], name: str, digits: int = 2) -> str:
    """Return the median of a figure, with the smallest and the largest in brackets."""
    values = figures(runs, name)
    middle = f"{median(runs, name):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def at_least(what: str, ratio: float, bound: float) -> Goal:
    """Return the goal that a ratio is at least `bound`."""
    return Goal(what=f"{what}: at least {bound:g}x", measured=f"{ratio:.2f}x", met=ratio >= bound)


def at_most(what: str, value: float, bound: float, unit: str) -> Goal:
    """Return the goal that a figure is at most `bound`; infinity reads as never."""
    digits = 2 if value < 10 else 0
    return Goal(
        what=f"{what}: at most {bound:g}{unit}",
        measured="never" if math.isinf(value) else f"{value:.{digits}f}{unit}",
        met=value <= bound,
    )


def render(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the whole report as Markdown.

    Args:
        title: The first heading.
        facts: What was measured, and on which machine.
        sections: The measurements; their goals come last.
    """
    lines = [f"# {title}", "", *(f"- {fact}" for fact in facts)]
    for section in sections:
        lines += ["", f"## {section.title}", "", *section.lines]
    goals = [goal for section in sections for goal in section.goals]
    if goals:
        rows = [(goal.what, goal.measured, "yes" if goal.met else "NO") for goal in goals]
        lines += ["", "## Goals", "", *table(("Goal", "Measured", "Met"), rows)]
    return "\n".join(lines) + "\n"


def machine(packages: Sequence[str]) -> list[str]:
    """Return the date, the hardware, its load, and the versions of some packages."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    cores = len(os.sched_getaffinity(0))
    gigabytes = int(memory[1]) * 1024 / 1e9 if memory else float("nan")
    load = os.getloadavg()[0]
    busy = f"; other programs were running, with a load of {load:.1f}" if load > 0.5 else ""
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    return [
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC{busy}",
        f"{cores} cores of {cpu[1] if cpu else platform.machine()}, {gigabytes:.0f} GB of memory, "
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, {versions}",
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(absent)"
