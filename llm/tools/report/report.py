"""Shows runs as a page of curves: `llm-trainers report runs/NAME [runs/OTHER ...]`.

Of several runs, it ranks those that have finished, on the page and on standard output.

Exit codes: 0 written, 1 written without the runs that cannot be read, 2 an option, or a file that
cannot be read or written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llm.config.command_line import parse_options
from llm.config.options import option, option_group
from llm.config.program import program
from llm.config.shell import shell_line
from llm.errors import ConfigError
from llm.runtime.files import write_whole
from llm.runtime.world import ignore_ranks
from llm.tools.report.runs import Run, XAxis, find_run_folders, read_runs

if TYPE_CHECKING:
    from llm.tools.report.comparison import Comparison

_PAGE_TITLE = b": training report</title>"
"""Marks a page: a new page may replace an earlier one, but no other file."""
_HEAD_BYTES = 1 << 14


@option_group("Report")
class ReportOptions:
    """The runs to show, and the files to write."""

    runs: tuple[str, ...] = option((), "Folders of runs, or of such folders.", path=True)
    output: str | None = option(
        None, "HTML file to write; by default report.html in the first run.", path=True
    )
    png: str | None = option(None, "Folder for the charts as PNG files.", path=True)
    x: Literal["steps", "tokens", "time"] = option("steps", "The x axis: steps, tokens or time.")


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    options = parse_options(
        ReportOptions,
        argv,
        prog="llm-trainers report",
        description="Show the curves of runs, finished or running, as a web page. It needs the "
        "packages bokeh and matplotlib, and scipy for scaling laws: pip install bokeh matplotlib "
        "scipy.",
        positional="runs",
        example="runs/quickstart runs/other --output compare.html",
    )
    if not options.runs:
        raise ConfigError("No run is named: give its folder, as in llm-trainers report runs/wiki.")
    folders = [Path(run) for run in options.runs]
    runs, problems = read_runs([path for folder in folders for path in find_run_folders(folder)])
    if not runs:
        raise ConfigError(" ".join(problems))
    from llm.tools.report.comparison import compare_runs  # loads numpy

    comparison = compare_runs(runs)
    paths = write_report(options, runs, comparison)
    if comparison is not None:
        sys.stdout.write(comparison.describe())
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    for sentence in [*(s for run in runs for s in run.unread), *problems]:
        sys.stderr.write(f"left out: {sentence}\n")
    return 1 if problems else 0


def write_report(
    options: ReportOptions, runs: list[Run], comparison: "Comparison | None"
) -> list[Path]:
    """Write the page of some runs, and with `--png` the images.

    Returns:
        The files that were written.

    Raises:
        ConfigError: A target has the wrong kind, or a package of the extra `report` is missing.
    """
    output = Path(options.output or _default_output(Path(options.runs[0]), runs))
    _check_replaceable_page(output)
    x: XAxis = {"steps": "step", "tokens": "tokens", "time": "seconds"}[options.x]  # type: ignore[assignment]
    try:
        # Imported here so that --help and a wrong folder do not need the extra's packages.
        from llm.tools.report.images import write_images
        from llm.tools.report.page import make_page
    except ImportError as error:
        install = shell_line([sys.executable, "-m", "pip", "install", "bokeh", "matplotlib"])
        raise ConfigError(
            f"llm-trainers report needs the package {error.name}: run {install}; these are the "
            "extra `report`."
        ) from error
    images = [] if options.png is None else write_images(runs, comparison, Path(options.png), x=x)
    output.parent.mkdir(parents=True, exist_ok=True)
    # The name of a folder may contain any bytes.
    write_whole(output, make_page(runs, comparison, x=x).encode(errors="replace"))
    return [output, *images]


def _default_output(folder: Path, runs: list[Run]) -> Path:
    """Return the page of the first folder: of a folder of runs, or of the first run."""
    is_folder_of_runs = runs[0].path.parent == folder
    return (folder if is_folder_of_runs else runs[0].path) / "report.html"


def _check_replaceable_page(path: Path) -> None:
    """Refuse to replace a file that is not a page of this program."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name an HTML file.")
    if not path.exists():
        return
    with path.open("rb") as file:
        is_page = _PAGE_TITLE in file.read(_HEAD_BYTES)
    if not is_page:
        raise ConfigError(
            f"--output {path} exists and was not written by llm-trainers report; name another file."
        )
