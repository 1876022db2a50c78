"""Panels of the ranking: the final validation loss against each option that differs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from llm.config.duration import Duration, Tokens
from llm.tools.report.panels import panel_name
from llm.tools.report.ranking import Ranking, format_options
from llm.tools.report.run_files import MAX_COUNT
from llm.tools.report.runs import natural_key

MIN_MEMBERS = 3
"""Ranked runs that the panels need: two points show no dependence."""
MAX_PANELS = 12

_MIN_TICK_GAP = 0.12
"""Smallest distance of two ticks, as a share of the axis, for which their texts have room."""
_MAX_LABELS = 6
_LABEL_CHARACTERS = 48
"""Characters below an axis."""


class Point(NamedTuple):
    """A run, or the mean of runs that differ only in the seed.

    Attributes:
        x: Its place on the x axis.
        loss: Its final validation loss.
    """

    x: float
    loss: float


class Line(NamedTuple):
    """A line through points.

    Attributes:
        label: A text for its end; may be empty.
        points: The points, by rising x.
    """

    label: str
    points: Sequence[Point]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossPanel:
    """A chart of the final validation loss.

    Attributes:
        name: File name: letters, digits and underscores.
        title: Title of the chart.
        unit: Unit of the x axis.
        log: Whether the x axis is logarithmic.
        ticks: The text of places on the x axis; empty for ordinary ticks.
        points: A point for each run, by the index of the run.
        lines: Lines through means of runs that differ only in this option, or fitted curves.
    """

    name: str
    title: str
    unit: str = ""
    log: bool = False
    ticks: dict[float, str] = dataclasses.field(default_factory=dict)
    points: dict[int, Point]
    lines: Sequence[Line]


def make_option_panels(ranking: Ranking) -> list[LossPanel]:
    """Return a panel for each option, except the seed, that has several values among the runs."""
    if len(ranking.members) < MIN_MEMBERS:
        return []
    panels = [
        _make_panel(ranking, name)
        for name in ranking.options
        if name != "seed" and len({repr(member.options[name]) for member in ranking.members}) > 1
    ]
    return panels[:MAX_PANELS]


def _make_panel(ranking: Ranking, name: str) -> LossPanel:
    """Return the panel of an option: by its numbers if all values have one, else by its texts."""
    numbers = [_parse_number(member.options[name]) for member in ranking.members]
    known_numbers = [number for number in numbers if number is not None]
    units = {number.unit for number in known_numbers}
    if len(known_numbers) < len(numbers) or len(units) > 1:
        return _make_category_panel(ranking, name)
    (unit,) = units
    return _make_number_panel(ranking, name, [number.value for number in known_numbers], unit=unit)


def _make_category_panel(ranking: Ranking, name: str) -> LossPanel:
    """Return the panel of an option with a place on the x axis for each of its texts."""
    texts = format_options([member.options[name] for member in ranking.members])
    categories = sorted(set(texts), key=natural_key)
    max_length = max(6, _LABEL_CHARACTERS // len(categories))
    return LossPanel(
        name=f"option_{panel_name(name)}",
        title=name,
        ticks={place: _shorten_middle(text, max_length) for place, text in enumerate(categories)},
        points={
            member.run: Point(categories.index(text), member.loss or math.nan)
            for member, text in zip(ranking.members, texts, strict=True)
        },
        lines=[],
    )


def _make_number_panel(
    ranking: Ranking, name: str, x_values: Sequence[float], *, unit: str
) -> LossPanel:
    """Return the panel of an option with numbers; its axis is logarithmic if all are positive."""
    members = ranking.members
    texts = format_options([member.options[name] for member in members])
    labels = [text.removesuffix(f" {unit}").removesuffix(f" {unit[:-1]}") for text in texts]
    x_by_run = {member.run: x for member, x in zip(members, x_values, strict=True)}
    is_log = min(x_values) > 0
    ticks = dict(sorted(zip(x_values, labels, strict=True)))
    return LossPanel(
        name=f"option_{panel_name(name)}",
        title=name,
        unit=unit,
        log=is_log,
        ticks=ticks if _has_room(list(ticks), log=is_log) else {},
        points={
            member.run: Point(x_by_run[member.run], member.loss or math.nan) for member in members
        },
        lines=_make_lines(ranking, name, x_by_run),
    )


def _make_lines(ranking: Ranking, name: str, x_by_run: Mapping[int, float]) -> list[Line]:
    """Return lines through the groups that differ in an option, and in options that follow it."""
    x_values = [x_by_run[member.run] for member in ranking.members]
    fixed_names = [
        option_name
        for option_name in ranking.options
        if option_name not in (name, "seed")
        and not _is_monotonic(
            x_values, [_parse_number(member.options[option_name]) for member in ranking.members]
        )
    ]
    points_by_options: dict[str, list[Point]] = {}
    label_by_options: dict[str, str] = {}
    for group in ranking.groups:
        first_member, *_ = group.members
        values = [first_member.options[option_name] for option_name in fixed_names]
        key = repr(values)
        point = Point(x_by_run[first_member.run], group.mean_loss)
        points_by_options.setdefault(key, []).append(point)
        label_by_options[key] = ", ".join(map(_make_label, values))
    lines = [
        Line(label_by_options[key], sorted(points))
        for key, points in points_by_options.items()
        if len({point.x for point in points}) > 1
    ]
    if len(lines) > _MAX_LABELS:
        return [Line("", line.points) for line in lines]
    return lines


def _make_label(value: Any) -> str:
    """Return the value of an option in few characters, without its unit."""
    number = _parse_number(value)
    (text,) = format_options([value])
    return _shorten_middle(text.partition(" ")[0] if number and number.unit else text, 12)


def _is_monotonic(x_values: Sequence[float], numbers: Sequence["_Number | None"]) -> bool:
    """Return whether an option is a rising or a falling function of another one.

    Args:
        x_values: The values of the other option.
        numbers: The numbers of the option in the same runs; None for a text.
    """
    y_values = [number.value for number in numbers if number is not None]
    if len(y_values) < len(x_values):
        return False
    points = sorted(set(zip(x_values, y_values, strict=True)))
    changes = [y - previous_y for (_, previous_y), (_, y) in pairwise(points)]
    is_function = len(points) == len(set(x_values))
    return is_function and (min(changes) > 0 or max(changes) < 0)


class _Number(NamedTuple):
    """The number in an option's value, and its unit."""

    value: float
    unit: str


def _parse_number(value: Any) -> _Number | None:
    """Return the number of a value such as 0.001, "124M" or "600 steps"; None if it has none."""
    unit = ""
    try:
        if isinstance(value, str) and value[-1:].islower():
            duration = Duration(value)
            value, unit = duration.value, duration.unit
        elif isinstance(value, str):
            value = Tokens(value)
    except (ValueError, ArithmeticError):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _Number(float(value), unit) if is_number and abs(value) < MAX_COUNT else None


def _has_room(x_values: Sequence[float], *, log: bool) -> bool:
    """Return whether each value of a sorted list can have a tick with its text."""
    scaled = [math.log(x) if log else x for x in x_values]
    gaps = [current - previous for previous, current in pairwise(scaled)]
    return min(gaps) > _MIN_TICK_GAP * (scaled[-1] - scaled[0])


def _shorten_middle(text: str, max_length: int) -> str:
    """Return a text that is cut in the middle if it is too long."""
    if len(text) <= max_length:
        return text
    tail_length = (max_length - 1) // 2
    return f"{text[: max_length - 1 - tail_length]}…{text[len(text) - tail_length :]}"
