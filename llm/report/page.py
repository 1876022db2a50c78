"""The report as one HTML page that needs no other file and no network."""

import json
import time
from html import escape
from itertools import groupby
from pathlib import Path

from llm import __version__
from llm.report.charts import draw_panel, hover_numbers, mark_legend, x_axes
from llm.report.panels import MAX_POINTS, Panel, make_panels, x_ends
from llm.report.runs import Run
from llm.report.scales import X_KEYS, X
from llm.report.tables import MAX_COLUMNS, configuration_tables, event_table, summary_table

COLOURS = (
    ("#2463c9", "#73a7ff"),
    ("#cf4a12", "#ff9161"),
    ("#12805c", "#45cf9b"),
    ("#c02672", "#ff80bd"),
    ("#9a6b00", "#e6b84a"),
    ("#0b7f99", "#52cbe6"),
    ("#7a3fd1", "#bd9bff"),
    ("#5d5a55", "#bdb7ae"),
)
"""Of the runs, one after the other, on a light and on a dark page."""

_AXIS_NAMES = {"step": "steps", "tokens": "tokens", "seconds": "time"}
_HERE = Path(__file__).parent


def make_page(runs: list[Run], *, x: X) -> str:
    """The whole page.

    Args:
        runs: What to show.
        x: The x axis that is chosen at first.
    """
    panels = make_panels(runs)
    names = ", ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs"
    style = (_HERE / "page.css").read_text(encoding="utf-8") + _run_styles(len(runs))
    made = time.strftime("%Y-%m-%d %H:%M %Z")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(names)}: training report</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<header><h1>{escape(names)}</h1>"
        f"<p>Training report of {made}, llm-trainers {escape(__version__)}</p></header>\n"
        f"<main>\n{_body(runs, panels, x=x)}"
        f"{configuration_tables(runs)}\n{_notes(runs, panels)}</main>\n</body>\n</html>\n"
    )


def _body(runs: list[Run], panels: list[Panel], *, x: X) -> str:
    """How the runs stand beside the chart of the loss, then the other charts."""
    summary = summary_table(runs)
    if not panels:
        return f"{summary}<p>No step has been reported yet.</p>\n"
    ends = x_ends(runs)
    axes = [x_axes(panel, ends) for panel in panels]
    figures = [
        draw_panel(panel, runs, axes[number], number=number, with_events=number == 0)
        for number, panel in enumerate(panels)
    ]
    first = f"<div>{_legend(runs, panels[0])}{figures[0]}{event_table(runs)}</div>"
    beside = " beside" if len(runs) <= MAX_COLUMNS else ""
    sections = ""
    for name, members in groupby(list(enumerate(panels))[1:], key=lambda item: item[1].section):
        drawn = "".join(figures[number] for number, _ in members)
        sections += f'<section><h2>{name}</h2><div class="charts">{drawn}</div></section>\n'
    numbers = {
        "runs": [run.name for run in runs],
        "panels": [hover_numbers(panel, own) for panel, own in zip(panels, axes, strict=True)],
    }
    # A "<" in a script could end it, or begin another one.
    data = json.dumps(numbers, separators=(",", ":")).replace("<", "\\u003c")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return (
        f'{_controls(runs, x=x)}\n<div class="top{beside}">{summary}{first}</div>\n{sections}'
        f'<script type="application/json" id="numbers">{data}</script>\n'
        f"<script>\n{script}</script>\n"
    )


def _controls(runs: list[Run], *, x: X) -> str:
    """What is chosen on the page; it works without the script."""
    axes = "".join(
        f'<label><input type="radio" name="x" id="x-{key}" value="{key}"'
        f"{' checked' if key == x else ''}><span>{_AXIS_NAMES[key]}</span></label>"
        for key in X_KEYS
    )
    shown = "".join(
        f'<label class="run-{number}"><input type="checkbox" id="run-{number}" checked>'
        f'<i class="swatch"></i>{escape(run.name)}</label>'
        for number, run in enumerate(runs)
    )
    runs_shown = f'<fieldset class="runs">{shown}</fieldset>' if len(runs) > 1 else ""
    return (
        f'<form class="controls"><fieldset class="axes"><legend>Against</legend>{axes}</fieldset>'
        f"{runs_shown}</form>"
    )


def _legend(runs: list[Run], panel: Panel) -> str:
    """What the lines of the first chart are, and the marks below it."""
    lines = ""
    if {"loss", "eval_loss"} <= {curve.key for curve in panel.curves}:
        lines = (
            '<li><span class="key"></span>training</li>'
            '<li><span class="key evaluation"></span>validation</li>'
        )
    return f'<ul class="legend">{lines}{mark_legend(runs)}</ul>'


def _run_styles(num_runs: int) -> str:
    """Colours of the runs, and what hides one; after eight, the lines are dashed."""
    lines = []
    for number in range(num_runs):
        light, dark = COLOURS[number % len(COLOURS)]
        lines.append(f".run-{number} {{ --run: {light}; }}")
        on_dark = f".run-{number} {{ --run: {dark}; }}"
        lines.append(f"@media screen and (prefers-color-scheme: dark) {{ {on_dark} }}")
        dash = number // len(COLOURS)
        if dash:
            lines.append(f".run-{number} .line {{ stroke-dasharray: {4 + 4 * dash} 3; }}")
        lines.append(
            f"body:has(#run-{number}:not(:checked)) :is(svg, .lanes) .run-{number} "
            "{ display: none; }"
        )
    return "\n".join(lines) + "\n"


def _notes(runs: list[Run], panels: list[Panel]) -> str:
    notes = ["Time is that of training: evaluation, saving and starting up are left out."]
    if any(curve.lows is not None for panel in panels for curve in panel.curves):
        notes.append(
            f"Where a curve has more than {MAX_POINTS:,} reports, a point is the mean of several, "
            "and the pale band reaches from the lowest to the highest of them."
        )
    for run in runs:
        if run.num_unread:
            notes.append(f"{run.num_unread:,} lines of {run.name}/metrics.jsonl could not be read.")
    return f"<footer>{''.join(f'<p>{escape(note)}</p>' for note in notes)}</footer>\n"
