"""Find the cheapest change that makes a run fit, in the order of the guide on parallelism."""

import bisect
from functools import partial
from typing import Any

from llm.data.options import device_batch_size
from llm.parallel.dims import ParallelDims
from llm.tools.plan.estimate import Estimate, estimate, search
from llm.tools.plan.job import Job
from llm.tools.plan.options import PlanOptions

_AXIS_BY_OPTION = {
    "data_parallel_shard_size": "shard",
    "expert_parallel_size": "expert",
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "context_parallel_size": "context",
}
"""Options of the layout and their axes, in order of preference."""


def find_remedy(job: Job, ranking: list[Estimate] | None) -> dict[str, Any] | None:
    """Return the options to change so that a run fits; None if nothing helps.

    It tries a smaller micro-batch with the same global batch first, then recomputation, then
    shards, tensor, pipeline and context parallelism.

    Args:
        job: A run that does not fit.
        ranking: The result of `search` for it, or None.
    """
    is_recomputed = job.options.activation_checkpointing == "full"
    recomputation = {}
    if job.model.supports_gradient_checkpointing and not is_recomputed:
        recomputation = {"activation_checkpointing": "full"}
    alternatives: list[dict[str, Any]] = [{}, recomputation] if recomputation else [{}]
    for changes in alternatives:
        micro_batch = _find_largest_micro_batch(job, changes)
        if micro_batch is not None:
            return {**micro_batch, **changes}
    return _find_cheapest_layout(job, ranking, recomputation)


def _find_cheapest_layout(
    job: Job, ranking: list[Estimate] | None, recomputation: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the options of the cheapest layout that fits; None if no layout does.

    Args:
        job: A run that does not fit in its layout, whatever its micro-batch.
        ranking: The result of `search` for it, or None.
        recomputation: The options that turn on recomputation; empty if that is not possible.
    """
    least_activations = {**_micro_batch_options(job.options, 1), **recomputation}
    # If a layout does not fit with the fewest activations, it never fits.
    smallest_job = job.with_micro_batch(least_activations)
    if not any(candidate.fits for candidate in search(smallest_job)):
        return None
    best_cost: tuple[float, ...] | None = None
    best_changes: dict[str, Any] | None = None
    alternatives = [{}, recomputation, least_activations]
    for index, changes in enumerate(alternatives):
        is_repeated = changes in alternatives[:index]  # such as an empty recomputation
        if is_repeated:
            continue
        candidates = ranking if ranking and not changes else search(job.with_micro_batch(changes))
        for candidate in candidates:
            if not candidate.fits:
                continue
            cost = _layout_cost(candidate, job.dims, alternative=index)
            if best_cost is None or cost < best_cost:
                best_cost = cost
                best_changes = {**changes, **_layout_options(candidate.dims, job.options)}
        if best_cost is not None and not any(best_cost[:3]):
            break  # sharding is enough
    return best_changes


def _find_largest_micro_batch(job: Job, changes: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of the largest micro-batch that fits in this layout, or None."""
    current_size = device_batch_size(job.options)
    max_size = current_size if changes else current_size - 1
    sizes = [size for size in range(1, max_size + 1) if current_size % size == 0]
    is_too_large = partial(_is_too_large, job, changes)
    if not sizes or is_too_large(sizes[0]):
        return None
    num_fitting = bisect.bisect_left(sizes, True, key=is_too_large)
    return _micro_batch_options(job.options, sizes[num_fitting - 1])


def _is_too_large(job: Job, changes: dict[str, Any], size: int) -> bool:
    """Return whether a micro-batch of a number of samples, with other changes, does not fit."""
    resized_job = job.with_micro_batch({**_micro_batch_options(job.options, size), **changes})
    return not estimate(resized_job, job.dims).fits


def _micro_batch_options(options: PlanOptions, size: int) -> dict[str, Any]:
    """Return the options of a smaller micro-batch in the same global batch."""
    current_size = device_batch_size(options)
    if size == current_size:
        return {}
    changes = {"per_device_train_batch_size": size}
    if options.global_batch_size is None:
        num_micro_batches = options.gradient_accumulation_steps * current_size // size
        changes["gradient_accumulation_steps"] = num_micro_batches
    return changes


def _layout_cost(candidate: Estimate, dims: ParallelDims, *, alternative: int) -> tuple[float, ...]:
    """Return a sort key for the cost of a layout; layouts are compared by its first difference.

    Its entries are the distances of the context, pipeline, tensor and expert size from the present
    ones, the index of the alternative, the distance of the shard size, and the negative speed.
    """
    shard_distance, *other_distances = (
        _count_doublings(getattr(candidate.dims, axis), getattr(dims, axis))
        for axis in _AXIS_BY_OPTION.values()
    )
    return *reversed(other_distances), alternative, shard_distance, -candidate.tokens_per_second


def _count_doublings(size: int, current_size: int) -> int:
    """Return roughly how often a size is doubled or halved; 0 only for equal sizes."""
    return abs(size.bit_length() - current_size.bit_length()) + (size != current_size)


def _layout_options(dims: ParallelDims, options: PlanOptions) -> dict[str, int]:
    """Return the options that turn the layout of `options` into `dims`."""
    sizes = {name: getattr(dims, axis) for name, axis in _AXIS_BY_OPTION.items()}
    return {name: size for name, size in sizes.items() if size != getattr(options, name)}
