"""Reads the files of a run's folder, whatever they contain.

A kill may have cut a file short, and a person or another program may have written it. A line or a
value of another kind than the trainer writes is left out.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from llm.runtime.files import read_json_lines

MAX_COUNT = 2**53
"""Floats hold every whole number up to this one. No run counts further."""

_MAX_NUMBER = 2.0**128
"""Numbers of float32 are smaller; the libraries that draw overflow at the ends of float64."""

_MAX_NAME_BYTES = 240
"""Bytes in the name of a metric, which becomes the name of a file."""

_MAX_NESTING = 4
"""A table in a list of tables has lists."""

Row = dict[str, float]
"""The lines of a step in metrics.jsonl: numbers by name, NaN if one is not finite or too large."""

_EVENT_FIELDS: dict[str, tuple[type, ...]] = {
    "event": (str,),
    "time": (str,),
    "step": (int,),
    "loss": (int, float),
    "checkpoint": (str,),
    "skip_samples": (str,),
    "status": (str,),
    "reason": (str,),
    "architecture": (str,),
    "experts": (str,),
    "device": (str,),
    "mixed_precision": (str,),
    "global_batch_size": (int, str),
} | dict.fromkeys(
    (
        "ranks",
        "parameters",
        "active_parameters",
        "total_steps",
        "block_size",
        "first_sample",
        "last_sample",
    ),
    (int,),
)
"""Types of the values in events.jsonl that the report shows."""


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value can be a number of steps, samples or tokens."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def to_utf8(text: str) -> str:
    """Return text with a question mark for each character that UTF-8 cannot hold."""
    return text.encode(errors="replace").decode()


def read_table(path: Path, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """Return a file's values by name, without values that are nested deeply.

    Returns:
        The values; none if the file is missing. None if it cannot be read.
    """
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return {name: value for name, value in content.items() if _is_within_depth(value, _MAX_NESTING)}


def read_numbers(path: Path) -> Row:
    """Return the numbers of a JSON file by name; empty if it cannot be read."""
    return _numbers_of(read_table(path, json.loads) or {})


def read_goodput(path: Path) -> Row:
    """Return where the wall time of a run went, from its goodput.json; empty if it is unknown."""
    results = (read_table(path, json.loads) or {}).get("results")
    numbers = _numbers_of(results) if isinstance(results, dict) else {}
    is_complete = {"goodput", "wall_seconds", "device_hours"} <= numbers.keys()
    is_complete = is_complete and all(map(math.isfinite, numbers.values()))
    return numbers if is_complete and numbers["wall_seconds"] > 0 else {}


def read_metrics(path: Path) -> tuple[list[Row], int]:
    """Return the numbers of each step in metrics.jsonl, and the number of unreadable lines."""
    row_by_step: dict[int, Row] = {}
    num_unreadable = 0
    is_readable = True
    for line in read_json_lines(path):
        is_readable = line is not None and is_count(line.get("step"))
        if line is not None and is_readable:
            row_by_step.setdefault(line["step"], {}).update(_numbers_of(line))
        else:
            num_unreadable += 1
    if not is_readable:
        num_unreadable -= 1  # a running or killed run may have written half of the last line
    return [row_by_step[step] for step in sorted(row_by_step)], num_unreadable


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the lines of events.jsonl that name an event; other lines are left out."""
    events = []
    for line in filter(None, read_json_lines(path)):
        event = {name: line[name] for name in _EVENT_FIELDS if _is_event_value(name, line)}
        # The step of a stop may be unknown, and is null then.
        if "event" in event and ("step" in event or line.get("step", 0) is None):
            events.append(event)
    return events


def _is_event_value(name: str, line: dict[str, Any]) -> bool:
    """Return whether a line of events.jsonl has a field, with a value that a run writes."""
    value = line.get(name)
    if type(value) is int and not is_count(value):
        return False
    return type(value) in _EVENT_FIELDS[name]


def _numbers_of(record: dict[str, Any]) -> Row:
    """Return the numbers of a record by name, NaN for null and for those that are too large."""
    numbers = {}
    for name, value in record.items():
        is_number = value is None or type(value) in (int, float)
        has_valid_name = 0 < len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
        if is_number and has_valid_name:
            is_finite = value is not None and abs(value) < _MAX_NUMBER
            numbers[to_utf8(name)] = float(value) if is_finite else math.nan
    return numbers


def _is_within_depth(value: Any, max_depth: int) -> bool:
    """Return whether tables and lists in a value are nested at most `max_depth` deep."""
    children = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(children, list):
        return True
    return max_depth > 0 and all(_is_within_depth(child, max_depth - 1) for child in children)
