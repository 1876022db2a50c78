"""Panels of the ranking: the final validation loss against each option that differs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from llm.config.duration import Duration, Tokens
from llm.tools.report.ranking import Ranking, option_texts
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
    """Return the panel of an option: on a logarithmic axis if its values are positive numbers."""
    members = ranking.members
    values = [member.options[name] for member in members]
    texts = option_texts(values)
    numbers = [_number_of(value) for value in values]
    places = [number.value for number in numbers if number is not None]
    units = {number.unit for number in numbers if number is not None}
    if len(places) < len(values) or len(units) > 1:
        categories = sorted(set(texts), key=natural_key)
        max_length = max(6, _LABEL_CHARACTERS // len(categories))
        return LossPanel(
            name=_file_name(name),
            title=name,
            ticks={
                place: _shorten_middle(text, max_length) for place, text in enumerate(categories)
            },
            points={
                member.run: Point(categories.index(text), member.loss or math.nan)
                for member, text in zip(members, texts, strict=True)
            },
            lines=[],
        )
    (unit,) = units
    place_by_run = {member.run: place for member, place in zip(members, places, strict=True)}
    log = min(places) > 0
    labels = [text.removesuffix(f" {unit}").removesuffix(f" {unit[:-1]}") for text in texts]
    ticks = dict(sorted(zip(places, labels, strict=True)))
    return LossPanel(
        name=_file_name(name),
        title=name,
        unit=unit,
        log=log,
        ticks=ticks if _has_room(list(ticks), log=log) else {},
        points={
            member.run: Point(place_by_run[member.run], member.loss or math.nan)
            for member in members
        },
        lines=_make_lines(ranking, name, place_by_run),
    )


def _make_lines(ranking: Ranking, name: str, place_by_run: Mapping[int, float]) -> list[Line]:
    """Return lines through the groups that differ in an option, and in options that follow it."""
    members = ranking.members
    places = [place_by_run[member.run] for member in members]
    fixed_names = [
        option_name
        for option_name in ranking.options
        if option_name not in (name, "seed")
        and not _moves_with(places, [_number_of(member.options[option_name]) for member in members])
    ]
    points_by_options: dict[str, list[Point]] = {}
    label_by_options: dict[str, str] = {}
    for group in ranking.groups:
        first, *_ = group.members
        values = [first.options[option_name] for option_name in fixed_names]
        key = repr(values)
        point = Point(place_by_run[first.run], group.mean_loss)
        points_by_options.setdefault(key, []).append(point)
        label_by_options[key] = ", ".join(map(_label_of, values))
    lines = [
        Line(label_by_options[key], sorted(points))
        for key, points in points_by_options.items()
        if len({point.x for point in points}) > 1
    ]
    if len(lines) > _MAX_LABELS:
        return [Line("", line.points) for line in lines]
    return lines


def _label_of(value: Any) -> str:
    """Return the value of an option in few characters, without its unit."""
    number = _number_of(value)
    (text,) = option_texts([value])
    return _shorten_middle(text.partition(" ")[0] if number and number.unit else text, 12)


def _moves_with(places: Sequence[float], numbers: Sequence["_Number | None"]) -> bool:
    """Return whether another option is a rising or a falling function of the places."""
    other_places = [number.value for number in numbers if number is not None]
    if len(other_places) < len(places):
        return False
    pairs = sorted(set(zip(places, other_places, strict=True)))
    changes = [current[1] - previous[1] for previous, current in pairwise(pairs)]
    is_function = len(pairs) == len(set(places))
    return is_function and (min(changes) > 0 or max(changes) < 0)


class _Number(NamedTuple):
    """The number in an option's value, and its unit."""

    value: float
    unit: str


def _number_of(value: Any) -> _Number | None:
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


def _has_room(places: Sequence[float], *, log: bool) -> bool:
    """Return whether each value of a sorted list can have a tick with its text."""
    scaled = [math.log(place) if log else place for place in places]
    gaps = [current - previous for previous, current in pairwise(scaled)]
    return min(gaps) > _MIN_TICK_GAP * (scaled[-1] - scaled[0])


def _file_name(option_name: str) -> str:
    """Return the name of a panel, which is also a file name."""
    return "option_" + "".join(letter if letter.isalnum() else "_" for letter in option_name)


def _shorten_middle(text: str, max_length: int) -> str:
    """Return a text that is cut in the middle if it is too long."""
    if len(text) <= max_length:
        return text
    num_last = (max_length - 1) // 2
    return f"{text[: max_length - 1 - num_last]}…{text[len(text) - num_last :]}"
