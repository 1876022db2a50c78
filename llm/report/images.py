"""The panels as PNG files, for papers and slides; drawn by matplotlib, which is optional."""

from pathlib import Path
from typing import Any

from llm.errors import ConfigError
from llm.report.charts import x_axes
from llm.report.page import COLOURS
from llm.report.panels import Panel, make_panels, x_ends
from llm.report.runs import Run
from llm.report.scales import Axis, X

_DASHES = ("-", "--", "-.", ":")


def write_images(runs: list[Run], folder: Path, *, x: X) -> list[Path]:
    """Write each panel to `folder/NAME.png`.

    Args:
        runs: What to show.
        folder: Where to; made if need be.
        x: What the curves are shown against.

    Returns:
        The files.

    Raises:
        ConfigError: matplotlib is missing, or the folder is a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs the package matplotlib: pip install 'llm-trainers[report]', or leave "
            "--png out (the page shows the same charts)."
        ) from error
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--png {folder} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    ends = x_ends(runs)
    paths = []
    for panel in make_panels(runs):
        figure = Figure(figsize=(7, 4), dpi=160, layout="constrained")
        _draw(figure.subplots(), panel, runs, x_axes(panel, ends)[x], x=x)
        paths.append(folder / f"{panel.name}.png")
        figure.savefig(paths[-1])
    return paths


def _draw(plot: Any, panel: Panel, runs: list[Run], axis: Axis, *, x: X) -> None:
    for curve in panel.curves:
        colour = COLOURS[curve.run % len(COLOURS)][0]
        places = [place / axis.divisor for place in curve.xs[x]]
        values = [float("nan") if value is None else value for value in curve.ys]
        evaluation = curve.key.startswith("eval_")
        plot.plot(
            places,
            values,
            color=colour,
            linewidth=1.3,
            linestyle="--" if evaluation else _DASHES[curve.run // len(COLOURS) % len(_DASHES)],
            marker="o" if evaluation and len(places) < 80 else None,
            markersize=3.5,
            label=", ".join([runs[curve.run].name, *(["validation"] if evaluation else [])]),
        )
        if curve.lows is not None and curve.highs is not None:
            lows = [float("nan") if low is None else low for low in curve.lows]
            highs = [float("nan") if high is None else high for high in curve.highs]
            plot.fill_between(places, lows, highs, color=colour, alpha=0.2, linewidth=0)
    for number, run in enumerate(runs):
        for event in run.events:
            if event.kind in ("resume", "skip"):
                place = run.at(event.step)[x] / axis.divisor
                colour = "#c1121f" if event.kind == "skip" else COLOURS[number % len(COLOURS)][0]
                plot.axvline(place, color=colour, linewidth=0.7, linestyle=":")
    plot.set_xlim(axis.low / axis.divisor, axis.high / axis.divisor)
    plot.set_ylim(panel.y.low, panel.y.high)
    if panel.y.log:
        plot.set_yscale("log")
    plot.set_xlabel(axis.title)
    plot.set_ylabel(panel.unit)
    plot.set_title(panel.title)
    plot.grid(alpha=0.25)
    plot.legend(frameon=False, fontsize="small")
