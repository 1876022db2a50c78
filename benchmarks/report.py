"""Markdown for the figures of a benchmark: tables, goals, the machine."""

import datetime
import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Usage, figures, median


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One thing that was to be reached.

    Attributes:
        what: In words, with the bound.
        measured: The figure, with its unit.
        met: Whether it was reached.
    """

    what: str
    measured: str
    met: bool


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a report.

    Attributes:
        title: Its heading.
        lines: Markdown.
        goals: What of it was to be reached.
    """

    title: str
    lines: Sequence[str]
    goals: Sequence[Goal] = ()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(header) - 1), *lines[1:]]


def program_table(
    header: Sequence[str],
    results: Mapping[str, Sequence[Usage]],
    cells: Callable[[str, Sequence[Usage]], Sequence[str]],
) -> list[str]:
    """A table with a row for each program; one that failed has no figures in it.

    Args:
        header: The first cell stands over the programs' names.
        results: The runs of each program by its name.
        cells: What to write into the row of a program, after its name.
    """
    failed = ["FAILED, see the log", *[""] * (len(header) - 2)]
    rows = [(name, *(cells(name, runs) if runs else failed)) for name, runs in results.items()]
    return table(header, rows)


def spread(runs: Sequence[Usage], name: str, digits: int = 2) -> str:
    """The median of a figure, and its smallest and largest in brackets."""
    values = figures(runs, name)
    middle = f"{median(runs, name):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def at_least(what: str, ratio: float, bound: float) -> Goal:
    """A goal for a ratio that is better the larger it is."""
    return Goal(what=f"{what}: at least {bound:g}x", measured=f"{ratio:.2f}x", met=ratio >= bound)


def at_most(what: str, value: float, bound: float, unit: str) -> Goal:
    """A goal for a figure that is better the smaller it is; infinite is what never came."""
    digits = 2 if value < 10 else 0
    return Goal(
        what=f"{what}: at most {bound:g}{unit}",
        measured="never" if math.isinf(value) else f"{value:.{digits}f}{unit}",
        met=value <= bound,
    )


def render(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole report, its goals last.

    Args:
        title: The first heading.
        facts: What was measured where.
        sections: The figures.
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
    """The date, the hardware, how busy it is, and the versions of some packages."""
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
