"""Draws memory by kind."""

from collections.abc import Sequence
from pathlib import Path

from llm.errors import ConfigError
from llm.plan.devices import GIB
from llm.plan.estimate import Estimate
from llm.plan.memory import KINDS

_COLORS = ("#4477aa", "#66ccee", "#228833", "#aa3377", "#ccbb44", "#ee6677", "#bbbbbb")


def check_plot(path: str) -> None:
    """Refuse a plot that cannot be drawn.

    Raises:
        ConfigError: matplotlib is missing, or the file's name ends in nothing that it writes.
    """
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--plot {path} must end in .png, .pdf or .svg.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: pip install matplotlib, which comes with the extra `report`."
        ) from error


def draw(plans: Sequence[Estimate], *, limit: int, path: str) -> None:
    """Draw one bar for each plan, with the device's memory as a line.

    Args:
        plans: Layouts.
        limit: Bytes that can be filled.
        path: File to write.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.45 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [plan.layout.describe() for plan in plans]
    ends = [0.0] * len(plans)
    for kind, color in zip(KINDS, _COLORS, strict=True):
        sizes = [getattr(plan.memory, kind) / GIB for plan in plans]
        if any(sizes):
            axes.barh(names, sizes, left=ends, color=color, label=kind)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    axes.axvline(limit / GIB, color="black", linestyle="--", label="device")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest rank")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}.") from error
