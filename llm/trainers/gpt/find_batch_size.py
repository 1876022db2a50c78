"""The search for the largest micro-batch that fits (`--per_device_train_batch_size auto`).

All ranks run forward and backward passes, at first with the smallest micro-batch. The memory that
is allocated before a pass does not depend on the micro-batch, and at each moment of the pass the
rest grows at most in proportion to it. So a measured peak gives an upper bound for a larger
micro-batch. All ranks try it only if the bound fits into the memory of every rank: otherwise a rank
could run out of memory in a collective, and the others would wait for it.
"""

import contextlib
import dataclasses
import gc
import logging
import os
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from llm.data.batch_plan import list_micro_batch_sizes
from llm.data.loader import MicroBatch, TrainLoader
from llm.data.options import device_batch_size
from llm.errors import ConfigError
from llm.metrics.hardware import GIB
from llm.metrics.peak_memory import (
    allocated_memory,
    peak_memory,
    reset_peak_memory,
    usable_memory,
)
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather, on_all_ranks
from llm.runtime.health import Health
from llm.runtime.logging import counted
from llm.runtime.world import ranks_per_node
from llm.trainers.gpt.seams import LoopContext
from llm.trainers.gpt.training_run import TrainingRun, plan_training

_MAX_GROWTH = 8
"""Largest ratio of two micro-batches in a row. A small one cannot tell the memory of a very large
one: on a CPU, memory that was freed and not returned to the system hides some of its peak."""

logger = logging.getLogger("llm")


def find_batch_size(
    run: TrainingRun, strategy: AcceleratedStrategy, model: PreTrainedModel, health: Health
) -> TrainingRun:
    """Return the run with the largest micro-batch that fits; every rank calls it.

    Args:
        run: The run, with a micro-batch of one sample.
        strategy: The prepared model; neither its weights nor its optimizer change.
        model: The model for the log's description.
        health: Learns that the trials make progress.

    Raises:
        ConfigError: The device's memory cannot be measured; raised on all ranks.
    """
    device = strategy.device
    ranks_on_host = ranks_per_node(os.environ, strategy.world_size)
    on_all_ranks(lambda: usable_memory(device, ranks_on_host=ranks_on_host))
    run = _fix_global_batch_of_branch(run)
    candidate_sizes = _list_candidate_sizes(run)
    extension_bytes = _count_extension_bytes(run, strategy)
    gc.collect()
    static_bytes = allocated_memory(device)
    smallest_size = candidate_sizes[0]
    next_run: TrainingRun | None = on_all_ranks(lambda: _with_batch_size(run, smallest_size))
    while next_run is not None:
        run = next_run
        health.heartbeat(step=0, phase="start")
        reset_peak_memory(device)
        _run_largest_step(run, strategy, model)
        peak_bytes = peak_memory(device)
        free_bytes = usable_memory(device, ranks_on_host=ranks_on_host) - extension_bytes
        usable_bytes = max(1, free_bytes)

        micro_batch_size = device_batch_size(run.config)
        growth = (usable_bytes - static_bytes) / max(1, peak_bytes - static_bytes)
        size_bounds = gather(min(_MAX_GROWTH, growth) * micro_batch_size)
        max_size = int(min(size_bounds))
        larger_sizes = [size for size in candidate_sizes if micro_batch_size < size <= max_size]
        next_run = _with_largest_batch_size(run, larger_sizes)
        _release_memory(device)
        static_bytes = min(static_bytes, allocated_memory(device))
    _log_batch_size(micro_batch_size, peak_bytes, usable_bytes)
    return run


def _fix_global_batch_of_branch(run: TrainingRun) -> TrainingRun:
    """Return the run; a branch with the global batch of its parent, which micro-batches divide."""
    if run.branch_from is None or run.config.global_batch_size is not None:
        return run
    config = dataclasses.replace(
        run.config,
        global_batch_size=run.batch_plan.format_batch_schedule(run.block_size),
        gradient_accumulation_steps=1,
    )
    return dataclasses.replace(run, config=config)


def _release_memory(device: torch.device) -> None:
    """Return the memory of a trial step to the device."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.memory.empty_cache()


def _list_candidate_sizes(run: TrainingRun) -> list[int]:
    """Return the micro-batches that the options and the data allow, in samples, ascending."""
    batch_plan = run.batch_plan
    max_size = max(1, batch_plan.num_windows // batch_plan.world_size)
    allowed_sizes = list_micro_batch_sizes(run.config, world_size=batch_plan.world_size)
    return [size for size in allowed_sizes if size <= max_size]


def _count_extension_bytes(run: TrainingRun, strategy: AcceleratedStrategy) -> int:
    """Return the memory that extensions allocate on this rank after the search."""
    num_parameters = sum(parameter.numel() for parameter in strategy.local_parameters)
    bytes_per_parameter = sum(extension.bytes_per_parameter() for extension in run.extensions)
    return int(num_parameters * bytes_per_parameter)


def _log_batch_size(size: int, peak_bytes: int, usable_bytes: int) -> None:
    """Log the micro-batch, and the memory of the rank with the least left; every rank calls it."""
    memory_of_ranks = gather((peak_bytes, usable_bytes))
    _, peak_bytes, usable_bytes, rank = max(
        (rank_peak / rank_usable, rank_peak, rank_usable, rank)
        for rank, (rank_peak, rank_usable) in enumerate(memory_of_ranks)
    )
    logger.info(
        f"--per_device_train_batch_size auto: {counted(size, 'sample')}; a forward and backward "
        f"pass takes up to {peak_bytes / GIB:.2f} of {usable_bytes / GIB:.2f} GiB (on rank "
        f"{rank}). A resume keeps the size."
    )


def _with_largest_batch_size(run: TrainingRun, sizes: Sequence[int]) -> TrainingRun | None:
    """Return the run with the largest of these micro-batches that it allows; None without any.

    Steps may have too few micro-batches for the pipeline, or more samples than the run.
    """
    for size in reversed(sizes):
        with contextlib.suppress(ConfigError):
            return _with_batch_size(run, size)
    return None


def _with_batch_size(run: TrainingRun, size: int) -> TrainingRun:
    """Return the run with another micro-batch, and the steps and rates that follow from it."""
    config = dataclasses.replace(run.config, per_device_train_batch_size=size)
    run = dataclasses.replace(run, config=config)
    plan, skipped, schedule = plan_training(run, run.samples, run.branch)
    return dataclasses.replace(run, batch_plan=plan, skipped=skipped, schedule=schedule)


def _run_largest_step(
    run: TrainingRun, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> None:
    """Run a trial step that takes as much memory as the largest step of the run."""
    plan = run.batch_plan
    num_micro_batches = max(plan.micro_batch_shape(phase.first_step)[0] for phase in plan.phases)
    if run.dims.pipeline == 1:
        # Gradients accumulate in the second micro-batch, and further ones need no more memory.
        num_micro_batches = min(2, num_micro_batches)
    size = device_batch_size(run.config)
    trial_plan = dataclasses.replace(
        plan,
        micro_batch_size=size,
        global_batch_size=num_micro_batches * size * plan.world_size,
    )
    loader = TrainLoader(
        samples=run.samples,
        batch_plan=trial_plan,
        rank=strategy.data_rank,
        device=strategy.device,
        document_boundaries=run.document_boundaries,
    )
    context = LoopContext(
        run, strategy, model, keep_alive=lambda: None, paused=contextlib.nullcontext
    )
    with contextlib.ExitStack() as stack:
        for extension in run.extensions:
            stack.enter_context(extension.trial_context(context))
        batches = stack.enter_context(contextlib.closing(loader.read_steps(0)))
        batch = next(batches)
        run_trial_step(strategy, batch.micro_batches, num_tokens=batch.num_tokens)


def run_trial_step(
    strategy: AcceleratedStrategy, micro_batches: Sequence[MicroBatch], *, num_tokens: int
) -> None:
    """Compute the gradient of a step as in training, and drop it; every rank calls it.

    Neither weights nor the optimizer's state nor the loss scale change. K-FAC records the tokens,
    and discards them when the next step begins. Random generators advance; each step seeds them.
    An update would need no more memory: the optimizer's state exists, and activations are freed.

    Args:
        strategy: The prepared model.
        micro_batches: This rank's slice of the step.
        num_tokens: As for `forward_backward`.
    """
    # A scaler allows one unscaling for each update, so the gradient is not scaled.
    scaler, strategy.scaler = strategy.scaler, None
    try:
        strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        if strategy.device.type != "cpu":
            torch.accelerator.synchronize(strategy.device)
    finally:
        strategy.scaler = scaler
    strategy.optimizer.zero_grad(set_to_none=True)
    for parameter in strategy.parameters:  # not the optimizer's tensors, which may be shards
        parameter.grad = None
