"""The tables of the report: how the runs stand, how they were configured, what happened."""

import time
from collections.abc import Callable
from html import escape

from llm.report.runs import Run
from llm.report.scales import duration, short, whole

_NOT_COMPARED = {"output_dir"}
"""Options that differ because the runs are different ones."""

MAX_COLUMNS = 3
"""Of so many runs the summary has its place beside the first chart."""

_MAX_EVENTS = 200
_SILENT_SECONDS = 3600.0
"""After so long without a report it is worth saying that a run may be dead."""


def summary_table(runs: list[Run]) -> str:
    """How far each run has come, and with what result: a column for each run, of many a row."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("Status", _status),
        ("Model", _model),
        ("Parameters", lambda run: _or_dash(run.facts.num_parameters, whole)),
        ("Devices", _devices),
        ("Steps", _steps),
        ("Tokens", lambda run: _or_dash(run.last("tokens"), whole)),
        ("Training time", lambda run: _or_dash(run.last("seconds"), duration)),
        ("Tokens/s, mean", _mean_speed),
        ("Training loss, last", lambda run: _or_dash(run.last("loss"), "{:.4f}".format)),
        ("Validation loss, last", lambda run: _or_dash(run.last("eval_loss"), "{:.4f}".format)),
        ("Validation loss, best", _best),
        ("Perplexity, last", lambda run: _or_dash(run.last("eval_perplexity"), "{:.2f}".format)),
        ("Skipped steps", lambda run: _or_dash(run.last("skipped_steps"), whole)),
    ]
    cells = [(name, [cell(run) for run in runs]) for name, cell in rows]
    told = [(name, values) for name, values in cells if set(values) != {"-"}]
    table = _table(runs, told) if len(runs) <= MAX_COLUMNS else _long_table(runs, told)
    return f"<div>{table}{_reasons(runs)}</div>"


def configuration_tables(runs: list[Run]) -> str:
    """The options in which the runs differ, and behind a click all of them."""
    options = list(dict.fromkeys(name for run in runs for name in run.config))
    if not options:
        return ""
    every = [(name, [_value(run, name) for run in runs]) for name in options]
    different = [
        (name, values)
        for name, values in every
        if len(set(values)) > 1 and name not in _NOT_COMPARED
    ]
    whole_table = (
        f"<details><summary>All {len(options)} options</summary>{_table(runs, every)}</details>"
    )
    if len(runs) == 1:
        return f"<h2>Configuration</h2>{whole_table}"
    if not different:
        return f"<h2>Configuration</h2><p>The runs have the same options.</p>{whole_table}"
    return f"<h2>Differences in configuration</h2>{_table(runs, different)}{whole_table}"


def event_table(runs: list[Run]) -> str:
    """What happened, behind a click; the newest come first."""
    rows = [
        (event.time or "", event.step, number, run.name, event.text)
        for number, run in enumerate(runs)
        for event in run.events
    ]
    if not rows:
        return ""
    rows.sort(key=lambda row: (row[0], row[1]), reverse=True)
    lines = "".join(
        f'<tr class="run-{number}"><th scope="row"><i class="swatch"></i>{escape(name)}</th>'
        f"<td>{step:,}</td><td>{escape(text)}</td><td>{escape(when) or '-'}</td></tr>"
        for when, step, number, name, text in rows[:_MAX_EVENTS]
    )
    left = len(rows) - _MAX_EVENTS
    more = f"<p>{left:,} more are left out.</p>" if left > 0 else ""
    return (
        f"<details><summary>{len(rows):,} events</summary><div class='scroll'>"
        "<table class='events'><thead><tr><th>Run</th><th>Step</th><th>What</th><th>When</th></tr>"
        f"</thead><tbody>{lines}</tbody></table></div>{more}</details>"
    )


def _table(runs: list[Run], rows: list[tuple[str, list[str]]]) -> str:
    """Rows of facts, of HTML, with a column for each run."""
    head = "".join(
        f'<th scope="col" class="run-{number}"><i class="swatch"></i>{escape(run.name)}</th>'
        for number, run in enumerate(runs)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{value}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _long_table(runs: list[Run], columns: list[tuple[str, list[str]]]) -> str:
    """The same with a row for each run."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in columns)
    body = "".join(
        f'<tr><th scope="row" class="run-{number}"><i class="swatch"></i>{escape(run.name)}</th>'
        + "".join(f"<td>{values[number]}</td>" for _, values in columns)
        + "</tr>"
        for number, run in enumerate(runs)
    )
    return (
        f'<div class="scroll"><table class="long"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _reasons(runs: list[Run]) -> str:
    """Why runs that have not come to their end ended."""
    sentences = [
        f"{run.name} {run.status.get('status')}: {run.status['reason']}"
        for run in runs
        if run.status.get("reason")
    ]
    return "".join(f'<p class="reason">{escape(sentence)}</p>' for sentence in sentences)


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _status(run: Run) -> str:
    status = run.status.get("status")
    if not isinstance(status, str):
        return "-"
    remark = f" <small>{_last_sign(run)}</small>" if status == "running" else ""
    return f'<span class="status {escape(status)}">{escape(status)}</span>{remark}'


def _last_sign(run: Run) -> str:
    """How long before this page was made a run that is under way wrote something."""
    files = [run.path / "metrics.jsonl", run.path / "log.txt", run.path / "status.json"]
    newest = max((file.stat().st_mtime for file in files if file.is_file()), default=None)
    if newest is None:
        return ""
    age = max(0.0, time.time() - newest)
    doubt = "; it may have been killed" if age > _SILENT_SECONDS else ""
    return f"last sign {duration(round(age))} ago{doubt}"


def _model(run: Run) -> str:
    named = run.config.get("model_name_or_path") or run.config.get("config_name")
    words = dict.fromkeys(str(word) for word in (named, run.facts.architecture) if word)
    return escape(", ".join(words)) or "-"


def _devices(run: Run) -> str:
    facts = run.facts
    if facts.num_ranks is None:
        return "-"
    precision = "fp32" if facts.precision == "no" else facts.precision
    return escape(f"{facts.num_ranks} x {facts.device}, {precision}")


def _steps(run: Run) -> str:
    done, total = run.last("step"), run.facts.total_steps
    if total is None:
        return _or_dash(done, whole)
    share = min(1.0, (done or 0.0) / total) if total else 1.0
    if share == 1.0:
        return whole(total)
    bar = f'<span class="progress"><i style="width:{100 * share:.1f}%"></i></span>'
    return f"{whole(done or 0.0)} of {whole(total)} {bar}"


def _mean_speed(run: Run) -> str:
    tokens, seconds = run.last("tokens"), run.last("seconds")
    return short(tokens / seconds) if tokens and seconds else "-"


def _best(run: Run) -> str:
    best = run.best_evaluation()
    return "-" if best is None else f"{best[1]:.4f} <small>step {best[0]:,}</small>"


def _value(run: Run, name: str) -> str:
    value = run.config.get(name)
    if value is None:
        return '<span class="unset">not set</span>'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return escape(" ".join(map(str, value))) or '<span class="unset">none</span>'
    return escape(str(value))
