"""A panel as HTML: an SVG that stretches to any width, and its labels as text of a fixed size.

The curves of all three x axes lie in the page; the style sheet shows those of the one that is
chosen.
"""

from html import escape

from llm.report.events import Event
from llm.report.panels import Curve, Panel
from llm.report.runs import Run
from llm.report.scales import X_KEYS, Axis, X, x_axis

WIDTH = 10_000
HEIGHT = 1000
"""The SVG's own units; stretched to the size of the chart."""

_MAX_DOTS = 80
_MAX_MARKS = 400
"""Marks of one kind that a run shows at most; of more, every so many is shown."""

_MARK_NAMES = {
    "save": "checkpoint saved",
    "resume": "resumed",
    "stop": "stopped by a signal",
    "skip": "step skipped",
    "best": "lowest validation loss",
}


def x_axes(panel: Panel, ends: dict[X, float]) -> dict[X, Axis]:
    """The x axes of a panel.

    Args:
        panel: The panel.
        ends: How far the longest run has come.
    """
    return {
        x: x_axis(x, low=end / 2 if panel.from_half else 0.0, high=end) for x, end in ends.items()
    }


def draw_panel(
    panel: Panel, runs: list[Run], axes: dict[X, Axis], *, number: int, with_events: bool
) -> str:
    """The panel as a `figure` element.

    Args:
        panel: What to draw.
        runs: The runs of the report.
        axes: The x axes.
        number: Of the panel in the page, by which the script finds its numbers.
        with_events: Show below it what happened to the runs.
    """
    layers = "".join(
        f'<g class="for-{x}">{_crossings(runs, axes[x], x)}'
        + "".join(_draw_curve(curve, axes[x], panel.y, x) for curve in panel.curves)
        + "</g>"
        for x in X_KEYS
    )
    ticks = panel.y.ticks()
    y_labels = "".join(
        f'<span style="bottom:{100 * place:.2f}%">{escape(text)}</span>' for place, text in ticks
    )
    grid = "".join(f"M0 {_y(place)}H{WIDTH}" for place, _ in ticks)
    unit = f"<small>{escape(panel.unit)}</small>" if panel.unit else ""
    lanes = _lanes(runs, axes) if with_events else ""
    kind = "chart wide" if with_events else "chart"
    return (
        f'<figure class="{kind}" data-panel="{number}">'
        f"<figcaption>{escape(panel.title)} {unit}</figcaption>"
        f'<div class="frame"><div class="y-labels">{y_labels}</div>'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(panel.title)}"><path class="grid" d="{grid}"/>{layers}'
        f'</svg><div class="cursor" hidden></div></div>'
        f"{lanes}{_x_labels(axes)}</div></figure>"
    )


def mark_legend(runs: list[Run]) -> str:
    """What the marks below the first chart mean, as items of a list."""
    kinds = {event.kind for run in runs for event in run.events}
    return "".join(
        f'<li><span class="mark {kind}"></span>{name}</li>'
        for kind, name in _MARK_NAMES.items()
        if kind in kinds
    )


def _y(place: float) -> int:
    return round(HEIGHT * (1 - place))


def _points(curve: Curve, axis: Axis, y: Axis, x: X) -> list[tuple[int, int] | None]:
    """The points in the SVG's units; None where the curve is broken."""
    return [
        None if value is None else (round(WIDTH * axis.place(place)), _y(y.place(value)))
        for place, value in zip(curve.xs[x], curve.ys, strict=True)
    ]


def _draw_curve(curve: Curve, axis: Axis, y: Axis, x: X) -> str:
    points = _points(curve, axis, y, x)
    line, pen_down = [], False
    for point in points:
        if point is not None:
            line.append(f"{'L' if pen_down else 'M'}{point[0]} {point[1]}")
        pen_down = point is not None
    evaluation = curve.key.startswith("eval_")
    shape = "line evaluation" if evaluation else "line"
    drawn = f'<path class="{shape}" d="{"".join(line)}"/>'
    there = [point for point in points if point is not None]
    if (evaluation and len(there) <= _MAX_DOTS) or len(there) == 1:
        # A line of no length with round ends is a dot that the stretching leaves round.
        dots = "".join(f"M{across} {down}h0" for across, down in there)
        drawn += f'<path class="dots" d="{dots}"/>'
    return f'<g class="run-{curve.run}">{_draw_band(curve, axis, y, x)}{drawn}</g>'


def _draw_band(curve: Curve, axis: Axis, y: Axis, x: X) -> str:
    """From the lowest to the highest of the reports that a point is the mean of."""
    if curve.lows is None or curve.highs is None:
        return ""
    edges = [
        (round(WIDTH * axis.place(place)), _y(y.place(low)), _y(y.place(high)))
        for place, low, high in zip(curve.xs[x], curve.lows, curve.highs, strict=True)
        if low is not None and high is not None
    ]
    there = "L".join(f"{across} {top}" for across, _, top in edges)
    back = "L".join(f"{across} {bottom}" for across, bottom, _ in reversed(edges))
    return f'<path class="band" d="M{there}L{back}Z"/>'


def _crossings(runs: list[Run], axis: Axis, x: X) -> str:
    """Lines through the whole chart where a run was resumed or skipped steps."""
    drawn = ""
    for number, run in enumerate(runs):
        for kind in ("resume", "skip"):
            chosen = _thinned([event for event in run.events if event.kind == kind])
            places = (axis.place(run.at(event.step)[x]) for event in chosen)
            path = "".join(f"M{round(WIDTH * place)} 0V{HEIGHT}" for place in places if place >= 0)
            if path:
                drawn += f'<path class="crossing {kind} run-{number}" d="{path}"/>'
    return drawn


def _lanes(runs: list[Run], axes: dict[X, Axis]) -> str:
    """A line of marks for each run to which something happened."""
    lanes = ""
    for number, run in enumerate(runs):
        marks = ""
        for kind, name in _MARK_NAMES.items():
            for event in _thinned([event for event in run.events if event.kind == kind]):
                place = run.at(event.step)
                style = ";".join(f"--{x}:{100 * axes[x].place(place[x]):.2f}%" for x in X_KEYS)
                text = f"step {event.step:,}: {event.text if kind != 'resume' else name}"
                marks += f'<i class="mark {kind}" style="{style}" title="{escape(text)}"></i>'
        if marks:
            lanes += f'<div class="lane run-{number}">{marks}</div>'
    return f'<div class="lanes">{lanes}</div>' if lanes else ""


def _thinned(events: list[Event]) -> list[Event]:
    return events[:: -(-len(events) // _MAX_MARKS)] if events else []


def _x_labels(axes: dict[X, Axis]) -> str:
    labels = ""
    for x in X_KEYS:
        ticks = "".join(
            f'<span style="left:{100 * place:.2f}%">{escape(text)}</span>'
            for place, text in axes[x].ticks()
        )
        labels += f'<div class="x-labels for-{x}">{ticks}<b>{escape(axes[x].title)}</b></div>'
    return labels


def hover_numbers(panel: Panel, axes: dict[X, Axis]) -> dict[str, object]:
    """What the script shows where the pointer is, as JSON has it."""
    return {
        "y": [panel.y.low, panel.y.high, panel.y.log],
        "x": {x: [axes[x].low, axes[x].high, axes[x].divisor, axes[x].title] for x in X_KEYS},
        "curves": [
            {
                "run": curve.run,
                "name": "validation" if curve.key == "eval_loss" else "",
                "xs": {x: [_rounded(place, 8) for place in curve.xs[x]] for x in X_KEYS},
                "ys": [None if value is None else _rounded(value, 5) for value in curve.ys],
            }
            for curve in panel.curves
        ],
    }


def _rounded(value: float, digits: int) -> float:
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() else value
