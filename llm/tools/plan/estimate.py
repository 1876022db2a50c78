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
from llm.trainers.gpt.config import planned_run_problems


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


def transfers(job: Job, dims: ParallelDims) -> list[Transfer]:
    """Return the transfers of the rank that sends the most bytes in one step.

    Collectives are counted as rings: each of n ranks sends (n - 1) / n of the whole for a gather or
    a reduce-scatter, and twice as much for an all-reduce. If a node holds several ranks of a ring,
    the ring leaves the node once, and its bytes are divided among these ranks.
    """
    options, ranks_per_node = job.options, job.options.gpus_per_node
    param_counts, trace = job.param_counts(dims.tensor), job.trace(dims.tensor, dims.context)
    micro_batches = job.batches(dims).accumulation
    num_layers = max(map(len, job.layers_of_ranks(dims.pipeline)))
    block = param_counts.blocks[param_counts.typical_layer]
    block_elements = num_elements(block)
    other_elements = num_elements(param_counts.other_weights)
    experts = expert_costs(job, dims)
    gathered_elements = block_elements - experts.elements
    tensor, context, replicate = dims.tensor, dims.context, dims.replicate
    shards = dims.shard * context
    activation_width = FP32 if options.mixed_precision == "no" else 2
    transfer_width = 2 if options.mixed_precision in ("bf16", "fp8") else FP32  # not in fp16
    tokens = device_batch_size(options) * job.length // context
    hidden_bytes = tokens * trace.width * activation_width
    num_passes = 2 + (options.activation_checkpointing == "full")
    transfers_of_rank = []
    if tensor > 1:
        layer_bytes: float = 2 * (num_passes - 1) * hidden_bytes
        if options.sequence_parallel:
            layer_bytes += (
                2 * hidden_bytes
            )  # a gather and a reduce-scatter send as much as an all-reduce
        else:
            # The gradient of each matrix's input, in the precision of the residual stream.
            layer_bytes += job.column_matrices * tokens * trace.width * FP32
        size = num_layers * micro_batches * layer_bytes * 2 * (tensor - 1) / tensor
        transfers_of_rank.append(
            _ring_transfer("tensor", "sums of hidden states", size, tensor, ranks_per_node)
        )
    if context > 1:
        key_bytes = tokens * trace.key_width * activation_width
        size = num_passes * num_layers * micro_batches * (context - 1) * key_bytes
        transfers_of_rank.append(
            _ring_transfer("context", "keys and values", size, context, ranks_per_node // tensor)
        )
    if shards > 1:
        gather_width = FP8 if options.fp8_all_gather else transfer_width
        gather_bytes = 2 * num_layers * gathered_elements * gather_width
        reduce_bytes = FP32 * (num_layers * gathered_elements + other_elements)
        # The weights outside the blocks stay gathered for all micro-batches of a step.
        other_gather_bytes = FP32 * other_elements
        if dims.pipeline == 1 and tensor == 1 and not param_counts.shares_embedding:
            other_gather_bytes -= (FP32 - transfer_width) * num_elements(param_counts.head)
        num_reductions = 1 if options.unsharded_gradients else micro_batches
        message_bytes = micro_batches * gather_bytes + num_reductions * reduce_bytes
        size = (message_bytes + other_gather_bytes) * (shards - 1) / shards
        transfers_of_rank.append(
            _ring_transfer("shard", "weights and gradients", size, shards, ranks_per_node // tensor)
        )
    if experts.message_bytes:
        size = _num_expert_layers(job, dims) * micro_batches * experts.message_bytes
        transfers_of_rank.append(_exchange_transfer(size, shards, ranks_per_node))
    traffic = job.optimizer.traffic
    if traffic is not None and shards * tensor > 1:
        # Each rank sends its shards of gradients, and later its updates.
        expert_elements = num_elements(p for p in block if p in param_counts.experts)
        sent_elements = num_layers * (
            block_elements if traffic.with_experts else block_elements - expert_elements
        )
        sent_elements += other_elements if traffic.with_ends else 0
        num_ranks = shards * tensor
        size = traffic.bytes_per_element * sent_elements / shards * (num_ranks - 1) / num_ranks
        axis = "shard" if shards > 1 else "tensor"
        ring = _ring_transfer(
            axis, "whole matrices to their owners and back", size, num_ranks, ranks_per_node
        )
        transfers_of_rank.append(dataclasses.replace(ring, overlapped=False))
    if replicate > 1:
        reduce_width = HALF if options.all_reduce_dtype == "bf16" else FP32
        gradient_elements = num_layers * block_elements + other_elements
        size = 2 * (replicate - 1) / replicate * reduce_width * gradient_elements / shards
        transfers_of_rank.append(
            _ring_transfer(
                "replicate", "gradients", size, replicate, ranks_per_node // (tensor * shards)
            )
        )
    if dims.pipeline > 1:
        size = (
            2
            * micro_batches
            * options.virtual_stages
            * hidden_bytes
            * (transfer_width / activation_width)
        )
        fits_in_node = tensor * shards * replicate * 2 <= ranks_per_node
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


def _num_expert_layers(job: Job, dims: ParallelDims) -> int:
    """Return the largest number of layers with experts on a rank of the pipeline."""
    expert_layers = job.param_counts(dims.tensor).expert_layers
    return max(
        len(expert_layers.intersection(layers)) for layers in job.layers_of_ranks(dims.pipeline)
    )


def _ring_transfer(
    axis: str, what: str, num_bytes: float, num_ranks: int, ranks_per_node: int
) -> Transfer:
    """Count a collective: each rank sends `num_bytes`, and a node holds `ranks_per_node`."""
    ranks_on_node = max(1, min(num_ranks, ranks_per_node))
    fits_on_node = ranks_on_node == num_ranks
    between_nodes = 0.0 if fits_on_node else num_bytes / ranks_on_node
    return Transfer(
        axis=axis,
        what=what,
        in_node=num_bytes if fits_on_node else num_bytes - between_nodes,
        between_nodes=between_nodes,
        overlapped=axis in ("shard", "replicate"),
    )


def _exchange_transfer(num_bytes: float, num_ranks: int, ranks_per_node: int) -> Transfer:
    """Count an all-to-all: each rank sends equal parts of `num_bytes` to all ranks and itself."""
    ranks_on_node = max(1, min(num_ranks, ranks_per_node))
    return Transfer(
        axis="expert",
        what="tokens to their experts and back",
        in_node=num_bytes * (ranks_on_node - 1) / num_ranks,
        between_nodes=num_bytes * (num_ranks - ranks_on_node) / num_ranks,
        overlapped=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of one layout. The names are the keys in the JSON, which calls `dims` `layout`.

    Attributes:
        dims: The layout.
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

    dims: ParallelDims
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


def estimate(job: Job, dims: ParallelDims) -> Estimate:
    """Estimate a layout.

    Raises:
        ConfigError: The layout does not divide layers, heads, samples or batch.
    """
    batches = job.batches(dims)  # called first because it refuses batches that cannot be traced
    memory, trace = peak_memory(job, dims), job.trace(dims.tensor, dims.context)
    transfers_of_rank = transfers(job, dims)
    bubble = bubble_fraction(
        ranks=dims.pipeline,
        virtual_stages=job.options.virtual_stages,
        micro_batches=batches.accumulation,
    )
    stage_flops = [len(layers) * trace.block_flops for layers in job.layers_of_ranks(dims.pipeline)]
    stage_flops[-1] += trace.loss_flops
    excess_flops = _num_expert_layers(job, dims) * expert_costs(job, dims).flops
    tokens = batches.global_batch_size * job.length

    device, is_fp32 = job.device, job.options.mixed_precision == "no"
    peak_flops = (device.fp32_tflops if is_fp32 else device.tflops) * 1e12
    exposed_seconds = sum(t.seconds(job) for t in transfers_of_rank if not t.overlapped)
    overlapped_seconds = sum(t.seconds(job) for t in transfers_of_rank if t.overlapped)
    # The optimizer reads and writes weights and moments and reads gradients.
    optimizer_bytes = 2 * memory.weights + 2 * memory.optimizer + FP32 * memory.parameters

    def seconds_at(efficiency: float) -> float:
        """Return the time of a step; overlapped traffic adds only its excess."""
        slowest_flops = max(stage_flops) + excess_flops
        compute_seconds = slowest_flops * batches.accumulation / (peak_flops * efficiency)
        busy_seconds = compute_seconds + exposed_seconds
        optimizer_seconds = optimizer_bytes / (device.bandwidth * 1e9)
        return max(busy_seconds / (1 - bubble), overlapped_seconds) + optimizer_seconds

    step_seconds = seconds_at(job.options.efficiency)
    return Estimate(
        dims=dims,
        micro_batches=batches.accumulation,
        tokens_per_step=tokens,
        memory=memory,
        fits=memory.total <= job.usable_bytes,
        flops_per_step=sum(stage_flops) * batches.accumulation * (dims.world_size // dims.pipeline),
        bubble=bubble,
        transfers=transfers_of_rank,
        floor_seconds=seconds_at(1.0),
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
        is_refused = tensor > 1 and job.options.besides_optimizer is not None
        if tensor * context > job.options.gpus_per_node or is_refused:
            continue
        with contextlib.suppress(ConfigError):
            job.trace(tensor, context)  # refuses sizes that are wrong for all these layouts
            allows_pipelines = not (context > 1 or job.options.sequence_parallel)
            for dims in _possible_layouts(
                job.dims.world_size, tensor, context, allows_pipelines=allows_pipelines
            ):
                with contextlib.suppress(ConfigError):
                    estimates.append(estimate(job, dims))
                    if can_divide_experts(job, dims):
                        expert_dims = dataclasses.replace(dims, expert=dims.shard)
                        estimates.append(estimate(job, expert_dims))
    return sorted(
        estimates, key=lambda e: (not e.fits, -e.tokens_per_second if e.fits else e.memory.total)
    )


def can_divide_experts(job: Job, dims: ParallelDims) -> bool:
    """Return whether the trainer accepts expert parallelism on the shards of a layout."""
    counts = job.param_counts(1).num_experts
    if dims.shard == 1 or not counts or any(count % dims.shard for count in counts):
        return False
    sizes: dict[str, Any] = {
        "data_parallel_shard_size": dims.shard,
        "expert_parallel_size": dims.shard,
        "tensor_parallel_size": dims.tensor,
        "context_parallel_size": dims.context,
        "pipeline_parallel_size": dims.pipeline,
    }
    return not planned_run_problems(dataclasses.replace(job.options, **sizes))


def compare_experts(job: Job, dims: ParallelDims) -> tuple[Estimate, Estimate] | None:
    """Estimate a layout with expert parallelism on its shards, and without it.

    Returns:
        Both estimates, or None if the trainer refuses expert parallelism.
    """
    if not can_divide_experts(job, dims):
        return None
    divided = estimate(job, dataclasses.replace(dims, expert=dims.shard))
    gathered = estimate(job, dataclasses.replace(dims, expert=1))
    return divided, gathered


def _possible_layouts(
    world_size: int, tensor: int, context: int, *, allows_pipelines: bool
) -> Iterator[ParallelDims]:
    """Yield the layouts of all ranks with these sizes of tensor and context parallelism."""
    for pipeline in _divisors_of(world_size) if allows_pipelines else [1]:
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
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
