"""The plan as text and as JSON."""

import dataclasses
from typing import Any

from llm.parallel.layout import Layout
from llm.plan.estimate import DAY, Estimate
from llm.plan.job import Job
from llm.plan.memory import KINDS, usable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a page says beside the estimate of its layout.

    Attributes:
        name: The model.
        parameters: Of the whole model.
        nodes: Nodes.
        budget: Tokens of the whole run, or None.
        checkpoint: Bytes of a checkpoint.
        disk: Bytes a second at which it is written.
        nearest: The layout that fits and is most like the one that does not, or None.
    """

    name: str
    parameters: int
    nodes: int
    budget: float | None
    checkpoint: int
    disk: float
    nearest: Layout | None


def text(job: Job, plan: Estimate, facts: Facts) -> list[str]:
    """The lines of a plan."""
    device, layout = job.device, plan.layout
    per_node = job.gpus_per_node
    lines = [
        f"{facts.name}, {facts.parameters:,} parameters, on {facts.nodes} nodes of {per_node} "
        f"{device.name}: {layout.world_size} ranks",
        f"layout: {layout.describe()}",
        f"batch: {plan.samples:,} samples of {job.length:,} tokens ({plan.tokens:,} tokens a step) "
        f"in {plan.micro_batches} micro-batches of {job.micro_batch_size} on each rank",
        "",
        *_memory_lines(job, plan),
        _verdict(job, plan, facts),
        "",
        *_traffic_lines(plan),
        "",
        *_time_lines(job, plan, facts),
    ]
    return lines


def table(job: Job, found: list[Estimate], *, top: int) -> list[str]:
    """The ranked layouts."""
    header = (
        f"{'tensor':>6} {'context':>7} {'pipeline':>8} {'shard':>6} {'replicate':>9} "
        f"{'micro-b.':>8} {'memory':>10} {'bubble':>7} {'step':>9} {'tokens/s':>12}  fits"
    )
    rows = [header]
    for plan in found[:top]:
        lay = plan.layout
        rows.append(
            f"{lay.tensor:>6} {lay.context:>7} {lay.pipeline:>8} {lay.shard:>6} "
            f"{lay.replicate:>9} {plan.micro_batches:>8} {_gib(plan.memory.total):>10} "
            f"{plan.bubble:>7.1%} {plan.seconds:>7.2f} s {plan.tokens_per_second:>12,.0f}  "
            f"{'yes' if plan.fits else 'no'}"
        )
    fitting = sum(plan.fits for plan in found)
    rows.append(
        f"{fitting} of {len(found)} layouts fit into {_gib(usable(job))} of {job.device.name}; "
        f"tokens a second at {job.efficiency:.0%} of its peak."
    )
    return rows


def to_json(job: Job, plan: Estimate, facts: Facts, found: list[Estimate] | None) -> dict[str, Any]:
    """All numbers: bytes, seconds, FLOPs."""
    days = None if facts.budget is None else facts.budget / plan.tokens_per_second / DAY
    values = {
        "model": facts.name,
        "parameters": facts.parameters,
        "device": job.device.name,
        "nodes": facts.nodes,
        "gpus_per_node": job.gpus_per_node,
        "usable_memory": usable(job),
        **estimate_json(plan),
        "nearest": None if facts.nearest is None else dataclasses.asdict(facts.nearest),
        "efficiency": job.efficiency,
        "budget_tokens": facts.budget,
        "days": days,
        "node_hours": None if days is None else days * 24 * facts.nodes,
        "checkpoint_bytes": facts.checkpoint,
        "checkpoint_seconds": facts.checkpoint / facts.disk,
    }
    if found is not None:
        values["search"] = [estimate_json(one) for one in found]
    return values


def estimate_json(plan: Estimate) -> dict[str, Any]:
    """The numbers of one layout."""
    memory = dataclasses.asdict(plan.memory) | {"total": plan.memory.total}
    return {
        "layout": dataclasses.asdict(plan.layout),
        "micro_batches": plan.micro_batches,
        "tokens_per_step": plan.tokens,
        "memory": memory,
        "fits": plan.fits,
        "flops_per_step": plan.flops,
        "bubble": plan.bubble,
        "transfers": [dataclasses.asdict(transfer) for transfer in plan.transfers],
        "floor_seconds": plan.floor,
        "step_seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
    }


def _memory_lines(job: Job, plan: Estimate) -> list[str]:
    memory = plan.memory
    where = f"stage {memory.stage}, " if plan.layout.pipeline > 1 else ""
    lines = [
        f"memory of the fullest rank ({where}{memory.parameters:,} parameters), "
        f"in the {memory.moment}:",
    ]
    for kind in KINDS:
        size = getattr(memory, kind)
        if size:
            lines.append(f"  {kind:<12}{_gib(size):>11}{size / memory.total:>7.0%}")
    lines.append(f"  {'total':<12}{_gib(memory.total):>11} of {_gib(usable(job))}")
    return lines


def _verdict(job: Job, plan: Estimate, facts: Facts) -> str:
    if plan.fits:
        return f"It fits: {_gib(usable(job) - plan.memory.total)} are left."
    over = _gib(plan.memory.total - usable(job))
    if facts.nearest is None:
        return (
            f"It does not fit, by {over}, and no layout of these devices does: take more of them, "
            "a smaller --per_device_train_batch_size, or --gradient_checkpointing."
        )
    return f"It does not fit, by {over}. The nearest layout that does: {facts.nearest.describe()}."


def _traffic_lines(plan: Estimate) -> list[str]:
    if not plan.transfers:
        return ["nothing is sent: there is one rank"]
    lines = [
        f"{'a rank sends in a step':<46}{'in node':>11}{'between nodes':>15}",
    ]
    for one in plan.transfers:
        what = f"  {one.axis}: {one.what}"
        lines.append(f"{what:<46}{_gb(one.in_node):>11}{_gb(one.between_nodes):>15}")
    return lines


def _time_lines(job: Job, plan: Estimate, facts: Facts) -> list[str]:
    per_second = plan.tokens_per_second
    lines = [
        f"{plan.flops:.4g} FLOPs a step; the pipeline's bubble is {plan.bubble:.1%} of it",
        f"a step takes {plan.floor:.3g} s at least, and {plan.seconds:.3g} s at "
        f"{job.efficiency:.0%} of the device's peak: {per_second:,.0f} tokens/s, "
        f"{per_second * DAY / 1e9:,.2f} billion a day",
    ]
    if facts.budget is None:
        lines.append("days: give --num_tokens, --max_train_steps or --max_train_samples")
    else:
        days = facts.budget / per_second / DAY
        lines.append(
            f"{facts.budget:,.0f} tokens take {days:,.2f} days, {days * 24 * facts.nodes:,.0f} "
            "node-hours"
        )
    lines.append(
        f"a checkpoint has {_gb(facts.checkpoint)} and takes {facts.checkpoint / facts.disk:,.1f} "
        f"s at {facts.disk / 1e9:g} GB/s"
    )
    return lines


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size else "-"
