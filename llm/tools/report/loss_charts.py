"""The final validation losses as Bokeh's charts: a point for each run."""

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import ColumnDataSource, CustomJSTickFormatter, FixedTicker, HoverTool
from bokeh.plotting import figure

from llm.tools.report.chart_style import FIGURE_STYLE, FORMAT_TICK, style_axes
from llm.tools.report.option_panels import Line, LossPanel
from llm.tools.report.runs import Run

_HEIGHT = 250

_NAME_TICK = """
const place_index = places.findIndex((place) => Math.abs(place - tick) <= 1e-9 * Math.abs(place));
if (place_index >= 0) return texts[place_index];
"""


def draw_loss_panel(panel: LossPanel, runs: Sequence[Run]) -> tuple[Any, dict[int, Any]]:
    """Draw a panel. page.js sets the colors; the tag `faint` marks lines and their labels.

    Returns:
        The chart, and for each run by index the element with its point.
    """
    chart: Any = figure(
        height=_HEIGHT,
        sizing_mode="stretch_width",
        x_axis_type="log" if panel.log else "linear",
        x_axis_label=panel.unit,
        tools="box_zoom,pan,reset,save",
        **FIGURE_STYLE,
    )
    style_axes(chart)
    has_labels = any(line.label for line in panel.lines)
    chart.x_range.range_padding, chart.y_range.range_padding = 0.4 if has_labels else 0.2, 0.12
    if panel.ticks:
        _set_ticks(chart, panel.ticks)
    for line in panel.lines:
        _draw_line(chart, line)
    renderer_by_run = {}
    for run_index, point in panel.points.items():
        text = f"{runs[run_index].name}: {point.loss:.4f}"
        source = ColumnDataSource({"x": [point.x], "y": [point.loss], "text": [text]})
        renderer_by_run[run_index] = chart.scatter("x", "y", size=8, source=source)
    chart.add_tools(HoverTool(tooltips="@text", renderers=list(renderer_by_run.values())))
    return chart, renderer_by_run


def _set_ticks(chart: Any, text_by_place: Mapping[float, str]) -> None:
    """Set the ticks of the x axis: the text at each place."""
    places, texts = list(text_by_place), list(text_by_place.values())
    chart.xaxis.ticker = FixedTicker(ticks=places)
    chart.xgrid.ticker = FixedTicker(ticks=places)
    chart.xaxis.formatter = CustomJSTickFormatter(
        args={"places": places, "texts": texts}, code=_NAME_TICK + FORMAT_TICK
    )


def _draw_line(chart: Any, line: Line) -> None:
    """Draw a line through points, with its label at the last one."""
    x_values, losses = [point.x for point in line.points], [point.loss for point in line.points]
    chart.line(x_values, losses, line_width=1.3).tags = ["faint"]
    chart.text(
        x_values[-1:],
        losses[-1:],
        text=[line.label],
        x_offset=8,
        text_baseline="middle",
        text_font_size="11px",
    ).tags = ["faint"]
