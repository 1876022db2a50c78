"""The report as one HTML page with tables and charts; it needs no other file and no network."""

import time
from collections.abc import Callable
from pathlib import Path

import jinja2
from bokeh.resources import Resources
from markupsafe import Markup

from llm import __version__
from llm.metrics.set_scores import set_score_title
from llm.metrics.wall_time import describe_goodput
from llm.tools.report.cell_text import format_count, format_duration, format_option, format_short
from llm.tools.report.charts import MARKS, Charts
from llm.tools.report.comparison import Comparison
from llm.tools.report.events import Event
from llm.tools.report.expert_loads import make_snapshot_maps, make_time_map
from llm.tools.report.panels import COLORS, MAX_POINTS, make_panels
from llm.tools.report.ranking import make_ranking_table
from llm.tools.report.run_files import is_count
from llm.tools.report.runs import Run, XAxis, best_evaluation

Cell = Callable[[Run], str | None]
"""A function that returns the text of a run's cell; None for an empty one."""

_MAX_SILENCE_SECONDS = 3600.0
"""If a run has written nothing for longer, the page says that it may be dead."""


def make_page(runs: list[Run], comparison: Comparison | None, *, x: XAxis) -> str:
    """Return the page as HTML; `x` is its x axis when it is opened."""
    panels = make_panels(runs)
    loss_panels = comparison.loss_panels if comparison else []
    script, elements = Charts(runs, panels, loss_panels, x=x).embed() if panels else ("", {})
    bokeh_library = Resources(mode="inline", components=["bokeh"])
    options = make_configuration_rows(runs)
    event_kinds = {event.kind for run in runs for event in run.events if event.is_current}
    # Two runs never share a folder, so a difference in output_dir is not worth showing.
    differences = [
        (name, values) for name, values in options if len(set(values)) > 1 and name != "output_dir"
    ]
    expert_maps = [
        (run_index, make_time_map(run.expert_loads), make_snapshot_maps(run.expert_loads))
        for run_index, run in enumerate(runs)
        if run.expert_loads
    ]
    page: str = _load_page_template().render(
        title=", ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs",
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        library=bokeh_library.render_js() if panels else "",
        script=script,
        places=elements,
        panels=panels,
        max_points=MAX_POINTS,
        thinned=any("low" in curve.points for panel in panels for curve in panel.curves),
        runs=runs,
        colors=COLORS,
        x=x,
        marks=[(mark.symbol, mark.label) for kind, mark in MARKS.items() if kind in event_kinds],
        summary=make_summary_rows(runs),
        configuration=options,
        differences=differences,
        events=make_event_rows(runs),
        expert_maps=expert_maps,
        comparison=comparison,
        ranking=make_ranking_table(comparison.ranking) if comparison else None,
    )
    return page


def _load_page_template() -> jinja2.Template:
    """Load the template of the page from the folder of this file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def make_summary_rows(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return the rows of the summary: a name, and a cell for each run."""
    rows: list[tuple[str, Cell]] = [
        ("Status", _status_cell),
        ("Made of", _origin_cell),
        ("Model", _model_cell),
        ("Parameters", _parameters_cell),
        ("Experts", lambda run: run.start.get("experts")),
        ("Devices", _devices_cell),
        ("Steps", _steps_cell),
        ("Tokens", _last_cell("tokens", format_count)),
        ("Training time", _last_cell("seconds", format_duration)),
        ("Tokens/s, mean", _speed_cell),
        ("Goodput", _goodput_cell),
        ("Device hours", _wall_time_cell("device_hours", "{:.3g}".format)),
        ("Energy, joules", _wall_time_cell("energy_joules", "{:,.4g}".format)),
        ("Tokens/joule", _wall_time_cell("tokens_per_joule", "{:.3g}".format)),
        ("Training loss, last", _last_cell("loss", "{:.4f}".format)),
        ("Validation loss, last", _last_cell("eval_loss", "{:.4f}".format)),
        ("Validation loss, best", _best_cell),
        ("Moving average, last", _last_cell("eval_ema_loss", "{:.4f}".format)),
        ("Perplexity, last", _last_cell("eval_perplexity", "{:.2f}".format)),
        ("Skipped steps", _last_cell("skipped_steps", format_count)),
    ]
    for key in dict.fromkeys(key for run in runs for row in run.rows for key in row):
        if title := set_score_title(key):
            rows.append((title, _last_cell(key, "{:.4f}".format)))
    cells = [(name, [cell(run) for run in runs]) for name, cell in rows]
    return [(name, [value or "-" for value in values]) for name, values in cells if any(values)]


def make_configuration_rows(runs: list[Run]) -> list[tuple[str, list[str | None]]]:
    """Return every option and its value in each run, None if it is not set."""
    options = dict.fromkeys(name for run in runs for name in run.config)
    return [(name, [format_option(run.config.get(name)) for run in runs]) for name in options]


def make_event_rows(runs: list[Run]) -> list[tuple[int, str, Event]]:
    """Return the events, the newest first, each with the index and the name of its run."""
    rows = [(index, run.name, event) for index, run in enumerate(runs) for event in run.events]
    return sorted(rows, key=lambda row: (row[2].time, row[2].step or 0), reverse=True)


def _format_or_none(value: float | None, formatter: Callable[[float], str]) -> str | None:
    return None if value is None else formatter(value)


def _last_cell(key: str, formatter: Callable[[float], str]) -> Cell:
    """Return the function that formats a run's last value of a metric."""
    return lambda run: _format_or_none(run.last(key), formatter)


def _wall_time_cell(key: str, formatter: Callable[[float], str]) -> Cell:
    """Return the function that formats a value of a run's account of wall time."""
    return lambda run: _format_or_none(run.goodput.get(key), formatter)


def _status_cell(run: Run) -> str | None:
    """Return the status of a run, and for a running one the time since its last sign of life."""
    status = run.status.get("status")
    if not isinstance(status, str):
        return None
    cell = Markup('<span class="status {0}">{0}</span>').format(status)
    names = ("metrics.jsonl", "log.txt", "status.json")
    times = [(run.path / name).stat().st_mtime for name in names if (run.path / name).is_file()]
    if status != "running" or not times:
        return cell
    age = max(0.0, time.time() - max(times))
    warning = "; it may have been killed" if age > _MAX_SILENCE_SECONDS else ""
    remark = f"last sign {format_duration(round(age))} ago{warning}"
    return cell + Markup(" <small>{}</small>").format(remark)


def _origin_cell(run: Run) -> str | None:
    """Return what a branch or a mean of checkpoints was made of; None for another run."""
    if run.origin is None:
        return None
    name, steps = run.origin.folder.name, run.origin.steps
    if run.origin.is_mean:
        template = "mean of {} <small>{} checkpoints, steps {:,} to {:,}</small>"
        return Markup(template).format(name, len(steps), steps[0], steps[-1])
    cell = Markup("branch of {} <small>step {:,}</small>").format(name, steps[0])
    num_tokens, shape = run.config.get("cooldown_tokens"), run.config.get("cooldown_shape")
    if not is_count(num_tokens):
        return cell
    return cell + Markup("<small>, cooldown of {} tokens ({})</small>").format(
        format_short(num_tokens), shape
    )


def _model_cell(run: Run) -> str | None:
    model_name = run.config.get("model_name_or_path") or run.config.get("config_name")
    names = dict.fromkeys(str(word) for word in (model_name, run.start.get("architecture")) if word)
    return ", ".join(names)


def _parameters_cell(run: Run) -> str | None:
    total, active = run.start.get("parameters"), run.start.get("active_parameters")
    if total is None or active is None:
        return _format_or_none(total, format_count)
    return Markup("{} <small>{} active</small>").format(format_count(total), format_count(active))


def _devices_cell(run: Run) -> str | None:
    if "ranks" not in run.start:
        return None
    precision = run.start.get("mixed_precision")
    return f"{run.start['ranks']} x {run.start.get('device')}, " + (
        "fp32" if precision == "no" else str(precision)
    )


def _steps_cell(run: Run) -> str | None:
    num_steps, total = run.last("step"), run.start.get("total_steps")
    if not total or num_steps == total:
        return _format_or_none(num_steps, format_count)
    bar = '<span class="progress"><i style="width:{:.1f}%"></i></span>'
    return Markup("{} of {} " + bar).format(
        format_count(num_steps or 0), format_count(total), 100 * min(1.0, (num_steps or 0) / total)
    )


def _goodput_cell(run: Run) -> str | None:
    if not run.goodput:
        return None
    share, _, details = describe_goodput(run.goodput).partition(" ")
    return Markup('{} <span class="details">{}</span>').format(share, details)


def _speed_cell(run: Run) -> str | None:
    tokens, seconds = run.last("tokens"), run.last("seconds")
    return format_short(tokens / seconds) if tokens and seconds else None


def _best_cell(run: Run) -> str | None:
    best = best_evaluation(run.rows)
    if best is None:
        return None
    return Markup("{:.4f} <small>step {:,}</small>").format(best.loss, best.step)
