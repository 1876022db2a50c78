"""The estimate of one layout: memory, arithmetic, traffic, time; and the search for the best."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from llm.data.options import device_batch_size
from llm.errors import ConfigError
from llm.parallel.dims import ParallelDims
from llm.parallel.pipeline.pipeline_schedule import bubble_fraction
from llm.tools.plan.expert_costs import expert_costs
from llm.tools.plan.job import Job
from llm.tools.plan.memory import FP8, HALF, Memory, peak_memory
from llm.tools.plan.rank_model import FP32, num_elements
from llm.trainers.gpt.config import check_planned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes that one rank sends in one step for one purpose.

    Attributes:
        axis: The layout's axis.
        what: Description of the data.
        in_node: Bytes to ranks of the same node.
        between_nodes: Bytes to other nodes, divided by the ranks per node that share the sending.
        overlapped: Whether arithmetic can hide it.
    """

    axis: str
    what: str
    in_node: float
    between_nodes: float
    overlapped: bool

    def seconds(self, job: Job) -> float:
        """Return the time on the slower of the two links."""
        in_node = self.in_node / (job.device.node_link * 1e9)
        return max(in_node, self.between_nodes / (job.device.network_link * 1e9))


def transfers(job: Job, layout: ParallelDims) -> list[Transfer]:
    """Return the transfers of the rank that sends the most bytes in one step.

    Collectives are counted as rings: each of n ranks sends (n - 1) / n of the whole for a gather or
    a reduce-scatter, and twice as much for an all-reduce. If a node holds several ranks of a ring,
    the ring leaves the node once, and its bytes are divided among these ranks.
    """
    options, per_node = job.options, job.options.gpus_per_node
    param_counts, trace = job.param_counts(layout.tensor), job.trace(layout.tensor, layout.context)
    micro_batches = job.batches(layout).accumulation
    layers = max(map(len, job.layers_of_ranks(layout.pipeline)))
    block, other_weights = (
        num_elements(param_counts.blocks[0]),
        num_elements(param_counts.other_weights),
    )
    experts = expert_costs(job, layout)
    gathered = block - experts.elements
    t, c, r, n = layout.tensor, layout.context, layout.replicate, layout.shard * layout.context
    width = FP32 if options.mixed_precision == "no" else 2
    sent_width = 2 if options.mixed_precision in ("bf16", "fp8") else FP32  # not in fp16
    tokens = device_batch_size(options) * job.length // c
    hidden = tokens * trace.width * width
    passes = 2 + (options.activation_checkpointing == "full")
    transfers_of_rank = []
    if t > 1:
        a_layer: float = 2 * (passes - 1) * hidden
        if options.sequence_parallel:
            a_layer += 2 * hidden  # a gather and a reduce-scatter send as much as an all-reduce
        else:
            # The gradient of each matrix's input, in the precision of the residual stream.
            a_layer += job.column_matrices * tokens * trace.width * FP32
        size = layers * micro_batches * a_layer * 2 * (t - 1) / t
        transfers_of_rank.append(
            _ring_transfer("tensor", "sums of hidden states", size, t, per_node)
        )
    if c > 1:
        size = passes * layers * micro_batches * (c - 1) * tokens * trace.key_width * width
        transfers_of_rank.append(
            _ring_transfer("context", "keys and values", size, c, per_node // t)
        )
    if n > 1:
        gathers = 2 * layers * gathered * (FP8 if options.fp8_all_gather else sent_width)
        sums = FP32 * (layers * gathered + other_weights)
        # The weights outside the blocks stay gathered for all micro-batches of a step.
        once = FP32 * other_weights
        if layout.pipeline == 1 and t == 1 and not param_counts.shares_ends:
            once -= (FP32 - sent_width) * num_elements(param_counts.head)
        reductions = 1 if options.unsharded_gradients else micro_batches
        size = (micro_batches * gathers + reductions * sums + once) * (n - 1) / n
        transfers_of_rank.append(
            _ring_transfer("shard", "weights and gradients", size, n, per_node // t)
        )
    if experts.message_bytes:
        size = layers * micro_batches * experts.message_bytes
        transfers_of_rank.append(_exchange_transfer(size, n, per_node))
    matrices = job.optimizer.traffic
    if matrices is not None and n * t > 1:
        # Each rank sends its shards of gradients, and later its updates.
        stacks = num_elements(p for p in param_counts.blocks[0] if p in param_counts.experts)
        elements = layers * (block if matrices.with_experts else block - stacks)
        elements += other_weights if matrices.with_ends else 0
        size = matrices.bytes_per_element * elements / n * (n * t - 1) / (n * t)
        axis = "shard" if n > 1 else "tensor"
        ring = _ring_transfer(
            axis, "whole matrices to their owners and back", size, n * t, per_node
        )
        transfers_of_rank.append(dataclasses.replace(ring, overlapped=False))
    if r > 1:
        sum_width = HALF if options.all_reduce_dtype == "bf16" else FP32
        size = 2 * (r - 1) / r * sum_width * (layers * block + other_weights) / n
        transfers_of_rank.append(
            _ring_transfer("replicate", "gradients", size, r, per_node // (t * n))
        )
    if layout.pipeline > 1:
        size = 2 * micro_batches * options.virtual_stages * hidden * (sent_width / width)
        fits_in_node = t * n * r * 2 <= per_node
        transfers_of_rank.append(
            Transfer(
                axis="pipeline",
                what="hidden states and their gradients",
                in_node=size if fits_in_node else 0.0,
                between_nodes=0.0 if fits_in_node else size,
                overlapped=False,
            )
        )
    return transfers_of_rank


def _ring_transfer(axis: str, what: str, size: float, ranks: int, on_node: int) -> Transfer:
    """Count a collective: each rank sends `size` bytes, and a node holds `on_node` ranks."""
    on_node = max(1, min(ranks, on_node))
    between = 0.0 if on_node == ranks else size / on_node
    return Transfer(
        axis=axis,
        what=what,
        in_node=size if on_node == ranks else size - between,
        between_nodes=between,
        overlapped=axis in ("shard", "replicate"),
    )


def _exchange_transfer(size: float, ranks: int, on_node: int) -> Transfer:
    """Count an all-to-all: each rank sends an equal part of `size` bytes to each, itself too."""
    on_node = max(1, min(ranks, on_node))
    return Transfer(
        axis="expert",
        what="tokens to their experts and back",
        in_node=size * (on_node - 1) / ranks,
        between_nodes=size * (ranks - on_node) / ranks,
        overlapped=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of one layout. The names are also the keys in the JSON.

    Attributes:
        layout: The layout.
        micro_batches: Micro-batches per step and rank.
        tokens_per_step: Tokens per step over all ranks.
        memory: Memory of the fullest rank.
        fits: Whether the device's memory is large enough.
        flops_per_step: FLOPs per step over all ranks, including recomputation.
        bubble: Fraction of a step that pipeline stages wait.
        transfers: Data that a rank sends.
        floor_seconds: Time of a step at the device's peak.
        step_seconds: Time of a step at the expected efficiency.
        tokens_per_second: Tokens over all ranks at the expected efficiency.
    """

    layout: ParallelDims
    micro_batches: int
    tokens_per_step: int
    memory: Memory
    fits: bool
    flops_per_step: float
    bubble: float
    transfers: list[Transfer]
    floor_seconds: float
    step_seconds: float
    tokens_per_second: float


def estimate(job: Job, layout: ParallelDims) -> Estimate:
    """Estimate a layout.

    Raises:
        ConfigError: The layout does not divide layers, heads, samples or batch.
    """
    batches = job.batches(layout)  # called first because it refuses batches that cannot be traced
    memory, trace = peak_memory(job, layout), job.trace(layout.tensor, layout.context)
    transfers_of_rank = transfers(job, layout)
    bubble = bubble_fraction(
        ranks=layout.pipeline,
        virtual_stages=job.options.virtual_stages,
        micro_batches=batches.accumulation,
    )
    flops = [len(layers) * trace.block_flops for layers in job.layers_of_ranks(layout.pipeline)]
    flops[-1] += trace.loss_flops
    layers = max(map(len, job.layers_of_ranks(layout.pipeline)))
    excess_flops = layers * expert_costs(job, layout).flops
    tokens = batches.global_batch_size * job.length

    device, fp32 = job.device, job.options.mixed_precision == "no"
    peak = (device.fp32_tflops if fp32 else device.tflops) * 1e12
    inline = sum(t.seconds(job) for t in transfers_of_rank if not t.overlapped)
    hidden = sum(t.seconds(job) for t in transfers_of_rank if t.overlapped)
    # The optimizer reads and writes weights and moments and reads gradients.
    stepping = 2 * memory.weights + 2 * memory.optimizer + FP32 * memory.parameters

    def seconds(efficiency: float) -> float:
        """Return the time of a step; overlapped traffic adds only its excess."""
        slowest = max(flops) + excess_flops
        working = slowest * batches.accumulation / (peak * efficiency) + inline
        return max(working / (1 - bubble), hidden) + stepping / (device.bandwidth * 1e9)

    step_seconds = seconds(job.options.efficiency)
    return Estimate(
        layout=layout,
        micro_batches=batches.accumulation,
        tokens_per_step=tokens,
        memory=memory,
        fits=memory.total <= job.usable,
        flops_per_step=sum(flops) * batches.accumulation * (layout.world_size // layout.pipeline),
        bubble=bubble,
        transfers=transfers_of_rank,
        floor_seconds=seconds(1.0),
        step_seconds=step_seconds,
        tokens_per_second=tokens / step_seconds,
    )


def checkpoint_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint: weights and optimizer, and further state once."""
    elements = job.param_counts(1).parameters
    extra = sum(state.divided for state in job.optimizer.extra.values())
    return int(elements * (FP32 + job.optimizer.per_element)) + extra


def search(job: Job) -> list[Estimate]:
    """Estimate all possible layouts: layouts that fit, by speed, then the others, by memory."""
    estimates = []
    for tensor, context in itertools.product(_divisors_of(job.options.gpus_per_node), (1, 2, 4, 8)):
        # Nobody has tried what an extension adds to the optimizer with divided layers.
        refused = tensor > 1 and job.options.besides_optimizer is not None
        if tensor * context > job.options.gpus_per_node or refused:
            continue
        with contextlib.suppress(ConfigError):
            job.trace(tensor, context)  # refuses sizes that are wrong for all these layouts
            pipelines = not (context > 1 or job.options.sequence_parallel)
            for layout in _possible_layouts(
                job.layout.world_size, tensor, context, pipelines=pipelines
            ):
                with contextlib.suppress(ConfigError):
                    estimates.append(estimate(job, layout))
                    if can_divide_experts(job, layout):
                        divided = dataclasses.replace(layout, expert=layout.shard)
                        estimates.append(estimate(job, divided))
    return sorted(
        estimates, key=lambda e: (not e.fits, -e.tokens_per_second if e.fits else e.memory.total)
    )


def can_divide_experts(job: Job, layout: ParallelDims) -> bool:
    """Return whether the trainer accepts expert parallelism on the shards of a layout."""
    counts = job.param_counts(1).num_experts
    if layout.shard == 1 or not counts or any(count % layout.shard for count in counts):
        return False
    sizes: dict[str, Any] = {
        "data_parallel_shard_size": layout.shard,
        "expert_parallel_size": layout.shard,
        "tensor_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "pipeline_parallel_size": layout.pipeline,
    }
    return not check_planned(dataclasses.replace(job.options, **sizes))


def compare_experts(job: Job, layout: ParallelDims) -> tuple[Estimate, Estimate] | None:
    """Estimate a layout with and without expert parallelism; None if the trainer refuses it."""
    if not can_divide_experts(job, layout):
        return None
    with_tokens, with_weights = (
        estimate(job, dataclasses.replace(layout, expert=size)) for size in (layout.shard, 1)
    )
    return with_tokens, with_weights


def _possible_layouts(
    world_size: int, tensor: int, context: int, *, pipelines: bool
) -> Iterator[ParallelDims]:
    for pipeline in _divisors_of(world_size) if pipelines else [1]:
        ranks, remainder = divmod(world_size, tensor * context * pipeline)
        if remainder:
            continue
        for shard in _divisors_of(ranks):
            yield ParallelDims(
                pipeline=pipeline,
                replicate=ranks // shard,
                shard=shard,
                context=context,
                tensor=tensor,
            )


def _divisors_of(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
