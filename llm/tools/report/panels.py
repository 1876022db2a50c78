"""The curves of a report: the metrics of the runs, sorted into panels and thinned out."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from llm.metrics.set_scores import set_score_title
from llm.tools.report.runs import X_AXES, Run, XAxis

MAX_POINTS = 2000
"""Maximum points per curve; with more reports, a point is the mean of several."""

Points = dict[str, npt.NDArray[np.float64]]
"""The columns of a curve by name."""

COLORS = (
    ("#2463c9", "#73a7ff"),
    ("#cf4a12", "#ff9161"),
    ("#12805c", "#45cf9b"),
    ("#c02672", "#ff80bd"),
    ("#9a6b00", "#e6b84a"),
    ("#0b7f99", "#52cbe6"),
    ("#7a3fd1", "#bd9bff"),
    ("#5d5a55", "#bdb7ae"),
)
"""Colors of the runs in their order, each for a light and for a dark page."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one run.

    Attributes:
        run: Index of the run in the report.
        key: Name of the metric.
        points: Columns `step`, `tokens`, `seconds` and `y`, and `low` and `high` where a point is
            the mean of several reports.
    """

    run: int
    key: str
    points: Points

    @property
    def is_average(self) -> bool:
        """Whether it shows the moving average of the weights."""
        return self.key.startswith("eval_ema_")

    @property
    def layer(self) -> str:
        """The layer of its values, such as `3.attention`; empty for values of the whole model."""
        prefix, _, layer = self.key.partition("/")
        return layer if prefix in _TITLES_BY_PREFIX else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart: curves that share a y axis.

    Attributes:
        name: File name: letters, digits and underscores.
        title: Title of the chart.
        keys: The metrics.
        unit: Unit of the values.
        section: Heading of its section of the page.
        from_zero: The y axis begins at zero.
        log: The y axis is logarithmic if the values are positive and span a factor of 30.
        from_half: The chart leaves out the first half of the x axis.
        factor: Factor from the metric to the unit.
        curves: The curves.
    """

    name: str
    title: str
    keys: tuple[str, ...]
    unit: str = ""
    section: str
    from_zero: bool = False
    log: bool = False
    from_half: bool = False
    factor: float = 1.0
    curves: list[Curve] = dataclasses.field(default_factory=list)


_LOSS = ("loss", "eval_loss", "eval_ema_loss")
_NATS = "nats per token"
_RANK_TIMES = {
    "data": "Waiting for a batch",
    "compute": "Computing before the first collective",
    "save": "Writing a part of a checkpoint",
}
_KNOWN_PANELS = [
    Panel(name="loss", title="Loss", keys=_LOSS, unit=_NATS, section="First"),
    Panel(name="loss_second_half", title="Loss, second half", keys=_LOSS, unit=_NATS,
          section="Loss", from_half=True),
    Panel(name="validation_loss", title="Validation loss", keys=_LOSS[1:], unit=_NATS,
          section="Loss"),
    Panel(name="bits_per_byte", title="Validation bits per byte",
          keys=("eval_bits_per_byte", "eval_ema_bits_per_byte"), section="Loss"),
    Panel(name="learning_rate", title="Learning rate", keys=("learning_rate",),
          section="Optimization", from_zero=True),
    Panel(name="grad_norm", title="Gradient norm", keys=("grad_norm",), unit="before clipping",
          section="Optimization", from_zero=True, log=True),
    Panel(name="loss_scale", title="Loss scale", keys=("loss_scale",), unit="fp16",
          section="Optimization", log=True),
    Panel(name="skipped_steps", title="Skipped steps", keys=("skipped_steps",),
          section="Optimization", from_zero=True),
    Panel(name="throughput", title="Throughput", keys=("tokens_per_second",),
          unit="tokens/s, all devices", section="System", from_zero=True),
    Panel(name="mfu", title="Model FLOP utilization", keys=("mfu",), unit="%", section="System",
          from_zero=True, factor=100.0),
    Panel(name="data_wait", title="Waiting for data", keys=("data_wait",), unit="% of the time",
          section="System", from_zero=True, factor=100.0),
    *(Panel(name=f"{activity}_time", title=title, keys=tuple(f"{activity}_ms_{rank}" for rank in
            ("slowest", "median")), unit="ms, slowest and median rank", section="System",
            from_zero=True) for activity, title in _RANK_TIMES.items()),
    Panel(name="moe_max_load", title="Largest load of an expert", keys=("moe_max_load",),
          unit="of the mean of its layer", section="Experts", from_zero=True),
    Panel(name="moe_mean_max_load", title="Largest load, mean of layers",
          keys=("moe_mean_max_load",), section="Experts", from_zero=True),
]  # fmt: skip
_HIDDEN_KEYS = {
    *("step", "samples", "tokens", "seconds", "ms_per_step", "nan_steps"),
    *("eval_perplexity", "eval_ema_perplexity"),
    *(f"{activity}_slowest_rank" for activity in _RANK_TIMES),
}
_HIDDEN_PREFIXES = ("eval_ema_", "moe_max_load/")
"""Prefixes of metrics that share the panel of others, or are in the maps of experts."""
_TITLES_BY_PREFIX = {
    "norm_weight": "Norm of weights, by layer",
    "norm_gradient": "Norm of gradients, by layer",
    "norm_update": "Norm of updates, by layer",
    "max_attention_logit": "Largest attention logit, by layer",
}
"""Titles of the panels of metrics PREFIX/GROUP, with a curve for each group."""
_SECTIONS = (
    *("First", "Loss", "Optimization", "Layers", "System", "K-FAC", "Experts", "Tasks", "Other"),
)
_DEFAULT_VALUES = {"loss_scale": 1.0, "skipped_steps": 0.0}
"""Panels with only this value are left out."""


def make_panels(runs: list[Run]) -> list[Panel]:
    """Return the panels with values, in the order of the page."""
    metrics = _select_further_metrics(
        dict.fromkeys(metric for run in runs for row in run.rows for metric in row)
    )
    layer_panels = _make_layer_panels(metrics)
    layer_metrics = {metric for panel in layer_panels for metric in panel.keys}
    metric_panels = [_make_metric_panel(key) for key in metrics if key not in layer_metrics]
    empty_panels = [*_KNOWN_PANELS, *layer_panels, *metric_panels]
    empty_panels.sort(key=lambda panel: _SECTIONS.index(panel.section))
    panels = [_fill_panel(panel, runs) for panel in empty_panels]
    return [panel for panel in panels if panel is not None]


def _select_further_metrics(metrics: Iterable[str]) -> list[str]:
    """Return the metrics that need a panel besides the known ones; of a task set only its score."""
    metrics = list(metrics)
    known_metrics = {metric for panel in _KNOWN_PANELS for metric in panel.keys} | _HIDDEN_KEYS
    task_sets = {metric.rpartition("/")[0] for metric in metrics if set_score_title(metric)}
    return [
        metric
        for metric in metrics
        if metric not in known_metrics
        and not metric.startswith(_HIDDEN_PREFIXES)
        and (metric.rpartition("/")[0] not in task_sets or set_score_title(metric))
    ]


def _make_layer_panels(keys: Sequence[str]) -> list[Panel]:
    """Return the panels of metrics that have a value for each layer."""
    keys_by_prefix = {
        prefix: [key for key in keys if key.startswith(f"{prefix}/")]
        for prefix in _TITLES_BY_PREFIX
    }
    return [
        Panel(
            name=prefix, title=title, keys=tuple(keys_by_prefix[prefix]), section="Layers", log=True
        )
        for prefix, title in _TITLES_BY_PREFIX.items()
        if keys_by_prefix[prefix]
    ]


def _fill_panel(panel: Panel, runs: list[Run]) -> Panel | None:
    """Return a panel with its curves; None if it has too few values, or only the default one."""
    curves = [
        _make_curve(run, key, run_index=index, panel=panel)
        for key in panel.keys
        for index, run in enumerate(runs)
        if any(key in row for row in run.rows)
    ]
    values = np.concatenate([[], *(curve.points["y"] for curve in curves)])
    values = values[np.isfinite(values)]
    min_values = 20 if panel.from_half else 1
    if len(values) < min_values or set(values) == {_DEFAULT_VALUES.get(panel.name)}:
        return None
    is_log = panel.log and min(values) > 0 and max(values) / 30 > min(values)
    return dataclasses.replace(panel, curves=curves, log=is_log)


def find_last_x_values(runs: list[Run]) -> dict[XAxis, float]:
    """Return the last value of the longest run on each x axis."""
    last_rows = [run.rows[-1] for run in runs if run.rows]
    return {
        x: max((row[x] for row in last_rows if math.isfinite(row[x])), default=0.0) for x in X_AXES
    }


def choose_time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for showing a time: its seconds, and its name."""
    for min_seconds, divisor, name in ((4 * 86400, 86400, "days"), (7200, 3600, "hours")):
        if seconds >= min_seconds:
            return divisor, name
    return (60, "minutes") if seconds >= 120 else (1, "seconds")


def _make_metric_panel(key: str) -> Panel:
    """Return the panel of a metric without a known one, such as a metric of `--eval_metrics`."""
    name = panel_name(key)
    label = key.removeprefix("eval_").replace("_", " ")
    if key.startswith(("eval_", "loss/")):
        return _make_loss_panel(key)
    if key.startswith("task_"):
        task, _, metric = key.removeprefix("task_").partition("/")
        title = set_score_title(key) or f"{task}: {metric}"
        return Panel(name=name, title=title, keys=(key,), section="Tasks")
    if "memory" in key:
        return Panel(name=name, title=label.capitalize(), keys=(key,), unit="GiB", section="System",
                     from_zero=True, factor=2.0**-30)  # fmt: skip
    if key.startswith("moe_"):
        title = label.removeprefix("moe ").capitalize()
        return Panel(name=name, title=title, keys=(key,), section="Experts", from_zero=True)
    section = "K-FAC" if key.startswith("kfac") else "Other"
    return Panel(name=name, title=label, keys=(key,), section=section, log=True)


def _make_loss_panel(key: str) -> Panel:
    """Return the panel of the loss on one source, or of another metric of the validation text."""
    split = "Validation" if key.startswith("eval_") else "Training"
    _, _, source = key.partition("loss/")
    metric = key.removeprefix("eval_").replace("_", " ")
    return Panel(
        name=panel_name(key),
        title=f"{split} loss, {source}" if source else f"{split} {metric}",
        keys=(key, key.replace("eval_", "eval_ema_")),
        unit=_NATS if source else "",
        section="Loss",
    )


def panel_name(key: str) -> str:
    """Return the name of the panel of a metric or an option, which is also a file name."""
    return "".join(letter if letter.isalnum() else "_" for letter in key)


def _make_curve(run: Run, key: str, *, run_index: int, panel: Panel) -> Curve:
    """Return the curve of a metric, with at most `MAX_POINTS` points."""
    rows = [row for row in run.rows if key in row]
    is_branch = run.origin is not None and not run.origin.is_mean
    if is_branch and panel.section != "System":  # its devices may differ
        parent_rows = [row for row in run.inherited_rows if key in row]
        rows = [*parent_rows[-1:], *rows]  # the curve continues its parent's curve
    points: Points = {name: np.array([row[name] for row in rows]) for name in X_AXES}
    points["y"] = np.array([row[key] * panel.factor for row in rows])
    return Curve(run=run_index, key=key, points=_thin_out(points))


def _thin_out(points: Points) -> Points:
    """Return at most `MAX_POINTS` points: means of several, with their `low` and `high`."""
    bin_size = math.ceil(len(points["y"]) / MAX_POINTS)
    if bin_size <= 1:
        return points
    bins = {name: _bin_values(values, bin_size) for name, values in points.items()}
    means = {name: bins[name].mean(axis=1).filled(math.nan) for name in bins}
    means["low"] = bins["y"].min(axis=1).filled(math.nan)
    means["high"] = bins["y"].max(axis=1).filled(math.nan)
    return means


def _bin_values(values: npt.NDArray[np.float64], bin_size: int) -> np.ma.MaskedArray:
    """Return values in rows of `bin_size` [num_bins, bin_size], with NaN masked."""
    padded = np.pad(values, (0, -len(values) % bin_size), constant_values=math.nan)
    return np.ma.masked_invalid(padded.reshape(-1, bin_size))
