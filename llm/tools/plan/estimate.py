"""The estimate of one layout: memory, arithmetic, traffic, time; and the search for the best."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from llm.data.options import device_batch_size
from llm.errors import ConfigError
from llm.parallel.dims import ParallelDims
from llm.parallel.pipeline.pipeline_schedule import compute_bubble_fraction
from llm.tools.plan.expert_costs import expert_costs
from llm.tools.plan.job import Job
from llm.tools.plan.memory import Memory, peak_memory
from llm.tools.plan.rank_model import FP8, FP32, HALF, num_elements
from llm.trainers.gpt.config import find_planned_run_problems


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


def list_transfers(job: Job, dims: ParallelDims) -> list[Transfer]:
    """Return the transfers of the rank that sends the most bytes in one step.

    Collectives are counted as rings: each of n ranks sends (n - 1) / n of the whole for a gather or
    a reduce-scatter, and twice as much for an all-reduce. If a node holds several ranks of a ring,
    the ring leaves the node once, and its bytes are divided among these ranks.
    """
    traffic = _RankTraffic(job, dims)
    candidates = [
        traffic.estimate_tensor_transfer(),
        traffic.estimate_context_transfer(),
        traffic.estimate_shard_transfer(),
        traffic.estimate_expert_transfer(),
        traffic.estimate_shared_expert_transfer(),
        traffic.estimate_matrix_transfer(),
        traffic.estimate_replicate_transfer(),
        traffic.estimate_pipeline_transfer(),
    ]
    return [transfer for transfer in candidates if transfer is not None]


class _RankTraffic:
    """Transfers of one rank in one step, by purpose; a method returns None if it sends nothing."""

    def __init__(self, job: Job, dims: ParallelDims) -> None:
        self._job, self._dims = job, dims
        self._ranks_per_node = job.options.gpus_per_node
        self._shards = dims.shard * dims.context
        self._counts = job.param_counts(dims.tensor)
        self._trace = job.trace(dims.tensor, dims.context)
        self._micro_batches = job.batches(dims).accumulation
        self._num_layers = max(map(len, job.layers_of_ranks(dims.pipeline)))
        self._block = self._counts.blocks[self._counts.typical_layer]
        self._block_elements = num_elements(self._block)
        self._other_elements = num_elements(self._counts.other_weights)
        self._experts = expert_costs(job, dims)
        self._tokens = device_batch_size(job.options) * job.length // dims.context

    @property
    def _activation_width(self) -> int:
        """Bytes of an element of an activation."""
        return FP32 if self._job.options.mixed_precision == "no" else HALF

    @property
    def _transfer_width(self) -> int:
        """Bytes of an element of weights and hidden states in messages."""
        is_half = self._job.options.mixed_precision in ("bf16", "fp8")  # not in fp16
        return HALF if is_half else FP32

    @property
    def _hidden_bytes(self) -> int:
        """Bytes of the hidden states of a micro-batch."""
        return self._tokens * self._trace.width * self._activation_width

    @property
    def _num_passes(self) -> int:
        """Passes through a block per micro-batch: forward, backward and recomputation."""
        return 2 + (self._job.options.activation_checkpointing == "full")

    def estimate_tensor_transfer(self) -> Transfer | None:
        """Return the all-reduces of hidden states, or the gathers and reduce-scatters."""
        tensor = self._dims.tensor
        if tensor == 1:
            return None
        layer_bytes: float = 2 * (self._num_passes - 1) * self._hidden_bytes
        if self._job.options.sequence_parallel:
            # A gather and a reduce-scatter send as much as an all-reduce.
            layer_bytes += 2 * self._hidden_bytes
        else:
            # The gradient of each matrix's input, in the precision of the residual stream.
            layer_bytes += self._job.column_matrices * self._tokens * self._trace.width * FP32
        size = self._num_layers * self._micro_batches * layer_bytes * 2 * (tensor - 1) / tensor
        return _make_ring_transfer(
            "tensor", "sums of hidden states", size, tensor, self._ranks_per_node
        )

    def estimate_context_transfer(self) -> Transfer | None:
        """Return the keys and values that travel around the ring of context parallelism."""
        context = self._dims.context
        if context == 1:
            return None
        key_bytes = self._tokens * self._trace.key_width * self._activation_width
        num_passes = self._num_passes * self._num_layers * self._micro_batches
        size = num_passes * (context - 1) * key_bytes
        ranks_per_node = self._ranks_per_node // self._dims.tensor
        return _make_ring_transfer("context", "keys and values", size, context, ranks_per_node)

    def estimate_shard_transfer(self) -> Transfer | None:
        """Return the gathers of sharded weights, and the reduce-scatters of their gradients."""
        shards, options = self._shards, self._job.options
        if shards == 1:
            return None
        gathered_elements = self._num_layers * (self._block_elements - self._experts.elements)
        gather_width = FP8 if options.fp8_all_gather else self._transfer_width
        gather_bytes = 2 * gathered_elements * gather_width
        reduce_bytes = FP32 * (gathered_elements + self._other_elements)
        num_reductions = 1 if options.unsharded_gradients else self._micro_batches
        message_bytes = self._micro_batches * gather_bytes + num_reductions * reduce_bytes

        # The weights outside the blocks stay gathered for all micro-batches of a step.
        message_bytes += FP32 * self._other_elements
        has_whole_head = self._dims.pipeline == 1 and self._dims.tensor == 1
        if has_whole_head and not self._counts.shares_embedding:
            head_elements = num_elements(self._counts.head)
            message_bytes -= (FP32 - self._transfer_width) * head_elements

        size = message_bytes * (shards - 1) / shards
        ranks_per_node = self._ranks_per_node // self._dims.tensor
        return _make_ring_transfer("shard", "weights and gradients", size, shards, ranks_per_node)

    def estimate_expert_transfer(self) -> Transfer | None:
        """Return the all-to-alls of tokens, with equal parts for all ranks and for itself."""
        if not self._experts.message_bytes:
            return None
        num_messages = _num_expert_layers(self._job, self._dims) * self._micro_batches
        size = num_messages * self._experts.message_bytes
        num_ranks = self._dims.expert
        ranks_on_node = max(1, min(num_ranks, self._ranks_per_node))
        return Transfer(
            axis="expert",
            what="tokens to their experts and back",
            in_node=size * (ranks_on_node - 1) / num_ranks,
            between_nodes=size * (num_ranks - ranks_on_node) / num_ranks,
            overlapped=False,
        )

    def estimate_shared_expert_transfer(self) -> Transfer | None:
        """Return the gathers of experts that ranks share, and the reduce-scatters of gradients."""
        if not self._experts.gathered_elements:
            return None
        expert = self._dims.expert
        num_sharing = self._shards // expert  # ranks that are `expert` apart
        num_passes = _num_expert_layers(self._job, self._dims) * self._micro_batches
        element_bytes = 2 * self._activation_width + FP32  # two gathers, and a reduce-scatter
        size = num_passes * self._experts.gathered_elements * element_bytes
        return _make_ring_transfer(
            "expert",
            "weights and gradients of experts",
            size * (num_sharing - 1) / num_sharing,
            num_sharing,
            self._ranks_per_node // expert,
        )

    def estimate_matrix_transfer(self) -> Transfer | None:
        """Return the shards of gradients sent to the owners of matrices, and their updates back."""
        traffic = self._job.optimizer.traffic
        num_ranks = self._shards * self._dims.tensor
        if traffic is None or num_ranks == 1:
            return None
        layer_elements = self._block_elements
        if not traffic.with_experts:
            layer_elements -= num_elements(p for p in self._block if p in self._counts.experts)
        sent_elements = self._num_layers * layer_elements
        if traffic.with_ends:
            sent_elements += self._other_elements
        shard_bytes = traffic.bytes_per_element * sent_elements / self._shards
        size = shard_bytes * (num_ranks - 1) / num_ranks
        axis = "shard" if self._shards > 1 else "tensor"
        what = "whole matrices to their owners and back"
        ring = _make_ring_transfer(axis, what, size, num_ranks, self._ranks_per_node)
        return dataclasses.replace(ring, overlapped=False)

    def estimate_replicate_transfer(self) -> Transfer | None:
        """Return the all-reduces of gradients over replicas."""
        replicate = self._dims.replicate
        if replicate == 1:
            return None
        reduce_width = HALF if self._job.options.all_reduce_dtype == "bf16" else FP32
        gradient_elements = self._num_layers * self._block_elements + self._other_elements
        if self._dims.shards_only_experts:  # replicas have other experts
            elements_elsewhere = self._experts.elements - self._experts.local_elements
            gradient_elements -= self._num_layers * elements_elsewhere
        size = 2 * (replicate - 1) / replicate * reduce_width * gradient_elements / self._shards
        ranks_per_node = self._ranks_per_node // (self._dims.tensor * self._shards)
        return _make_ring_transfer("replicate", "gradients", size, replicate, ranks_per_node)

    def estimate_pipeline_transfer(self) -> Transfer | None:
        """Return the hidden states between stages, and their gradients."""
        if self._dims.pipeline == 1:
            return None
        num_messages = 2 * self._micro_batches * self._job.options.virtual_stages
        relative_width = self._transfer_width / self._activation_width
        size = num_messages * self._hidden_bytes * relative_width
        ranks_per_stage = self._dims.tensor * self._shards * self._dims.replicate
        fits_in_node = ranks_per_stage * 2 <= self._ranks_per_node
        return Transfer(
            axis="pipeline",
            what="hidden states and their gradients",
            in_node=size if fits_in_node else 0.0,
            between_nodes=0.0 if fits_in_node else size,
            overlapped=False,
        )


def _num_expert_layers(job: Job, dims: ParallelDims) -> int:
    """Return the largest number of layers with experts on a rank of the pipeline."""
    expert_layers = job.param_counts(dims.tensor).expert_layers
    return max(
        len(expert_layers.intersection(layers)) for layers in job.layers_of_ranks(dims.pipeline)
    )


def _make_ring_transfer(
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
    transfers_of_rank = list_transfers(job, dims)
    bubble = compute_bubble_fraction(
        num_ranks=dims.pipeline,
        stages_per_rank=job.options.virtual_stages,
        num_micro_batches=batches.accumulation,
    )
    stage_flops = [len(layers) * trace.block_flops for layers in job.layers_of_ranks(dims.pipeline)]
    stage_flops[-1] += trace.loss_flops
    excess_flops = _num_expert_layers(job, dims) * expert_costs(job, dims).flops
    tokens = batches.global_batch_size * job.length

    device, is_fp32 = job.device, job.options.mixed_precision == "no"
    # The optimizer reads and writes weights and moments and reads gradients.
    optimizer_bytes = 2 * memory.weights + 2 * memory.optimizer + FP32 * memory.parameters
    optimizer_seconds = optimizer_bytes / (device.bandwidth * 1e9)
    rank_flops = (max(stage_flops) + excess_flops) * batches.accumulation
    peak_flops = (device.fp32_tflops if is_fp32 else device.tflops) * 1e12
    exposed_seconds = sum(
        transfer.seconds(job) for transfer in transfers_of_rank if not transfer.overlapped
    )
    overlapped_seconds = sum(
        transfer.seconds(job) for transfer in transfers_of_rank if transfer.overlapped
    )

    def seconds_at(efficiency: float) -> float:
        """Return the time of a step at a fraction of the device's peak."""
        compute_seconds = rank_flops / (peak_flops * efficiency)
        busy_seconds = (compute_seconds + exposed_seconds) / (1 - bubble)
        # Overlapped transfers add only the time by which they are longer than the rest.
        return max(busy_seconds, overlapped_seconds) + optimizer_seconds

    step_seconds = seconds_at(job.efficiency)
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
        is_refused = tensor > 1 and job.options.extra_optimizer_option is not None
        if tensor * context <= job.options.gpus_per_node and not is_refused:
            estimates += _estimate_layouts(job, tensor, context)
    return sorted(estimates, key=_layout_sort_key)


def _layout_sort_key(candidate: Estimate) -> tuple[bool, float]:
    """Return the sort key of a layout: those that fit first, by speed, then others by memory."""
    if candidate.fits:
        return False, -candidate.tokens_per_second
    return True, candidate.memory.total


def _estimate_layouts(job: Job, tensor: int, context: int) -> list[Estimate]:
    """Estimate the possible layouts with these sizes of tensor and context parallelism."""
    try:
        job.trace(tensor, context)
    except ConfigError:  # the sizes are wrong for all these layouts
        return []
    allows_pipelines = not (context > 1 or job.options.sequence_parallel)
    layouts = _list_layouts(job.dims.world_size, tensor, context, allows_pipelines=allows_pipelines)
    estimates = []
    for dims in layouts:
        with contextlib.suppress(ConfigError):  # a layout that the run cannot have
            estimates.append(estimate(job, dims))
            estimates += [estimate(job, expert_dims) for expert_dims in _expert_layouts(job, dims)]
    return estimates


def can_divide_experts(job: Job, dims: ParallelDims) -> bool:
    """Return whether the trainer accepts a layout with expert parallelism."""
    counts = job.param_counts(1).num_experts
    if not counts or any(count % size for count in counts for size in (dims.shard, dims.expert)):
        return False
    if (dims.replicate if dims.shard == 1 else dims.shard) % dims.expert:
        return False
    sizes: dict[str, Any] = {
        "data_parallel_shard_size": dims.shard,
        "expert_parallel_size": dims.expert,
        "tensor_parallel_size": dims.tensor,
        "context_parallel_size": dims.context,
        "pipeline_parallel_size": dims.pipeline,
    }
    return not find_planned_run_problems(dataclasses.replace(job.options, **sizes))


def compare_experts(job: Job, dims: ParallelDims) -> tuple[Estimate, Estimate] | None:
    """Estimate a layout with expert parallelism, by default over all its shards, and without it.

    Returns:
        Both estimates, or None if the layout has neither shards nor expert parallelism, or the
        trainer refuses it.
    """
    expert_dims = dataclasses.replace(dims, expert=dims.expert if dims.expert > 1 else dims.shard)
    if expert_dims.expert == 1 or not can_divide_experts(job, expert_dims):
        return None
    return estimate(job, expert_dims), estimate(job, dataclasses.replace(dims, expert=1))


def _expert_layouts(job: Job, dims: ParallelDims) -> Iterator[ParallelDims]:
    """Yield the layouts with expert parallelism that divide the ranks in the same way."""
    for expert in _divisors_of(dims.replicate if dims.shard == 1 else dims.shard)[1:]:
        expert_dims = dataclasses.replace(dims, expert=expert)
        # Tokens between nodes take longest; all shards may divide the experts nevertheless.
        is_near = expert <= job.options.gpus_per_node or expert == dims.shard
        if is_near and can_divide_experts(job, expert_dims):
            yield expert_dims


def _list_layouts(
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
