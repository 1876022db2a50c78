"""Reads the folder of a run that is finished, running or killed."""

import dataclasses
import json
import math
import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llm.checkpoint.format import MEAN_FILE, Checkpoint, checkpoint_step
from llm.checkpoint.load import list_checkpoints
from llm.checkpoint.run_folder import RunFolder
from llm.errors import ConfigError, one_line
from llm.runtime.files import read_json_lines
from llm.runtime.logging import counted
from llm.tools.report.events import Event, list_logged_events, list_planned_events
from llm.tools.report.run_files import (
    Row,
    is_count,
    read_events,
    read_goodput,
    read_metrics,
    read_numbers,
    read_table,
    to_utf8,
)

if TYPE_CHECKING:
    from llm.tools.report.expert_loads import ExpertLoads

XAxis = Literal["step", "tokens", "seconds"]
X_AXES: tuple[XAxis, ...] = ("step", "tokens", "seconds")

_RUN_FILES = ("config.toml", "status.json", "metrics.jsonl")


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
        unread: A sentence about each file that cannot be read, or has lines that cannot, except for
            a half-written last one.
        config: config.toml; empty if it cannot be read.
        status: status.json; empty if it cannot be read.
        events: The events in chronological order.
        start: The last `start` event; empty in runs without events.jsonl.
        origin: Origin of a branch or a mean.
        inherited_rows: Rows of the origin up to the last of its steps; empty if the origin is not
            among the runs of the report.
        expert_loads: Records of the load of every expert.
        goodput: Where the wall time went, from goodput.json; empty if unknown.
    """

    name: str
    path: Path
    rows: list[Row]
    unread: Sequence[str]
    config: dict[str, Any]
    status: dict[str, Any]
    events: list[Event]
    start: dict[str, Any]
    origin: Origin | None = None
    inherited_rows: Sequence[Row] = ()
    expert_loads: "Sequence[ExpertLoads]" = ()
    goodput: Row = dataclasses.field(default_factory=dict)

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric, or None."""
        values = (row.get(key, math.nan) for row in reversed(self.rows))
        return next(filter(math.isfinite, values), None)

    def position_at(self, step: float) -> dict[XAxis, float]:
        """Return the position of a step on each x axis: steps, tokens and seconds of training."""
        rows = [*self.inherited_rows, *self.rows]
        steps = [row["step"] for row in rows]
        return {x: _interpolate_at(steps, [row[x] for row in rows], step) for x in X_AXES}


def read_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read runs; they are named by their folders, or by the whole paths if names repeat.

    Returns:
        The runs, and a sentence about each folder that cannot be read.

    Raises:
        ConfigError: A folder is named twice.
    """
    paths = list(paths)
    runs, problems = [], []
    for path, name in zip(paths, _name_runs(paths), strict=True):
        try:
            runs.append(_read_run(path, to_utf8(name)))
        except ConfigError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or path} cannot be read: {one_line(error)}.")
    return [_inherit_rows(run, runs) for run in runs], problems


def _name_runs(paths: Sequence[Path]) -> list[str]:
    """Return the names of runs: their folders, or the whole paths if names repeat."""
    real_paths = [Path(os.path.realpath(path)) for path in paths]  # a link may point to itself
    for path, real_path in zip(paths, real_paths, strict=True):
        if real_paths.count(real_path) > 1:
            raise ConfigError(f"The run {path} is named twice; name every run once.")
    names = [real_path.name for real_path in real_paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def find_run_folders(folder: Path) -> list[Path]:
    """Return the runs in a folder of runs, such as a sweep's, in the order of their names.

    Returns:
        The folders; the folder itself if it is a run, or has none in it.
    """
    if _holds_run(folder):
        return [folder]
    try:
        members = [
            path for path in folder.iterdir() if not path.name.startswith(".") and _holds_run(path)
        ]
    except OSError:
        members = []  # read_runs says why
    return sorted(members, key=lambda path: natural_key(path.name)) or [folder]


def natural_key(text: str) -> list[float | str]:
    """Return a sort key that puts `seed=2` before `seed=10`, and 3e-4 before 0.001."""
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", text)  # every second one is a number
    return [float(part) if index % 2 else part for index, part in enumerate(parts)]


def _holds_run(folder: Path) -> bool:
    """Return whether a folder is that of a run or of a mean of checkpoints."""
    return any((folder / name).is_file() for name in (*_RUN_FILES, MEAN_FILE))


class Evaluation(NamedTuple):
    """A validation loss, and the step of its evaluation."""

    loss: float
    step: int


def best_evaluation(rows: list[Row]) -> Evaluation | None:
    """Return the evaluation with the lowest validation loss, or None without validation."""
    evaluations = [
        Evaluation(loss=row["eval_loss"], step=int(row["step"]))
        for row in rows
        if "eval_loss" in row and math.isfinite(row["eval_loss"])
    ]
    return min(evaluations, default=None)


def _read_run(path: Path, name: str) -> Run:
    """Read a run folder, or the folder of a mean of checkpoints."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; name the folder of a run (its --output_dir).")
    if any((path / file).is_file() for file in _RUN_FILES):
        return _read_run_files(path, name)
    origin = _find_mean_origin(read_table(path / MEAN_FILE, json.loads) or {})
    if origin is not None:
        return _read_mean(path, name, origin)
    raise ConfigError(f"{path} holds no run: none of {', '.join(_RUN_FILES)} is in it.")


def _read_run_files(path: Path, name: str) -> Run:
    """Read the files of a run folder; a missing or unreadable file leaves its part empty."""
    from llm.tools.report.expert_loads import collect_expert_loads  # loads numpy

    folder = RunFolder(path)
    rows, num_unread = read_metrics(folder.metrics)
    for key in ("tokens", "seconds"):
        _interpolate_missing(rows, key)
    event_lines = read_events(folder.events)
    starts: list[dict[str, Any]] = [line for line in event_lines if line["event"] == "start"]
    config = read_table(path / "config.toml", tomllib.loads)
    status = read_table(path / "status.json", json.loads)
    tables = {"config.toml": config, "status.json": status}
    unread = [f"{name}/{file} could not be read." for file in tables if tables[file] is None]
    if num_unread:
        unread.append(f"{counted(num_unread, 'line')} of {name}/metrics.jsonl could not be read.")
    run = Run(
        name=name,
        path=path,
        rows=rows,
        unread=unread,
        config=config or {},
        status=status or {},
        events=[],
        start=starts[-1] if starts else {},
        origin=_find_branch_origin(config or {}),
        goodput=read_goodput(folder.goodput),
        expert_loads=collect_expert_loads([*filter(None, read_json_lines(folder.events))]),
    )
    return dataclasses.replace(run, events=_collect_events(run, event_lines))


def _collect_events(run: Run, lines: list[dict[str, Any]]) -> list[Event]:
    """Return the events of a run, from the lines of events.jsonl and from its other files."""
    checkpoints = [
        checkpoint
        for checkpoint in list_checkpoints(RunFolder(run.path).checkpoints)
        if is_count(checkpoint.step)
    ]
    events = list_logged_events(lines, saved_steps={checkpoint.step for checkpoint in checkpoints})
    if (best := best_evaluation(run.rows)) is not None:
        text = f"lowest validation loss, {best.loss:.4f}"
        events.append(Event(kind="best", step=best.step, text=text))
    return events + list_planned_events(
        run.config,
        run.start,
        first_step=run.origin.steps[0] if run.origin else 0,
        last_step=run.rows[-1]["step"] if run.rows else 0,
        cooldown_from=_find_cooldown_start(run, checkpoints),
    )


def _find_cooldown_start(run: Run, checkpoints: Sequence[Checkpoint]) -> int | None:
    """Return the steps done before the cooldown of a branch; None if it has none."""
    if run.origin is None or not is_count(run.config.get("cooldown_tokens")):
        return None
    # A branch of a run in its cooldown continues the cooldown.
    branch = (checkpoints[-1].metadata.get("branch") if checkpoints else None) or {}
    step = branch.get("cooldown_from", run.origin.steps[0])
    return step if is_count(step) else None


def _find_mean_origin(record: dict[str, Any]) -> Origin | None:
    """Return the run and the steps that a mean was made of; None if the record names none."""
    run, steps = record.get("run"), record.get("steps")
    if not isinstance(run, str) or not isinstance(steps, list) or not steps:
        return None
    if not all(map(is_count, steps)):
        return None
    return Origin(folder=Path(run), steps=tuple(steps), is_mean=True)


def _read_mean(path: Path, name: str, origin: Origin) -> Run:
    """Read the folder of a mean that `checkpoints average` has written, with its evaluation."""
    values = {
        key if key.startswith("task_") else f"eval_{key}": value
        for key, value in read_numbers(path / "eval_results.json").items()
    }
    step = origin.steps[-1]
    row = {"step": float(step), "tokens": math.nan, "seconds": math.nan, **values}
    text = f"the mean of the checkpoints of steps {', '.join(map(str, origin.steps))}"
    return Run(
        name=name,
        path=path,
        rows=[row] if values else [],
        unread=(),
        config={},
        status={},
        events=[Event(kind="mean", step=step, text=text)],
        start={},
        origin=origin,
    )


def _inherit_rows(run: Run, runs: list[Run]) -> Run:
    """Return a run with the rows of its origin, taken from the other runs of the report."""
    inherited_rows = _collect_inherited_rows(run, runs)
    if not inherited_rows:
        return run
    steps = [row["step"] for row in inherited_rows]
    rows = [dict(row) for row in run.rows]
    for key in ("tokens", "seconds"):
        values = [row[key] for row in inherited_rows]
        for row in rows:
            if math.isnan(row[key]):
                row[key] = _interpolate_at(steps, values, row["step"])
    return dataclasses.replace(run, rows=rows, inherited_rows=inherited_rows)


def find_parent(run: Run, runs: Sequence[Run]) -> Run | None:
    """Return the run that a branch or mean began from, if it is in the report; None otherwise."""
    if run.origin is None:
        return None
    folder = run.origin.folder
    # Both folders may have been moved together.
    parents = [candidate for candidate in runs if candidate.path.resolve().name == folder.name]
    parent = min(parents, key=lambda candidate: candidate.path.resolve() != folder, default=None)
    return None if parent is run else parent


def _collect_inherited_rows(run: Run, runs: list[Run]) -> list[Row]:
    """Return the rows of the ancestors of a run, up to the steps where it branched off."""
    parent = find_parent(run, runs)
    if run.origin is None or parent is None:
        return []
    step = run.origin.steps[-1]
    return [
        row for row in (*_collect_inherited_rows(parent, runs), *parent.rows) if row["step"] <= step
    ]


def _find_branch_origin(config: dict[str, Any]) -> Origin | None:
    """Return the run and the step that a branch started from; None for another run."""
    checkpoint = config.get("branch_from")
    if not isinstance(checkpoint, str):
        return None
    path = Path(checkpoint)
    step = checkpoint_step(path)
    return Origin(folder=path.parent.parent, steps=(step,)) if is_count(step) else None


def _interpolate_missing(rows: list[Row], key: str) -> None:
    """Interpolate the tokens or seconds of steps that have an evaluation but no training report."""
    known_rows = [row for row in rows if math.isfinite(row.get(key, math.nan))]
    steps, values = [row["step"] for row in known_rows], [row[key] for row in known_rows]
    for row in rows:
        row[key] = _interpolate_at(steps, values, row["step"])


def _interpolate_at(steps: list[float], values: list[float], step: float) -> float:
    """Interpolate the value at a step linearly between the known values, from 0 at step 0.

    After the last known value, the line through the last two values continues.
    """
    if not steps or steps[0] > 0:
        steps, values = [0.0, *steps], [0.0, *values]
    if len(steps) == 1:
        return values[0]
    right = min(max(1, bisect_left(steps, step)), len(steps) - 1)
    left = right - 1
    fraction = (step - steps[left]) / (steps[right] - steps[left])
    return values[left] + (values[right] - values[left]) * fraction
