"""Find the cheapest change that makes a run fit, in the order of the guide on parallelism."""

import bisect
from typing import Any

from llm.data.options import device_batch_size
from llm.parallel.dims import ParallelDims
from llm.tools.plan.estimate import Estimate, estimate, search
from llm.tools.plan.job import Job
from llm.tools.plan.options import PlanOptions

_SIZES = {
    "data_parallel_shard_size": "shard",
    "expert_parallel_size": "expert",
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "context_parallel_size": "context",
}
"""Options of the layout and their axes, in order of preference."""


def find_remedy(job: Job, ranked: list[Estimate] | None) -> dict[str, Any] | None:
    """Return the options to change so that a run fits; None if nothing helps.

    It tries a smaller micro-batch with the same global batch first, then recomputation, then
    shards, tensor, pipeline and context parallelism.

    Args:
        job: A run that does not fit.
        ranked: The result of `search` for it, or None.
    """
    options, smallest = job.options, _micro_batch(job.options, 1)
    full = {"activation_checkpointing": "full"}
    if options.activation_checkpointing == "full" or not job.model.supports_gradient_checkpointing:
        full = {}
    for changes in ({}, full) if full else ({},):
        resized = _largest_micro_batch(job, changes)
        if resized is not None:
            return {**resized, **changes}
    # If a layout does not fit with the fewest activations, it never fits.
    frugal = job.with_micro_batch({**smallest, **full})
    if not any(candidate.fits for candidate in search(frugal)):
        return None
    best: tuple[tuple[float, ...], dict[str, Any]] | None = None
    settings = [{}, full, {**smallest, **full}]
    for number, changes in enumerate(settings):
        if changes in settings[:number]:
            continue
        candidates = ranked if ranked and not changes else search(job.with_micro_batch(changes))
        for candidate in (candidate for candidate in candidates if candidate.fits):
            cost = _cost_of(candidate, job.layout, number)
            if best is None or cost < best[0]:
                best = cost, {**changes, **_layout_options(candidate.layout, options)}
        if best is not None and not any(best[0][:3]):
            break  # sharding is enough
    return None if best is None else best[1]


def _largest_micro_batch(job: Job, changes: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of the largest micro-batch that fits in this layout, or None."""
    current_size = device_batch_size(job.options)
    sizes = [size for size in range(1, current_size + bool(changes)) if current_size % size == 0]

    def is_too_large(size: int) -> bool:
        resized = job.with_micro_batch({**_micro_batch(job.options, size), **changes})
        return not estimate(resized, job.layout).fits

    if not sizes or is_too_large(sizes[0]):
        return None
    fitting = bisect.bisect_left(sizes, True, key=is_too_large)
    return _micro_batch(job.options, sizes[fitting - 1])


def _micro_batch(options: PlanOptions, size: int) -> dict[str, Any]:
    """Return the options of a smaller micro-batch in the same global batch."""
    current_size = device_batch_size(options)
    if size == current_size:
        return {}
    changes = {"per_device_train_batch_size": size}
    if options.global_batch_size is None:
        steps = options.gradient_accumulation_steps * current_size // size
        changes["gradient_accumulation_steps"] = steps
    return changes


def _cost_of(candidate: Estimate, layout: ParallelDims, setting: int) -> tuple[float, ...]:
    """Return a sort key for the cost of a layout: first its context parallelism, last its time."""

    def distance(axis: str) -> int:
        """Count roughly how often a size is doubled or halved."""
        size: int = getattr(candidate.layout, axis)
        current_size: int = getattr(layout, axis)
        return abs(size.bit_length() - current_size.bit_length()) + (size != current_size)

    shard, *other_distances = map(distance, _SIZES.values())
    return *reversed(other_distances), setting, shard, -candidate.tokens_per_second


def _layout_options(layout: ParallelDims, options: PlanOptions) -> dict[str, int]:
    sizes = {name: getattr(layout, axis) for name, axis in _SIZES.items()}
    return {name: size for name, size in sizes.items() if size != getattr(options, name)}
