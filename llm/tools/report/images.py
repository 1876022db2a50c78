"""The panels as PNG files, for papers and slides."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llm.errors import ConfigError
from llm.tools.report.panels import COLORS, Curve, last_x_values, make_panels, unit_of_time
from llm.tools.report.runs import Run, X

_DASHES = ("-", "-.", ":")


@rc_context({"text.parse_math": False})  # names may contain dollar signs
def write_images(runs: list[Run], folder: Path, *, x: X) -> list[Path]:
    """Write each panel to `folder/NAME.png`.

    Args:
        runs: The runs to show.
        folder: The folder, which is created.
        x: The x axis.

    Returns:
        The files.

    Raises:
        ConfigError: The folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--png {folder} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    last_x = last_x_values(runs)[x]
    divisor, unit = unit_of_time(last_x) if x == "seconds" else (1, "")
    paths = []
    for panel in make_panels(runs):
        figure = Figure(figsize=(7, 4), dpi=160, layout="constrained")
        plot = figure.subplots()
        for curve in panel.curves:
            _draw_curve(plot, curve, curve.points[x] / divisor, run_name=runs[curve.run].name)
        if panel.log:
            plot.set_yscale("log")
        elif panel.from_zero:
            plot.set_ylim(bottom=0)
        if panel.from_half:
            plot.set_xlim(left=last_x / 2 / divisor)
        plot.set_xlabel({"step": "steps", "tokens": "tokens"}.get(x, f"{unit} of training"))
        plot.set_ylabel(panel.unit)
        plot.set_title(panel.title)
        plot.grid(alpha=0.25)
        plot.legend(frameon=False, fontsize="small")
        paths.append(folder / f"{panel.name}.png")
        figure.savefig(paths[-1])
    return paths


def _draw_curve(
    plot: Axes, curve: Curve, x_values: npt.NDArray[np.float64], *, run_name: str
) -> None:
    """Draw a curve, and its range if it is thinned out.

    Args:
        plot: The chart.
        curve: The curve.
        x_values: The positions of its points on the x axis.
        run_name: Name of the run in the legend.
    """
    is_validation = curve.key.startswith("eval_")
    label, style = run_name, _DASHES[curve.run // len(COLORS) % 3]
    if is_validation:
        label += ", moving average" if curve.is_average else ", validation"
        style = ":" if curve.is_average else "--"
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
