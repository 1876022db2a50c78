"""An estimate as text, as JSON and as a plot."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm.config.duration import Duration
from llm.config.options import non_default
from llm.data.options import device_batch_size
from llm.errors import ConfigError
from llm.metrics.hardware import GIB
from llm.models.mixtures import mixture_size
from llm.runtime.logging import counted
from llm.tools.plan.estimate import Estimate, checkpoint_bytes, compare_experts
from llm.tools.plan.job import Job

_COLORS = ("#4477aa", "#66ccee", "#228833", "#aa3377", "#ccbb44", "#ee6677", "#bbbbbb")
_DAY_SECONDS = 86400.0


def format_plan(job: Job, plan: Estimate, remedy: Mapping[str, Any] | None) -> list[str]:
    """Return the lines that describe a layout.

    Args:
        job: The run.
        plan: Estimate of the layout.
        remedy: Options that make it fit; None if it already fits, or nothing helps.
    """
    dims = plan.dims
    num_samples = plan.tokens_per_step // job.length
    mixture = mixture_size(job.model)
    mixture_lines = []
    if mixture is not None:
        mixture_lines = [f"experts: {mixture.describe()}; {mixture.describe_active()}"]
    return [
        _format_run_name(job, plan),
        f"layout: {dims.describe()}",
        f"batch: {counted(num_samples, 'sample')} of {job.length:,} tokens "
        f"({plan.tokens_per_step:,} tokens per step) in "
        f"{counted(plan.micro_batches, 'micro-batch')} of "
        f"{device_batch_size(job.options)} on each rank",
        *mixture_lines,
        "",
        *_format_memory(job, plan),
        _format_verdict(job, plan, remedy),
        "",
        *_format_traffic(plan),
        *_compare_expert_layouts(job, plan),
        "",
        *_format_times(job, plan),
    ]


def _format_run_name(job: Job, plan: Estimate) -> str:
    """Return the line that names the model and the devices."""
    options = job.options
    return (
        f"{_model_name(job)}, {job.param_counts(1).parameters:,} parameters, on "
        f"{counted(options.nodes, 'node')} of {options.gpus_per_node} {options.device}: "
        f"{counted(plan.dims.world_size, 'rank')}"
    )


def format_summary(job: Job, plan: Estimate, remedy: Mapping[str, Any] | None) -> list[str]:
    """Return lines about a layout: the run, its memory, its time, and the epochs of its data."""
    memory = f"{_format_gib(plan.memory.total)} of {_format_gib(job.usable_bytes)} on a rank."
    return [
        _format_run_name(job, plan),
        f"{memory} {_format_verdict(job, plan, remedy)}",
        _format_run_time(job, plan),
        *_format_epochs(job, plan),
    ]


def format_table(job: Job, estimates: list[Estimate]) -> list[str]:
    """Return the lines of a table of layouts."""
    has_experts = bool(job.param_counts(1).num_experts)
    lines = [
        f"{'tensor':>6} {'context':>7} {'pipeline':>8} {'shard':>6} {'replicate':>9} "
        f"{'experts ' if has_experts else ''}"
        f"{'micro-b.':>8} {'memory':>10} {'bubble':>7} {'step':>9} {'tokens/s':>12}  fits"
    ]
    for plan in estimates[: job.options.top]:
        dims = plan.dims
        lines.append(
            f"{dims.tensor:>6} {dims.context:>7} {dims.pipeline:>8} {dims.shard:>6} "
            f"{dims.replicate:>9} {f'{dims.expert:>7} ' if has_experts else ''}"
            f"{plan.micro_batches:>8} {_format_gib(plan.memory.total):>10} "
            f"{plan.bubble:>7.1%} {plan.step_seconds:>7.2f} s {plan.tokens_per_second:>12,.0f}  "
            f"{'yes' if plan.fits else 'no'}"
        )
    num_fitting = sum(plan.fits for plan in estimates)
    return [
        *lines,
        f"{num_fitting} of {len(estimates)} layouts fit into {_format_gib(job.usable_bytes)} of "
        f"{job.options.device}; tokens per second at {job.efficiency:.0%} of its peak.",
    ]


def plan_json(
    job: Job, plan: Estimate, remedy: Mapping[str, Any] | None, estimates: list[Estimate] | None
) -> dict[str, Any]:
    """Return the numbers of a plan by their keys in the JSON, in bytes, seconds and FLOPs."""
    options, days, num_bytes = job.options, days_of_run(job, plan), checkpoint_bytes(job)
    values = {
        "model": _model_name(job),
        "parameters": job.param_counts(1).parameters,
        **_mixture_json(job),
        "device": options.device,
        "nodes": options.nodes,
        "gpus_per_node": options.gpus_per_node,
        "usable_memory": job.usable_bytes,
        "micro_batch_size": device_batch_size(options),
        **_estimate_json(plan),
        "fits_with": remedy,
        "efficiency": job.efficiency,
        "budget_tokens": job.token_budget(plan.dims),
        "epochs": _count_epochs(job, plan),
        "days": days,
        "node_hours": None if days is None else days * 24 * options.nodes,
        "checkpoint_bytes": num_bytes,
        "checkpoint_seconds": num_bytes / (options.disk_gbps * 1e9),
    }
    if estimates is not None:
        values["search"] = [_estimate_json(candidate) for candidate in estimates]
    return values


def _mixture_json(job: Job) -> dict[str, Any]:
    """Return the numbers about the experts of a mixture by key; empty for a dense model."""
    mixture = mixture_size(job.model)
    if mixture is None:
        return {}
    return {
        "active_parameters": mixture.active,
        "expert_layers": mixture.num_layers,
        "experts": mixture.num_experts,
        "experts_per_token": mixture.experts_per_token,
    }


def _estimate_json(plan: Estimate) -> dict[str, Any]:
    """Return the fields of an estimate by their keys in the JSON."""
    values = dataclasses.asdict(plan)
    values = {"layout": values.pop("dims"), **values}
    memory = plan.memory
    peak = {"moment": memory.moment, "stage": memory.stage, "parameters": memory.parameters}
    values["memory"] = {**peak, **memory.kinds, "total": memory.total}
    return values


def _model_name(job: Job) -> str:
    options = job.options
    name = options.config_name or options.model_name_or_path or options.model_type or "gpt2"
    return name if options.model_size is None else f"{name} {options.model_size}"


def days_of_run(job: Job, plan: Estimate) -> float | None:
    """Return the days of the whole run; None if its tokens are unknown."""
    budget = job.token_budget(plan.dims)
    return None if budget is None else budget / plan.tokens_per_second / _DAY_SECONDS


def _format_memory(job: Job, plan: Estimate) -> list[str]:
    """Return the lines about the peak of memory, by kind."""
    memory = plan.memory
    stage = f"stage {memory.stage}, " if plan.dims.pipeline > 1 else ""
    kind_lines = [
        f"  {kind:<12}{_format_gib(size):>11}{size / memory.total:>7.0%}"
        for kind, size in memory.kinds.items()
        if size
    ]
    return [
        f"memory of the fullest rank ({stage}{memory.parameters:,} parameters), "
        f"at its peak, in the {memory.moment}:",
        *kind_lines,
        f"  {'total':<12}{_format_gib(memory.total):>11} of {_format_gib(job.usable_bytes)}",
    ]


def _format_verdict(job: Job, plan: Estimate, remedy: Mapping[str, Any] | None) -> str:
    """Return the line that says whether the layout fits, and names a remedy if it does not."""
    free_bytes = job.usable_bytes - plan.memory.total
    if plan.fits:
        return f"It fits: {_format_gib(free_bytes)} are left."
    if remedy is None:
        return (
            f"It does not fit, by {_format_gib(-free_bytes)}, and neither a smaller micro-batch, "
            "recomputation nor another layout of these devices helps: use more devices."
        )
    flags = " ".join(f"--{name} {value}" for name, value in remedy.items())
    return f"It does not fit, by {_format_gib(-free_bytes)}. It fits with {flags}."


def _format_traffic(plan: Estimate) -> list[str]:
    """Return the table of the data that a rank sends in a step."""
    if not plan.transfers:
        return ["nothing is sent: there is one rank"]
    rows = [("a rank sends in a step", "in node", "between nodes")]
    for transfer in plan.transfers:
        rows.append(
            (
                f"  {transfer.axis}: {transfer.what}",
                _format_gb(transfer.in_node),
                _format_gb(transfer.between_nodes),
            )
        )
    return [f"{what:<46}{in_node:>11}{between:>15}" for what, in_node, between in rows]


def _compare_expert_layouts(job: Job, plan: Estimate) -> list[str]:
    """Return the line that compares expert parallelism with gathered experts, if it is possible."""
    comparison = compare_experts(job, plan.dims)
    if comparison is None:
        return []
    divided, gathered = comparison
    divided_costs, gathered_costs = (
        f"{candidate.step_seconds:.3g} s and {_format_gib(candidate.memory.total)}"
        for candidate in (divided, gathered)
    )
    speedup = gathered.step_seconds / divided.step_seconds
    verdict = f"it is {speedup:.2f} times as fast"
    if 0.995 < speedup < 1.005:
        verdict = "there is no difference in time"
    elif speedup < 1:
        verdict = f"without it, a step is {1 / speedup:.2f} times as fast"
    return [
        f"experts: with --expert_parallel_size {divided.dims.expert} a step takes {divided_costs}, "
        f"without it {gathered_costs}; {verdict}"
    ]


def _format_times(job: Job, plan: Estimate) -> list[str]:
    """Return the lines about the time of a step, of the run, and of a checkpoint."""
    tokens_per_second = plan.tokens_per_second
    disk_gbps, num_bytes = job.options.disk_gbps, checkpoint_bytes(job)
    return [
        f"{plan.flops_per_step:.4g} FLOPs per step; the pipeline's bubble is {plan.bubble:.1%} of "
        "it",
        f"a step takes {plan.floor_seconds:.3g} s at least, and {plan.step_seconds:.3g} s at "
        f"{job.efficiency:.0%} of the device's peak: {tokens_per_second:,.0f} tokens/s, "
        f"{tokens_per_second * _DAY_SECONDS / 1e9:,.2f} billion a day",
        _format_run_time(job, plan),
        *_format_epochs(job, plan),
        f"a checkpoint has {_format_gb(num_bytes)} and takes "
        f"{num_bytes / (disk_gbps * 1e9):,.1f} s at {disk_gbps:g} GB/s",
    ]


def _format_run_time(job: Job, plan: Estimate) -> str:
    """Return the line about the time of the whole run, or how to learn it."""
    budget, days = job.token_budget(plan.dims), days_of_run(job, plan)
    if days is None:
        default = "" if "max_duration" in non_default(job.options) else "default "
        return (
            f"days: the {default}length of {job.options.max_duration} depends on the data: give "
            "--num_tokens, or --max_duration in tokens or steps"
        )
    node_hours = days * 24 * job.options.nodes
    digits = 0 if node_hours >= 10 else 2
    experience = ""
    if mixture_size(job.model) is not None:
        experience = " (nobody has measured a mixture of experts)"
    return (
        f"{budget:,.0f} tokens take {_format_days(days)}, {node_hours:,.{digits}f} node-hours, at "
        f"{job.efficiency:.0%} of the peak{experience}"
    )


def _count_epochs(job: Job, plan: Estimate) -> dict[str, float]:
    """Return the epochs of each source of the data by name; empty if their size is unknown."""
    num_samples = job.count_samples(plan.dims)
    return {} if job.data is None or num_samples is None else job.data.count_epochs(num_samples)


def _format_epochs(job: Job, plan: Estimate) -> list[str]:
    """Return the line about the epochs of each source, and the trainer's warning about them."""
    num_samples = job.count_samples(plan.dims)
    if job.data is None or num_samples is None:
        return []
    epochs_by_source = job.data.count_epochs(num_samples)
    epochs = [f"{number:.4g} epochs of {name}" for name, number in epochs_by_source.items()]
    max_duration = job.options.max_duration
    if job.options.num_tokens is not None:
        max_duration = Duration(f"{num_samples} samples")
    warning = job.data.describe_repetition(num_samples, max_duration=max_duration)
    return [f"data: {', '.join(epochs)}", *([] if warning is None else [warning])]


def _format_days(days: float) -> str:
    return f"{24 * days:,.1f} hours" if days < 2 else f"{days:,.1f} days"


def _format_gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def _format_gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size else "-"


def check_plot_path(path: str) -> None:
    """Refuse a plot that cannot be drawn.

    Raises:
        ConfigError: matplotlib is missing, or it cannot write files with this suffix.
    """
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--plot {path} must end in .png, .pdf or .svg.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: pip install matplotlib, which comes with the extra `report`."
        ) from error


def plot_memory(estimates: Sequence[Estimate], *, usable_bytes: int, path: str) -> None:
    """Plot each layout's memory by kind as a bar, and the device's memory as a line.

    Args:
        estimates: Layouts.
        usable_bytes: Bytes of the device available to tensors.
        path: File to write.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.45 * len(estimates)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [candidate.dims.describe() for candidate in estimates]
    bar_ends = [0.0] * len(estimates)
    for kind, color in zip(estimates[0].memory.kinds, itertools.cycle(_COLORS), strict=False):
        sizes = [candidate.memory.kinds[kind] / GIB for candidate in estimates]
        if any(sizes):
            axes.barh(names, sizes, left=bar_ends, color=color, label=kind)
            bar_ends = [end + size for end, size in zip(bar_ends, sizes, strict=True)]
    axes.axvline(usable_bytes / GIB, color=rcParams["text.color"], linestyle="--", label="device")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest rank")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}.") from error
