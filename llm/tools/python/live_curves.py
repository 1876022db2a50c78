"""The progress of a run in a notebook: a bar, and curves of its losses."""

import html
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llm.runtime.files import read_json_lines
from llm.tools.python.trained_run import Metrics, Run

_UPDATE_SECONDS = 0.5
_WIDTH, _HEIGHT, _MARGIN = 560, 180, 44
_MAX_POINTS = 1000
_MAX_LINES = 200
_CURVES = {"loss": ("training loss", "#3366cc"), "eval_loss": ("validation loss", "#dd7711")}
"""Names in metrics.jsonl, with the label and the color of their curve."""


def make_display(folder: Path) -> Callable[[str], None]:
    """Return a function that shows the progress of a run; it takes each line of the log.

    Args:
        folder: The run's folder.
    """
    show_html = _make_notebook_output()
    return show_line if show_html is None else NotebookDisplay(folder, show_html)


def show_line(line: str) -> None:
    """Write a line of the log to standard output."""
    sys.stdout.write(line)
    sys.stdout.flush()


def _make_notebook_output() -> Callable[[str], None] | None:
    """Return a function that replaces the HTML of an output; None outside of a notebook."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


class NotebookDisplay:
    """Shows a progress bar, the last line of the log, and the curves of the losses.

    Args:
        folder: The run's folder.
        show_html: Replaces what the output shows.
    """

    def __init__(self, folder: Path, show_html: Callable[[str], None]) -> None:
        self._run, self._show_html = Run(folder), show_html
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._updated_at = 0.0
        self._num_earlier_events = len(read_json_lines(folder / "events.jsonl"))

    def __call__(self, line: str) -> None:
        """Add a line of the log; the output changes at most twice a second."""
        self._lines.append(line)
        # Only the lines of steps come so often. The last line of a run is another one.
        is_step = line.startswith("step ")
        if not is_step or time.monotonic() - self._updated_at >= _UPDATE_SECONDS:
            self._updated_at = time.monotonic()
            self._show_html(self.render())

    def render(self) -> str:
        """Return the present state as HTML."""
        metrics = self._run.metrics
        num_steps = int(metrics[-1]["step"]) if metrics else 0
        total_steps = self._find_total_steps()
        bar = ""
        if total_steps:
            style = f"width:{_WIDTH}px;max-width:100%"
            bar = f'<progress value="{num_steps}" max="{total_steps}" style="{style}"></progress>'
            bar += f" step {num_steps:,} of {total_steps:,}"
        log = html.escape("".join(self._lines))
        last_line = html.escape(self._lines[-1].strip()) if self._lines else ""
        return (
            f"<div>{bar}</div>{draw_curves(metrics)}<div><code>{last_line}</code></div>"
            f"<details><summary>log</summary><pre>{log}</pre></details>"
        )

    def _find_total_steps(self) -> int | None:
        """Return the steps of the run, once this start has reported them."""
        events = read_json_lines(self._run.path / "events.jsonl")[self._num_earlier_events :]
        totals = [event["total_steps"] for event in events if event and event.get("total_steps")]
        return int(totals[-1]) if totals else None


class _Axes(NamedTuple):
    """The ranges of steps and losses that an image shows."""

    first_step: int
    last_step: int
    lowest: float
    highest: float

    def locate(self, step: int, value: float) -> tuple[float, float]:
        """Return the place of a point in pixels, from the left and from the top."""
        step_share = (step - self.first_step) / (self.last_step - self.first_step)
        value_share = (value - self.lowest) / (self.highest - self.lowest or 1.0)
        return (
            _MARGIN + step_share * (_WIDTH - _MARGIN - 8),
            8 + (1 - value_share) * (_HEIGHT - 32),
        )

    def draw_labels(self) -> list[str]:
        """Return the texts at the ends of both axes, as elements of an SVG image."""
        return [
            _draw_text(2, 16, f"{self.highest:.3g}"),
            _draw_text(2, _HEIGHT - 24, f"{self.lowest:.3g}"),
            _draw_text(_MARGIN, _HEIGHT - 6, f"step {self.first_step:,}"),
            _draw_text(_WIDTH - 80, _HEIGHT - 6, f"step {self.last_step:,}"),
        ]


def draw_curves(metrics: Metrics) -> str:
    """Return the losses of a run by step as an SVG image; "" if there is nothing to draw."""
    points_by_name = {name: _list_points(metrics, name) for name in _CURVES}
    points = [point for curve_points in points_by_name.values() for point in curve_points]
    if len({step for step, _ in points}) < 2:
        return ""
    axes = _Axes(
        first_step=min(step for step, _ in points),
        last_step=max(step for step, _ in points),
        lowest=min(value for _, value in points),
        highest=max(value for _, value in points),
    )
    elements = []
    for curve_index, (name, (label, color)) in enumerate(_CURVES.items()):
        places = [axes.locate(*point) for point in _thin_points(points_by_name[name])]
        if places:
            elements += _draw_curve(places, color)
            elements.append(_draw_text(_WIDTH - 120, 18 + 14 * curve_index, label, color=color))
    elements += axes.draw_labels()
    size = f'width="{_WIDTH}" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:100%;height:auto"'
    return f"<svg {size}>{''.join(elements)}</svg>"


def _list_points(metrics: Metrics, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric, without NaN."""
    points = zip(*metrics.column(name), strict=True)
    return [(step, value) for step, value in points if not math.isnan(value)]


def _draw_curve(places: Sequence[tuple[float, float]], color: str) -> list[str]:
    """Return a line through places in pixels, and a dot at the last one."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    last_x, last_y = places[-1]
    return [
        f'<polyline points="{path}" fill="none" stroke="{color}"/>',
        f'<circle cx="{last_x:.1f}" cy="{last_y:.1f}" r="2.5" fill="{color}"/>',
    ]


def _thin_points(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return at most `_MAX_POINTS` of the points, with the last one."""
    stride = -(-len(points) // _MAX_POINTS) or 1
    return points[::-1][::stride][::-1]


def _draw_text(x: float, y: float, text: str, *, color: str = "gray") -> str:
    return f'<text x="{x}" y="{y}" font-size="11" fill="{color}">{text}</text>'
