"""The report as one HTML page that needs no other file and no network."""

import time
from pathlib import Path

import jinja2
from bokeh.resources import Resources

from llm import __version__
from llm.report.charts import MARKS, Charts
from llm.report.panels import COLOURS, MAX_POINTS, make_panels
from llm.report.runs import Run, X
from llm.report.tables import configuration_rows, event_rows, summary_rows


def make_page(runs: list[Run], *, x: X) -> str:
    """The whole page.

    Args:
        runs: What to show.
        x: The x axis that is chosen at first.
    """
    panels = make_panels(runs)
    script, places = Charts(runs, panels, x=x).embed() if panels else ("", {})
    library = Resources(mode="inline", components=["bokeh"])
    options = configuration_rows(runs)
    kinds = {event.kind for run in runs for event in run.events if event.kept}
    page: str = (
        jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        .get_template("page.html")
        .render(
            title=", ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs",
            made=time.strftime("%Y-%m-%d %H:%M %Z"),
            version=__version__,
            library=library.render_js() if panels else "",
            script=script,
            places=places,
            panels=panels,
            max_points=MAX_POINTS,
            thinned=any("low" in curve.points for panel in panels for curve in panel.curves),
            runs=runs,
            colours=COLOURS,
            x=x,
            marks=[(mark, name) for kind, (mark, _, name) in MARKS.items() if kind in kinds],
            summary=summary_rows(runs),
            configuration=options,
            # The folders differ because the runs are different ones.
            differences=[
                (name, values)
                for name, values in options
                if len(set(values)) > 1 and name != "output_dir"
            ],
            events=event_rows(runs),
        )
    )
    return page
