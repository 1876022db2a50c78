"""Reads what lies in the folder of a run, whether the run is finished, under way or broken off."""

import dataclasses
import functools
import json
import math
import tomllib
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llm.errors import ConfigError
from llm.report.events import Event, LogFacts, read_log, with_checkpoints
from llm.report.scales import X_KEYS, X
from llm.run_folder import RunFolder

Row = dict[str, float | None]
"""A line of metrics.jsonl: numbers by name, None where a number was not finite."""

_OWN_FILES = ("config.toml", "status.json", "metrics.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder shows it.

    Attributes:
        name: What tells it from the other runs of the report.
        path: Its folder.
        rows: metrics.jsonl by rising step; every row has `step`, `tokens` and `seconds`.
        num_unread: Lines of metrics.jsonl that could not be read, a half-written last one apart.
        config: config.toml; empty if it cannot be read.
        status: status.json; empty if it cannot be read.
        events: What happened, by rising step.
        facts: What the log says of the run.
    """

    name: str
    path: Path
    rows: list[Row]
    num_unread: int
    config: dict[str, Any]
    status: dict[str, Any]
    events: list[Event]
    facts: LogFacts

    def last(self, key: str) -> float | None:
        """The last finite value of a metric, or None."""
        values = (row.get(key) for row in reversed(self.rows))
        return next((value for value in values if value is not None), None)

    def best_evaluation(self) -> tuple[int, float] | None:
        """Step and value of the lowest validation loss, or None without validation."""
        losses = [
            (value, int(row["step"] or 0))
            for row in self.rows
            if (value := row.get("eval_loss")) is not None
        ]
        return (min(losses)[1], min(losses)[0]) if losses else None

    def at(self, step: float) -> dict[X, float]:
        """Where a step lies on each of the x axes: steps, tokens and seconds of training."""
        return {x: _between(self._places["step"], self._places[x], step) for x in X_KEYS}

    @functools.cached_property
    def _places(self) -> dict[X, list[float]]:
        return {x: [0.0, *(row[x] or 0.0 for row in self.rows)] for x in X_KEYS}


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read runs, and give them names that tell them apart.

    Raises:
        ConfigError: A folder holds no run, or is named twice.
    """
    paths = list(paths)
    resolved = [path.resolve() for path in paths]
    for path, place in zip(paths, resolved, strict=True):
        if resolved.count(place) > 1:
            raise ConfigError(f"The run {path} is named twice; name every run once.")
    last_names = [place.name for place in resolved]
    unique = len(set(last_names)) == len(paths)
    names = last_names if unique else [str(path) for path in paths]
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder; name that of a run (its --output_dir).")
    if not any((path / file).is_file() for file in _OWN_FILES):
        raise ConfigError(f"{path} holds no run: none of {', '.join(_OWN_FILES)} is in it.")
    folder = RunFolder(path)
    rows, num_unread = _read_metrics(folder.metrics)
    events, facts = read_log(folder.log)
    events = with_checkpoints(events, folder.checkpoints)
    run = Run(
        name=name,
        path=path,
        rows=rows,
        num_unread=num_unread,
        config=_read_toml(path / "config.toml"),
        status=_read_json(path / "status.json"),
        events=events,
        facts=facts,
    )
    best = run.best_evaluation()
    if best is None:
        return run
    found = Event(kind="best", step=best[0], text=f"lowest validation loss, {best[1]:.4f}")
    events = sorted([*events, found], key=lambda event: event.step)
    return dataclasses.replace(run, events=events)


def _read_metrics(path: Path) -> tuple[list[Row], int]:
    """The rows of metrics.jsonl, and the number of lines that are none."""
    by_step: dict[float, Row] = {}
    bad: list[int] = []
    number = 0
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                row = _row(line)
                if row is None:
                    bad.append(number)
                else:
                    by_step[row["step"] or 0.0] = row
    if bad and bad[-1] == number:
        bad.pop()  # a run that is under way, or was killed, may have written half of it
    rows = [by_step[step] for step in sorted(by_step)]
    _fill(rows, "tokens")
    _fill(rows, "seconds")
    return rows, len(bad)


def _row(line: str) -> Row | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    row: Row = {}
    for key, value in record.items():
        if value is None:
            row[key] = None
        elif isinstance(value, int | float) and not isinstance(value, bool):
            row[key] = float(value) if math.isfinite(value) else None
    return row


def _fill(rows: list[Row], key: str) -> None:
    """Give rows of an evaluation alone their place between the reports of training."""
    known = [(row["step"] or 0.0, value) for row in rows if (value := row.get(key)) is not None]
    steps = [0.0, *(step for step, _ in known)]
    values = [0.0, *(value for _, value in known)]
    for row in rows:
        if row.get(key) is None:
            row[key] = _between(steps, values, row["step"] or 0.0)


def _between(steps: list[float], values: list[float], step: float) -> float:
    """The value at a step, on straight lines through the known ones and beyond the last."""
    if len(steps) == 1:
        return 0.0
    right = min(max(1, bisect_right(steps, step)), len(steps) - 1)
    left = right - 1
    while left > 0 and steps[left] == steps[right]:
        left -= 1
    span = steps[right] - steps[left]
    if span == 0:
        return values[right]
    return values[left] + (values[right] - values[left]) * (step - steps[left]) / span


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
