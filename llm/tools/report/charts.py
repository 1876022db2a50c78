"""The panels as Bokeh's charts, on x axes that move together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import (
    CDSView,
    ColumnDataSource,
    CrosshairTool,
    CustomJS,
    GroupFilter,
    HoverTool,
    Range1d,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from llm.tools.report.chart_style import FIGURE_STYLE, style_axes
from llm.tools.report.loss_charts import draw_loss_panel
from llm.tools.report.option_panels import LossPanel
from llm.tools.report.panels import COLORS, Curve, Panel, choose_time_unit, find_last_x_values
from llm.tools.report.runs import X_AXES, Run, XAxis


class Mark(NamedTuple):
    """The mark of a kind of event below the charts.

    Attributes:
        symbol: The character that is drawn.
        x_offset: Horizontal offset in pixels.
        label: Name in the legend.
    """

    symbol: str
    x_offset: int
    label: str


MARKS = {
    "save": Mark("|", 0, "checkpoint saved"),
    "resume": Mark("▶", 6, "resumed"),
    "stop": Mark("■", -6, "stopped"),
    "skip": Mark("✕", 0, "step skipped"),
    "spike": Mark("▲", 0, "loss spiked"),
    "best": Mark("★", 0, "lowest validation loss"),
    "stage": Mark("◧", 9, "next stage of the data"),
    "batch": Mark("●", 0, "larger batch"),
    "branch": Mark("↳", -4, "branched off"),
    "cooldown": Mark("↘", 8, "cooldown begins"),
    "mean": Mark("◆", 0, "mean of checkpoints"),
}
"""The mark of each kind of event."""

_DASHES_BY_KIND = {"resume": [2, 3], "skip": [2, 3], "stage": [8, 4], "cooldown": [2, 2]}
"""Dashes of the kinds of events that have a line through all charts."""

_MAX_MARKS = 400
"""Maximum marks of one kind per run; with more events, every second, third ... has a mark."""


class Charts:
    """Draws the panels of a page. page.js sets the colors, which differ on a dark page.

    Args:
        runs: The runs to show.
        panels: Their curves; the events of the runs are drawn below the first panel.
        loss_panels: Charts of their final losses.
        x: The x axis of the curves when the page is opened.
    """

    def __init__(
        self, runs: list[Run], panels: list[Panel], loss_panels: list[LossPanel], *, x: XAxis
    ) -> None:
        self._runs, self._panels, self._loss_panels, self._x = runs, panels, loss_panels, x
        last_values = find_last_x_values(runs)
        self._divisor, unit = choose_time_unit(last_values["seconds"])
        self._last_values = last_values | {"seconds": last_values["seconds"] / self._divisor}
        self._axis_titles = {"step": "steps", "tokens": "tokens", "seconds": f"{unit} of training"}
        self._full_range, self._second_half_range = Range1d(name="whole"), Range1d(name="half")
        self._cursor = Span(dimension="height", line_color="#7d8592", line_width=1)
        # The elements of each run, which page.js hides together.
        self._renderers_by_run: list[list[Any]] = [[] for _ in runs]
        self._source_by_curve: dict[tuple[int, str], ColumnDataSource] = {}
        self._event_sources = [self._make_event_source(run) for run in runs]

    def embed(self) -> tuple[str, dict[str, str]]:
        """Draw the charts; events get a separate chart, `events`.

        Returns:
            A `script` element, and for each chart by name the element that it is drawn into.
        """
        charts = {panel.name: self._draw_panel(panel) for panel in self._panels}
        if any(len(source.data["step"]) for source in self._event_sources):
            charts["events"] = self._draw_events()
            charts[self._panels[0].name].xaxis.visible = False
        loss_charts = self._draw_loss_panels()
        document = Document()
        for chart in [*charts.values(), *loss_charts.values()]:
            document.add_root(chart)
        arguments = {
            "charts": list(charts.values()),
            "lossCharts": list(loss_charts.values()),
            "drawn": self._renderers_by_run,
            "ranges": [self._full_range, self._second_half_range],
            "ends": self._last_values,
            "titles": self._axis_titles,
            "names": [run.name for run in self._runs],
        }
        code = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
        document.js_on_event("document_ready", CustomJS(args=arguments, code=code))
        script, elements = components(charts | loss_charts)
        return script, elements

    def _draw_loss_panels(self) -> dict[str, Any]:
        """Return the charts of the final losses, by name."""
        chart_by_name = {}
        for loss_panel in self._loss_panels:
            chart, renderer_by_run = draw_loss_panel(loss_panel, self._runs)
            for run_index, renderer in renderer_by_run.items():
                self._renderers_by_run[run_index].append(renderer)
            chart_by_name[loss_panel.name] = chart
        return chart_by_name

    def _make_figure(self, *, height: int, is_second_half: bool = False, **options: Any) -> Any:
        """Return an empty chart on the common x axis, with further options of Bokeh's figure."""
        chart: Any = figure(
            height=height,
            sizing_mode="stretch_width",
            x_range=self._second_half_range if is_second_half else self._full_range,
            x_axis_label=self._axis_titles[self._x],
            window_axis="x",
            tools="xbox_zoom,xpan,reset,save",
            **FIGURE_STYLE,
            **options,
        )
        style_axes(chart)
        chart.xgrid.visible = False
        return chart

    def _draw_panel(self, panel: Panel) -> Any:
        """Return the chart of a panel."""
        height = 400 if panel is self._panels[0] else 250
        scale = "log" if panel.log else "linear"
        chart = self._make_figure(height=height, is_second_half=panel.from_half, y_axis_type=scale)
        chart.y_range.only_visible = True
        if panel.from_zero and not panel.log:
            chart.y_range.start = 0
        self._draw_event_lines(chart)
        for curve in panel.curves:
            self._draw_curve(chart, curve)
        chart.add_tools(CrosshairTool(dimensions="height", overlay=self._cursor))
        return chart

    def _draw_event_lines(self, chart: Any) -> None:
        """Draw a vertical line for each event of the kinds in `_DASHES_BY_KIND`."""
        for run_index, source in enumerate(self._event_sources):
            for kind, dash in _DASHES_BY_KIND.items():
                if kind in source.data["kind"]:
                    view = CDSView(filter=GroupFilter(column_name="kind", group=kind))
                    line = chart.vspan(self._x, line_dash=dash, source=source, view=view)
                    line.tags = [kind]
                    self._renderers_by_run[run_index].append(line)

    def _draw_curve(self, chart: Any, curve: Curve) -> None:
        """Draw a curve, its range if it is thinned out, and points if it has few."""
        curve_key = (curve.run, curve.key)
        if curve_key not in self._source_by_curve:
            self._source_by_curve[curve_key] = self._make_column_source(curve.points)
        source, renderers = self._source_by_curve[curve_key], self._renderers_by_run[curve.run]
        if "low" in curve.points:
            renderers.append(chart.varea(self._x, "low", "high", fill_alpha=0.2, source=source))
        line = chart.line(self._x, "y", source=source)
        _style_line(line, curve)
        renderers.append(line)
        is_validation = curve.key.startswith("eval_")
        num_points = len(curve.points["y"])
        if num_points == 1 or (is_validation and num_points <= 80):
            size = 4 if curve.is_average else 6
            renderers.append(chart.scatter(self._x, "y", size=size, source=source))

    def _draw_events(self) -> Any:
        """Return the chart of the events: a line of marks for each run."""
        num_runs = len(self._runs)
        chart = self._make_figure(height=18 * num_runs + 60, y_range=(num_runs - 0.5, -0.5))
        chart.yaxis.visible = False
        chart.ygrid.ticker = list(range(num_runs))
        for run_index, source in enumerate(self._event_sources):
            marks = chart.text(self._x, run_index, text="mark", x_offset="aside", source=source)
            marks.glyph.text_align, marks.glyph.text_baseline = "center", "middle"
            marks.glyph.text_font_size = "14px"
            self._renderers_by_run[run_index].append(marks)
        chart.add_tools(HoverTool(tooltips="@text"))
        return chart

    def _make_event_source(self, run: Run) -> ColumnDataSource:
        """Return the columns of the marks of a run's events, at most `_MAX_MARKS` of each kind."""
        marked_events = []
        for kind in MARKS:
            events = [
                event
                for event in run.events
                if event.kind == kind and event.is_current and event.step is not None
            ]
            stride = -(-len(events) // _MAX_MARKS) or 1
            marked_events += events[::stride]
        positions = [run.position_at(event.step or 0) for event in marked_events]
        columns: dict[str, list[Any]] = {x: [point[x] for point in positions] for x in X_AXES}
        columns["kind"] = [event.kind for event in marked_events]
        columns["mark"] = [MARKS[event.kind].symbol for event in marked_events]
        columns["aside"] = [MARKS[event.kind].x_offset for event in marked_events]
        columns["text"] = [
            f"{run.name}, step {event.step:,}: {event.text}" for event in marked_events
        ]
        return self._make_column_source(columns)

    def _make_column_source(self, columns: Mapping[str, Any]) -> ColumnDataSource:
        """Return columns for charts, with time in the unit that the page shows."""
        seconds = np.asarray(columns["seconds"], dtype=np.float64)
        return ColumnDataSource({**columns, "seconds": seconds / self._divisor})


def _style_line(line: Any, curve: Curve) -> None:
    """Set width, dashes and name of a curve's line; page.js sets the color."""
    line.glyph.line_width = 1.7
    line.glyph.line_dash = ("solid", "dotted", "dotdash")[curve.run // len(COLORS) % 3]
    if curve.key.startswith("eval_"):
        line.glyph.line_width = 1.3
        line.glyph.line_dash = [2, 3] if curve.is_average else "dashed"
    line.tags = ["curve"]
    line.name = "moving average" if curve.is_average else curve.layer
    if curve.key == "eval_loss":
        line.name = "validation"
