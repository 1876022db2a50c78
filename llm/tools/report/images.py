"""The panels as PNG files, for papers and slides."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from llm.errors import ConfigError
from llm.tools.report.panels import COLORS, make_panels, unit_of_time, x_ends
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
    end = x_ends(runs)[x]
    divisor, unit = unit_of_time(end) if x == "seconds" else (1, "")
    paths = []
    for panel in make_panels(runs):
        figure = Figure(figsize=(7, 4), dpi=160, layout="constrained")
        plot = figure.subplots()
        for curve in panel.curves:
            evaluation = curve.key.startswith("eval_")
            kind = "moving average" if curve.is_average else "validation"
            style = _DASHES[curve.run // len(COLORS) % 3]
            if evaluation:
                style = ":" if curve.is_average else "--"
            look: dict[str, Any] = {"color": COLORS[curve.run % len(COLORS)][0]}
            places = curve.points[x] / divisor
            plot.plot(
                places,
                curve.points["y"],
                linewidth=1.3,
                linestyle=style,
                marker="o" if evaluation and len(places) < 80 else None,
                markersize=3.5,
                label=", ".join([runs[curve.run].name, *([kind] if evaluation else [])]),
                **look,
            )
            if "low" in curve.points:
                low, high = curve.points["low"], curve.points["high"]
                plot.fill_between(places, low, high, alpha=0.2, linewidth=0, **look)
        if panel.log:
            plot.set_yscale("log")
        elif panel.from_zero:
            plot.set_ylim(bottom=0)
        if panel.from_half:
            plot.set_xlim(left=end / 2 / divisor)
        plot.set_xlabel({"step": "steps", "tokens": "tokens"}.get(x, f"{unit} of training"))
        plot.set_ylabel(panel.unit)
        plot.set_title(panel.title)
        plot.grid(alpha=0.25)
        plot.legend(frameon=False, fontsize="small")
        paths.append(folder / f"{panel.name}.png")
        figure.savefig(paths[-1])
    return paths
