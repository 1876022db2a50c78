"""The panels as Bokeh's charts, on x axes that move together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import (
    CDSView,
    ColumnDataSource,
    CrosshairTool,
    CustomJS,
    CustomJSTickFormatter,
    GroupFilter,
    HoverTool,
    Range1d,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from llm.tools.report.panels import COLORS, Panel, unit_of_time, x_ends
from llm.tools.report.runs import X_KEYS, Run, X

MARKS = {
    "save": ("|", 0, "checkpoint saved"),
    "resume": ("▶", 6, "resumed"),
    "stop": ("■", -6, "stopped"),
    "skip": ("✕", 0, "step skipped"),
    "spike": ("▲", 0, "loss spiked"),
    "best": ("★", 0, "lowest validation loss"),
    "stage": ("◧", 9, "next stage of the data"),
    "batch": ("●", 0, "larger batch"),
    "branch": ("↳", -4, "branched off"),
    "cooldown": ("↘", 8, "cooldown begins"),
    "mean": ("◆", 0, "mean of checkpoints"),
}
"""The mark of each kind of event, its horizontal offset in pixels, and its name in the legend."""

_LINES = {"resume": [2, 3], "skip": [2, 3], "stage": [8, 4], "cooldown": [2, 2]}
"""Dashes of the kinds of events that have a line through all charts."""

_MAX_MARKS = 400
"""Maximum marks of one kind per run; with more events, every second, third ... has a mark."""

_TICK = """
const small = Math.max(...ticks.map(Math.abs)) < 0.01;
if (small && tick) return tick.toExponential(2).replace(/\\.?0*e/, "e");
const short = {notation: "compact", maximumSignificantDigits: 4};
return new Intl.NumberFormat("en", short).format(tick).replace("K", "k");
"""


class Charts:
    """Draws the panels of a page. page.js sets the colors, which differ on a dark page.

    Args:
        runs: The runs to show.
        panels: Their curves; the events of the runs are drawn below the first panel.
        x: The x axis when the page is opened.
    """

    def __init__(self, runs: list[Run], panels: list[Panel], *, x: X) -> None:
        self._runs, self._panels, self._x = runs, panels, x
        ends = x_ends(runs)
        self._divisor, unit = unit_of_time(ends["seconds"])
        self._ends = ends | {"seconds": ends["seconds"] / self._divisor}
        self._titles = {"step": "steps", "tokens": "tokens", "seconds": f"{unit} of training"}
        self._whole, self._half = Range1d(name="whole"), Range1d(name="half")
        self._cursor = Span(dimension="height", line_color="#7d8592", line_width=1)
        self._drawn: list[list[Any]] = [[] for _ in runs]  # page.js hides these with a run
        self._sources: dict[tuple[int, str], ColumnDataSource] = {}
        self._events = [self._event_source(run) for run in runs]

    def embed(self) -> tuple[str, dict[str, str]]:
        """Draw the charts; events get a separate chart, `events`.

        Returns:
            A `script` element, and for each chart by name the element that it is drawn into.
        """
        charts = {panel.name: self._draw_panel(panel) for panel in self._panels}
        if any(len(source.data["step"]) for source in self._events):
            charts["events"] = self._draw_events()
            charts[self._panels[0].name].xaxis.visible = False
        document = Document()
        for chart in charts.values():
            document.add_root(chart)
        arguments = {
            "charts": list(charts.values()),
            "drawn": self._drawn,
            "ranges": [self._whole, self._half],
            "ends": self._ends,
            "titles": self._titles,
            "names": [run.name for run in self._runs],
        }
        code = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
        document.js_on_event("document_ready", CustomJS(args=arguments, code=code))
        script, places = components(charts)
        return script, places

    def _make_figure(self, *, height: int, half: bool = False, **options: Any) -> Any:
        chart: Any = figure(
            height=height,
            sizing_mode="stretch_width",
            x_range=self._half if half else self._whole,
            x_axis_label=self._titles[self._x],
            window_axis="x",
            min_border_left=56,
            min_border_right=12,
            min_border_top=0,
            outline_line_color=None,
            background_fill_color=None,
            border_fill_color=None,
            tools="xbox_zoom,xpan,reset,save",
            toolbar_inner=True,
            **options,
        )
        chart.toolbar.autohide, chart.toolbar.logo = True, None
        chart.yaxis.ticker.desired_num_ticks = 5
        chart.axis.formatter = CustomJSTickFormatter(code=_TICK)
        chart.axis.minor_tick_line_color = chart.axis.major_tick_line_color = None
        chart.axis.axis_label_text_font_style = "normal"
        chart.xgrid.visible = False
        return chart

    def _draw_panel(self, panel: Panel) -> Any:
        height = 400 if panel is self._panels[0] else 250
        scale = "log" if panel.log else "linear"
        chart = self._make_figure(height=height, half=panel.from_half, y_axis_type=scale)
        chart.y_range.only_visible = True
        if panel.from_zero and not panel.log:
            chart.y_range.start = 0
        for run, source in enumerate(self._events):
            for kind, dash in _LINES.items():
                if kind in source.data["kind"]:
                    view = CDSView(filter=GroupFilter(column_name="kind", group=kind))
                    line = chart.vspan(self._x, line_dash=dash, source=source, view=view)
                    line.tags = [kind]
                    self._drawn[run].append(line)
        for curve in panel.curves:
            source_key = (curve.run, curve.key)
            if source_key not in self._sources:
                self._sources[source_key] = self._column_source(curve.points)
            source, drawn = self._sources[source_key], self._drawn[curve.run]
            if "low" in curve.points:
                drawn.append(chart.varea(self._x, "low", "high", fill_alpha=0.2, source=source))
            validation = curve.key.startswith("eval_")
            line = chart.line(self._x, "y", source=source)
            line.glyph.line_width = 1.7
            line.glyph.line_dash = ("solid", "dotted", "dotdash")[curve.run // len(COLORS) % 3]
            if validation:
                line.glyph.line_width = 1.3
                line.glyph.line_dash = [2, 3] if curve.is_average else "dashed"
            line.tags = ["curve"]
            line.name = "moving average" if curve.is_average else ""
            if curve.key == "eval_loss":
                line.name = "validation"
            drawn.append(line)
            num_points = len(curve.points["y"])
            if num_points == 1 or (validation and num_points <= 80):
                size = 4 if curve.is_average else 6
                drawn.append(chart.scatter(self._x, "y", size=size, source=source))
        chart.add_tools(CrosshairTool(dimensions="height", overlay=self._cursor))
        return chart

    def _draw_events(self) -> Any:
        """Return the chart of the events: a line of marks for each run."""
        num_runs = len(self._runs)
        chart = self._make_figure(height=18 * num_runs + 60, y_range=(num_runs - 0.5, -0.5))
        chart.yaxis.visible = False
        chart.ygrid.ticker = list(range(num_runs))
        for run, source in enumerate(self._events):
            marks = chart.text(self._x, run, text="mark", x_offset="aside", source=source)
            marks.glyph.text_align, marks.glyph.text_baseline = "center", "middle"
            marks.glyph.text_font_size = "14px"
            self._drawn[run].append(marks)
        chart.add_tools(HoverTool(tooltips="@text"))
        return chart

    def _event_source(self, run: Run) -> ColumnDataSource:
        shown_events = []
        for kind in MARKS:
            events = [
                e for e in run.events if e.kind == kind and e.is_current and e.step is not None
            ]
            shown_events += events[:: -(-len(events) // _MAX_MARKS) or 1]
        places = [run.at(event.step or 0) for event in shown_events]
        columns: dict[str, list[Any]] = {x: [place[x] for place in places] for x in X_KEYS}
        columns["kind"] = [event.kind for event in shown_events]
        columns["mark"] = [MARKS[event.kind][0] for event in shown_events]
        columns["aside"] = [MARKS[event.kind][1] for event in shown_events]
        columns["text"] = [f"{run.name}, step {e.step:,}: {e.text}" for e in shown_events]
        return self._column_source(columns)

    def _column_source(self, columns: Mapping[str, Any]) -> ColumnDataSource:
        """Return columns for charts, with time in the unit that the page shows."""
        seconds = np.asarray(columns["seconds"], dtype=np.float64)
        return ColumnDataSource({**columns, "seconds": seconds / self._divisor})
