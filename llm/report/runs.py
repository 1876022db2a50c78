"""Reads the folder of a run that is finished, running or killed."""

import dataclasses
import json
import math
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from llm.checkpoint.format import MEAN_FILE, step_of
from llm.checkpoint.load import list_checkpoints
from llm.checkpoint.run_folder import RunFolder
from llm.errors import ConfigError
from llm.report.events import Event, logged_events, planned_events
from llm.runtime.files import read_json_lines

X = Literal["step", "tokens", "seconds"]
X_KEYS: tuple[X, ...] = ("step", "tokens", "seconds")

Row = dict[str, float]
"""The lines of a step in metrics.jsonl: numbers by name, NaN if a number was not finite."""

_OWN_FILES = ("config.toml", "status.json", "metrics.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that a branch or a mean of checkpoints was made from.

    Attributes:
        folder: Its folder.
        steps: Steps of its checkpoints; one for a branch.
        is_mean: Whether it belongs to a mean.
    """

    folder: Path
    steps: tuple[int, ...]
    is_mean: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a run folder, or of the folder of a mean of checkpoints (a row if evaluated).

    Attributes:
        name: Name of the run in the report.
        path: Its folder.
        rows: A row for each step in metrics.jsonl, by rising step; every row has `step`, `tokens`
            and `seconds`.
        num_unread: Unreadable lines of metrics.jsonl, except for a half-written last one.
        config: config.toml; empty if it cannot be read.
        status: status.json; empty if it cannot be read.
        events: The events in chronological order.
        start: The last `start` event; empty in runs without events.jsonl.
        origin: Origin of a branch or a mean.
        before: Rows of the origin and of the run, up to the last of the steps; empty if the origin
            is not among the runs of the report.
    """

    name: str
    path: Path
    rows: list[Row]
    num_unread: int
    config: dict[str, Any]
    status: dict[str, Any]
    events: list[Event]
    start: dict[str, Any]
    origin: Origin | None = None
    before: Sequence[Row] = ()

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric, or None."""
        values = (row.get(key, math.nan) for row in reversed(self.rows))
        return next(filter(math.isfinite, values), None)

    def at(self, step: float) -> dict[X, float]:
        """Return the place of a step on each x axis: steps, tokens and seconds of training."""
        rows = [*self.before, *self.rows]
        steps = [row["step"] for row in rows]
        return {x: _between(steps, [row[x] for row in rows], step) for x in X_KEYS}


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read runs; they are named by their folders, or by the whole paths if names repeat.

    Raises:
        ConfigError: A folder holds no run, or is named twice.
    """
    paths = list(paths)
    resolved = [path.resolve() for path in paths]
    for path, place in zip(paths, resolved, strict=True):
        if resolved.count(place) > 1:
            raise ConfigError(f"The run {path} is named twice; name every run once.")
    names = [place.name for place in resolved]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    runs = [_read_run(path, name) for path, name in zip(paths, names, strict=True)]
    return [_beside(run, runs) for run in runs]


def best_evaluation(rows: list[Row]) -> tuple[int, float] | None:
    """Return step and value of the lowest validation loss, or None without validation."""
    losses = [(row["eval_loss"], int(row["step"])) for row in rows if "eval_loss" in row]
    loss, step = min((pair for pair in losses if math.isfinite(pair[0])), default=(math.nan, 0))
    return None if math.isnan(loss) else (step, loss)


def _read_run(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; name the folder of a run (its --output_dir).")
    if not any((path / file).is_file() for file in _OWN_FILES):
        record = _parsed(path / MEAN_FILE, json.loads)
        if {"run", "steps"} <= record.keys():
            return _read_mean(path, name, record)
        raise ConfigError(f"{path} holds no run: none of {', '.join(_OWN_FILES)} is in it.")
    folder = RunFolder(path)
    rows, num_unread = _read_metrics(folder.metrics)
    lines = [line for line in _read_lines(folder.events) if line is not None]
    config = _parsed(path / "config.toml", tomllib.loads)
    starts: list[dict[str, Any]] = [line for line in lines if line.get("event") == "start"]
    start = starts[-1] if starts else {}
    checkpoints = list_checkpoints(folder.checkpoints)
    origin = _parent(config)
    first = origin.steps[0] if origin else 0
    cooldown_from = None
    if origin and config.get("cooldown_tokens"):
        # A branch of a run in its cooldown continues the cooldown.
        branch = (checkpoints[-1].metadata.get("branch") if checkpoints else None) or {}
        cooldown_from = branch.get("cooldown_from", first)
    events = logged_events(lines, saved={checkpoint.step for checkpoint in checkpoints})
    if (best := best_evaluation(rows)) is not None:
        text = f"lowest validation loss, {best[1]:.4f}"
        events.append(Event(kind="best", step=best[0], text=text))
    last = rows[-1]["step"] if rows else 0
    events += planned_events(config, start, first=first, last=last, cooldown_from=cooldown_from)
    return Run(
        name=name,
        path=path,
        rows=rows,
        num_unread=num_unread,
        config=config,
        status=_parsed(path / "status.json", json.loads),
        events=events,
        start=start,
        origin=origin,
    )


def _read_mean(path: Path, name: str, record: dict[str, Any]) -> Run:
    """Return a folder that `llm.checkpoints average` has written, and `--eval_only` evaluated."""
    origin = Origin(folder=Path(record["run"]), steps=tuple(record["steps"]), is_mean=True)
    values = {
        key if key.startswith("task_") else f"eval_{key}": float(value)
        for key, value in _parsed(path / "eval_results.json", json.loads).items()
    }
    step = origin.steps[-1]
    row = {"step": float(step), "tokens": math.nan, "seconds": math.nan, **values}
    text = f"the mean of the checkpoints of steps {', '.join(map(str, origin.steps))}"
    return Run(
        name=name,
        path=path,
        rows=[row] if values else [],
        num_unread=0,
        config={},
        status={},
        events=[Event(kind="mean", step=step, text=text)],
        start={},
        origin=origin,
    )


def _beside(run: Run, runs: list[Run]) -> Run:
    """Return a run with the rows of its origin, taken from the other runs of the report."""
    before = _before(run, runs)
    steps = [row["step"] for row in before]
    rows = [
        row | {x: _between(steps, [other[x] for other in before], row["step"])
               for x in ("tokens", "seconds") if before and math.isnan(row[x])}
        for row in run.rows
    ]  # fmt: skip
    return dataclasses.replace(run, rows=rows, before=before)


def _before(run: Run, runs: list[Run]) -> list[Row]:
    if run.origin is None:
        return []
    folder, step = run.origin.folder, run.origin.steps[-1]
    # Both folders may have been moved together.
    parents = [other for other in runs if other.path.resolve().name == folder.name]
    parent = min(parents, key=lambda other: other.path.resolve() != folder, default=None)
    if parent is None or parent is run:
        return []
    return [row for row in (*_before(parent, runs), *parent.rows) if row["step"] <= step]


def _parent(config: dict[str, Any]) -> Origin | None:
    checkpoint = Path(config.get("branch_from") or "")
    step = step_of(checkpoint)
    return None if step is None else Origin(folder=checkpoint.parent.parent, steps=(step,))


def _read_metrics(path: Path) -> tuple[list[Row], int]:
    """Return a row for each step in metrics.jsonl, and the number of unreadable lines."""
    lines = [
        line if line is not None and isinstance(line["step"], int) else None
        for line in _read_lines(path)
    ]
    if lines and lines[-1] is None:
        lines.pop()  # a running or killed run may have written half a line
    by_step: dict[int, Row] = {}
    for line in filter(None, lines):
        by_step.setdefault(line["step"], {}).update(
            (key, math.nan if value is None else float(value))
            for key, value in line.items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        )
    rows = [by_step[step] for step in sorted(by_step)]
    # A step with only an evaluation is placed between the neighboring training reports.
    for key in ("tokens", "seconds"):
        known = [row for row in rows if math.isfinite(row.get(key, math.nan))]
        steps, values = [row["step"] for row in known], [row[key] for row in known]
        for row in rows:
            row[key] = _between(steps, values, row["step"])
    return rows, lines.count(None)


def _read_lines(path: Path) -> list[dict[str, Any] | None]:
    """Return the lines of a file that have a step; None for other lines."""
    return [line if line and "step" in line else None for line in read_json_lines(path)]


def _between(steps: list[float], values: list[float], step: float) -> float:
    """Interpolate the value at a step linearly, from 0 through the known values.

    After the last known value, the last line continues.
    """
    if not steps or steps[0] > 0:
        steps, values = [0.0, *steps], [0.0, *values]
    if len(steps) == 1:
        return values[0]
    right = min(max(1, bisect_left(steps, step)), len(steps) - 1)
    left = right - 1
    fraction = (step - steps[left]) / (steps[right] - steps[left])
    return values[left] + (values[right] - values[left]) * fraction


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
