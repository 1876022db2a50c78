"""The panels as PNG files, for papers and slides."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from llm.errors import ConfigError
from llm.tools.report.comparison import Comparison
from llm.tools.report.expert_loads import HeatMap, make_snapshot_maps, make_time_map
from llm.tools.report.option_panels import LossPanel
from llm.tools.report.panels import (
    COLORS,
    Curve,
    Panel,
    choose_time_unit,
    find_last_x_values,
    make_panels,
)
from llm.tools.report.runs import Run, XAxis

_DASHES = ("-", "-.", ":")
_MAX_LEGEND_RUNS = 12
"""With more runs, a legend would cover the curves."""


@rc_context({"text.parse_math": False})  # names may contain dollar signs
def write_images(
    runs: list[Run], comparison: Comparison | None, folder: Path, *, x: XAxis
) -> list[Path]:
    """Write each panel to `folder/NAME.png`, and the loads of experts to `folder/experts.png`.

    If several runs have recorded loads, the files are `experts-1.png` and so on, by the run's
    number in the report.

    Returns:
        The files.

    Raises:
        ConfigError: The folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--png {folder} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    last_x = find_last_x_values(runs)[x]
    divisor, unit = choose_time_unit(last_x) if x == "seconds" else (1, "")
    x_label = {"step": "steps", "tokens": "tokens"}.get(x, f"{unit} of training")
    paths = []
    for panel in make_panels(runs):
        paths.append(folder / f"{panel.name}.png")
        figure = Figure(figsize=(7, 4), dpi=160, layout="constrained")
        plot = figure.subplots()
        for curve in panel.curves:
            _draw_curve(plot, curve, curve.points[x] / divisor, run_name=runs[curve.run].name)
        _set_axes(plot, panel, x_label=x_label, last_x=last_x / divisor)
        has_room = len(runs) <= _MAX_LEGEND_RUNS
        if has_room and not all(curve.layer for curve in panel.curves):
            plot.legend(frameon=False, fontsize="small")
        figure.savefig(paths[-1])
    for loss_panel in comparison.loss_panels if comparison else []:
        paths.append(folder / f"{loss_panel.name}.png")
        _draw_loss_panel(loss_panel).savefig(paths[-1])
    return paths + _write_expert_images(runs, folder)


def _write_expert_images(runs: list[Run], folder: Path) -> list[Path]:
    """Write the loads of experts of each run that has recorded them; return the files."""
    recorded_runs = [(number, run) for number, run in enumerate(runs, 1) if run.expert_loads]
    paths = []
    for number, run in recorded_runs:
        suffix = f"-{number}" if len(recorded_runs) > 1 else ""
        paths.append(folder / f"experts{suffix}.png")
        maps = [make_time_map(run.expert_loads), *make_snapshot_maps(run.expert_loads)]
        _draw_heat_maps(maps, title=f"load of experts, {run.name}").savefig(paths[-1])
    return paths


def _set_axes(plot: Axes, panel: Panel, *, x_label: str, last_x: float) -> None:
    """Set the scales, limits and labels of a panel's axes.

    Args:
        plot: The chart, with its curves.
        panel: The panel.
        x_label: Label of the x axis.
        last_x: Last value of the longest run on the x axis, in its unit.
    """
    if panel.log:
        plot.set_yscale("log")
    elif panel.from_zero:
        plot.set_ylim(bottom=0)
    if panel.from_half:
        plot.set_xlim(left=last_x / 2)
    plot.set_xlabel(x_label)
    plot.set_ylabel(panel.unit)
    plot.set_title(panel.title)
    plot.grid(alpha=0.25)


def _draw_curve(
    plot: Axes, curve: Curve, x_values: npt.NDArray[np.float64], *, run_name: str
) -> None:
    """Draw a curve, and its range if it is thinned out."""
    is_validation = curve.key.startswith("eval_")
    label, style = run_name, _DASHES[curve.run // len(COLORS) % 3]
    if is_validation:
        label += ", moving average" if curve.is_average else ", validation"
        style = ":" if curve.is_average else "--"
    if curve.layer:  # a legend of all layers would cover the curves
        label = "_"
        plot.annotate(curve.layer, (x_values[-1], curve.points["y"][-1]), fontsize="xx-small")
    light_color, _ = COLORS[curve.run % len(COLORS)]
    plot.plot(
        x_values,
        curve.points["y"],
        linewidth=1.3,
        linestyle=style,
        marker="o" if is_validation and len(x_values) < 80 else None,
        markersize=3.5,
        label=label,
        color=light_color,
    )
    if "low" in curve.points:
        low, high = curve.points["low"], curve.points["high"]
        plot.fill_between(x_values, low, high, alpha=0.2, linewidth=0, color=light_color)


def _draw_loss_panel(panel: LossPanel) -> Figure:
    """Return a figure of the final losses."""
    figure = Figure(figsize=(5, 4), dpi=160, layout="constrained")
    plot = figure.subplots()
    if panel.log:
        plot.set_xscale("log")
    if panel.ticks:
        plot.set_xticks(list(panel.ticks), list(panel.ticks.values()), minor=False)
        plot.xaxis.set_minor_locator(NullLocator())
    for line in panel.lines:
        x_values, losses = [point.x for point in line.points], [point.loss for point in line.points]
        plot.plot(x_values, losses, color="0.6", linewidth=1, zorder=1)
        plot.annotate(
            line.label,
            (x_values[-1], losses[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    for run_index, point in panel.points.items():
        light_color, _ = COLORS[run_index % len(COLORS)]
        plot.scatter(point.x, point.loss, s=22, color=light_color, zorder=2)
    plot.margins(0.12)
    plot.set_xlabel(panel.unit)
    plot.set_ylabel("validation loss")
    plot.set_title(panel.title)
    plot.grid(alpha=0.25)
    return figure


def _draw_heat_maps(heat_maps: Sequence[HeatMap], *, title: str) -> Figure:
    """Return a figure with a row for each heat map, in the colors of the page."""
    heights = [heat_map.height for heat_map in heat_maps]
    inches = 0.7 + sum(0.75 + height / 100 for height in heights)
    figure = Figure(figsize=(7, inches), dpi=160, layout="constrained")
    figure.suptitle(title)
    plots = figure.subplots(len(heat_maps), squeeze=False, height_ratios=heights)
    for plot, heat_map in zip(plots[:, 0], heat_maps, strict=True):
        plot.imshow(heat_map.colors, aspect="auto", interpolation="nearest")
        num_rows, num_columns, _ = heat_map.colors.shape
        plot.set_yticks([0, num_rows - 1], [heat_map.top, heat_map.bottom])
        plot.set_xticks([0, num_columns - 1], [heat_map.left, heat_map.right])
        plot.set_title(f"{heat_map.title}, {heat_map.remark}", fontsize="medium")
    return figure
