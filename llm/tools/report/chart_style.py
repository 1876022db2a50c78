"""The style of all charts of the page, apart from the colors, which page.js sets."""

from typing import Any

from bokeh.models import CustomJSTickFormatter

FIGURE_STYLE: dict[str, Any] = {
    "min_border_left": 56,
    "min_border_right": 12,
    "min_border_top": 0,
    "outline_line_color": None,
    "background_fill_color": None,
    "border_fill_color": None,
    "toolbar_inner": True,
}

FORMAT_TICK = """
const small = Math.max(...ticks.map(Math.abs)) < 0.01;
if (small && tick) return tick.toExponential(2).replace(/\\.?0*e/, "e");
const short = {notation: "compact", maximumSignificantDigits: 4};
return new Intl.NumberFormat("en", short).format(tick).replace("K", "k");
"""
"""JavaScript that formats the tick of an axis in few characters."""


def style_axes(chart: Any) -> None:
    """Set the style of the toolbar and the axes of a Bokeh figure."""
    chart.toolbar.autohide, chart.toolbar.logo = True, None
    chart.yaxis.ticker.desired_num_ticks = 5
    chart.axis.formatter = CustomJSTickFormatter(code=FORMAT_TICK)
    chart.axis.minor_tick_line_color = chart.axis.major_tick_line_color = None
    chart.axis.axis_label_text_font_style = "normal"
