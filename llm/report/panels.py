"""Which curves there are: the metrics of the runs, sorted into panels and thinned out."""

import dataclasses
import math
from collections.abc import Callable, Iterable

from llm.report.runs import Row, Run
from llm.report.scales import X_KEYS, Axis, X, y_axis

MAX_POINTS = 2000
"""Points of a curve; where there are more reports, a point is the mean of several."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one run.

    Attributes:
        run: Number of the run in the report.
        key: Name of the metric.
        xs: Places of the points on each x axis.
        ys: Their values; None where the number was not finite.
        lows: Lowest value of the reports that a point is the mean of; None if it is of one.
        highs: The highest.
    """

    run: int
    key: str
    xs: dict[X, list[float]]
    ys: list[float | None]
    lows: list[float | None] | None = None
    highs: list[float | None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart: curves that share a y axis.

    Attributes:
        name: For files; letters, digits and underscores.
        title: For people.
        unit: Of the values.
        section: Heading under which it stands.
        curves: What is drawn.
        y: The y axis.
        from_half: The chart leaves out the first half of the x axis.
    """

    name: str
    title: str
    unit: str
    section: str
    curves: list[Curve]
    y: Axis
    from_half: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    title: str
    keys: tuple[str, ...]
    unit: str = ""
    section: str
    from_zero: bool = False
    log: bool = False
    from_half: bool = False
    factor: float = 1.0


_KNOWN = {
    "loss": _Plan(
        title="Loss", keys=("loss", "eval_loss"), unit="nats per token", section="First"
    ),
    "loss_second_half": _Plan(
        title="Loss, second half",
        keys=("loss", "eval_loss"),
        unit="nats per token",
        section="Loss",
        from_half=True,
    ),
    "validation_loss": _Plan(
        title="Validation loss", keys=("eval_loss",), unit="nats per token", section="Loss"
    ),
    "bits_per_byte": _Plan(
        title="Validation bits per byte", keys=("eval_bits_per_byte",), section="Loss"
    ),
    "learning_rate": _Plan(
        title="Learning rate", keys=("learning_rate",), section="Optimization", from_zero=True
    ),
    "grad_norm": _Plan(
        title="Gradient norm",
        keys=("grad_norm",),
        unit="before clipping",
        section="Optimization",
        from_zero=True,
        log=True,
    ),
    "loss_scale": _Plan(
        title="Loss scale", keys=("loss_scale",), unit="fp16", section="Optimization", log=True
    ),
    "skipped_steps": _Plan(
        title="Skipped steps", keys=("skipped_steps",), section="Optimization", from_zero=True
    ),
    "throughput": _Plan(
        title="Throughput",
        keys=("tokens_per_second",),
        unit="tokens/s, all devices",
        section="System",
        from_zero=True,
    ),
    "mfu": _Plan(
        title="Model FLOP utilisation",
        keys=("mfu",),
        unit="%",
        section="System",
        from_zero=True,
        factor=100.0,
    ),
    "data_wait": _Plan(
        title="Waiting for data",
        keys=("data_wait",),
        unit="% of the time",
        section="System",
        from_zero=True,
        factor=100.0,
    ),
}  # fmt: skip
_NOT_DRAWN = {"step", "samples", "tokens", "seconds", "ms_per_step", "nan_steps", "eval_perplexity"}


def make_panels(runs: list[Run]) -> list[Panel]:
    """All panels that the runs have something for, in the order of the page."""
    found = list(dict.fromkeys(key for run in runs for row in run.rows for key in row))
    known = {key for plan in _KNOWN.values() for key in plan.keys} | _NOT_DRAWN
    ends = x_ends(runs)
    plans = _KNOWN | {_file_name(key): _plan_of(key) for key in found if key not in known}
    panels = []
    for name, plan in plans.items():
        panel = _make_panel(name, plan, runs, ends=ends)
        if panel is not None and _tells_something(panel):
            panels.append(panel)
    order = ["First", "Loss", "Optimization", "System", "K-FAC", "Other"]
    return sorted(panels, key=lambda panel: order.index(panel.section))


def x_ends(runs: list[Run]) -> dict[X, float]:
    """How far the longest run has come on each x axis."""
    places = [
        run.at(max(run.rows[-1]["step"] or 0.0, *(event.step for event in run.events), 0.0))
        for run in runs
        if run.rows
    ]
    return {x: max((place[x] for place in places), default=0.0) for x in X_KEYS}


def _plan_of(key: str) -> _Plan:
    """How to draw a metric that has no panel of its own: one that a run added, or a newer one."""
    words = key.removeprefix("eval_").replace("_", " ")
    if key.startswith("eval_loss/"):
        source = key.partition("/")[2]
        return _Plan(
            title=f"Validation loss, {source}", keys=(key,), unit="nats per token", section="Loss"
        )
    if key.startswith("eval_"):
        return _Plan(title=f"Validation {words}", keys=(key,), section="Loss")
    if "memory" in key:
        in_bytes = not key.endswith(("_gib", "_gb", "_mib", "_mb"))
        return _Plan(
            title=words.capitalize(),
            keys=(key,),
            unit="GiB" if in_bytes else "",
            section="System",
            from_zero=True,
            factor=2.0**-30 if in_bytes else 1.0,
        )
    section = "K-FAC" if key.startswith("kfac") else "Other"
    return _Plan(title=words, keys=(key,), section=section, log=True)


def _make_panel(name: str, plan: _Plan, runs: list[Run], *, ends: dict[X, float]) -> Panel | None:
    def is_shown(row: Row) -> bool:
        return not plan.from_half or any((row[x] or 0.0) >= ends[x] / 2 for x in X_KEYS)

    curves = [
        curve
        for key in plan.keys
        for number, run in enumerate(runs)
        if (curve := _curve(run, key, number=number, factor=plan.factor, is_shown=is_shown))
    ]
    drawn = [
        value
        for curve in curves
        for values in (curve.ys, curve.lows or [], curve.highs or [])
        for value in values
        if value is not None
    ]
    if not drawn:
        return None
    return Panel(
        name=name,
        title=plan.title,
        unit=plan.unit,
        section=plan.section,
        curves=curves,
        y=y_axis(drawn, from_zero=plan.from_zero, log=plan.log),
        from_half=plan.from_half,
    )


def _tells_something(panel: Panel) -> bool:
    """Whether a panel is worth its place."""
    values = {value for curve in panel.curves for value in curve.ys if value is not None}
    if panel.name == "loss_scale":
        return values != {1.0}
    if panel.name == "skipped_steps":
        return values != {0.0}
    return not panel.from_half or sum(len(curve.ys) for curve in panel.curves) >= 10


def _curve(
    run: Run, key: str, *, number: int, factor: float, is_shown: Callable[[Row], bool]
) -> Curve | None:
    rows = [row for row in run.rows if key in row and is_shown(row)]
    if not rows:
        return None
    values = [None if (value := row[key]) is None else value * factor for row in rows]
    places = {x: [row[x] or 0.0 for row in rows] for x in X_KEYS}
    size = math.ceil(len(rows) / MAX_POINTS)
    if size == 1:
        return Curve(run=number, key=key, xs=places, ys=values)
    bins = [slice(start, start + size) for start in range(0, len(rows), size)]
    return Curve(
        run=number,
        key=key,
        xs={x: [_mean(places[x][part]) or 0.0 for part in bins] for x in X_KEYS},
        ys=[_mean(values[part]) for part in bins],
        lows=[min(_finite(values[part]), default=None) for part in bins],
        highs=[max(_finite(values[part]), default=None) for part in bins],
    )


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    finite = _finite(values)
    return sum(finite) / len(finite) if finite else None


def _file_name(key: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in key)
