"""Peak memory of one rank in a step, by kind."""

import dataclasses
import itertools

from torch import nn

from llm.metrics.hardware import GIB
from llm.optim.run_optimizer import MatrixTraffic, StateMemory
from llm.parallel.dims import ParallelDims
from llm.tools.plan.expert_costs import expert_costs
from llm.tools.plan.job import Job
from llm.tools.plan.rank_model import FP8, FP32, HALF, num_elements, shard_sizes

CONTEXT = GIB
"""Bytes of a GPU that the driver, cuBLAS and NCCL use in addition to tensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank at one moment.

    Attributes:
        moment: Name of the moment.
        stage: Stage of the pipeline, from 0.
        parameters: Elements of the rank's weights.
        weights: Weights.
        gradients: Gradients.
        optimizer: Moments of the optimizer.
        extra: What extensions keep, and their temporary tensors, by kind.
        activations: Activations, and temporary tensors of the backward pass.
        logits: Temporary tensors of the loss.
        buffers: Buffers of the model; gathered and half-precision copies of weights; messages to
            other ranks; the driver on a GPU.
    """

    moment: str
    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    extra: dict[str, int]
    activations: int
    logits: int
    buffers: int

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            **self.extra,
            "activations": self.activations,
            "logits": self.logits,
            "buffers": self.buffers,
        }

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.kinds.values())


def peak_memory(job: Job, dims: ParallelDims) -> Memory:
    """Return the memory of the rank at the moment with the highest total.

    Raises:
        ConfigError: The layout does not divide layers, heads, samples or batch.
    """
    stages = [StagePlan(job, dims, stage) for stage in range(dims.pipeline)]
    return max((m for stage in stages for m in stage.moments()), key=lambda memory: memory.total)


def count_in_flight(
    schedule: str, *, stage: int, num_stages: int, micro_batches: int, virtual_stages: int
) -> float:
    """Return the maximum number of micro-batches with activations in memory on a stage.

    GPipe holds all micro-batches. 1F1B holds one for each stage from here to the end; interleaved
    1F1B counts virtual stages (Narayanan et al. 2021, section 2.2).
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "interleaved-1f1b" and num_stages > 1:
        num_passes = 2 * (num_stages - stage - 1) + (virtual_stages - 1) * num_stages + 1
        return min(num_passes, micro_batches * virtual_stages) / virtual_stages
    return min(micro_batches, num_stages - stage)


class StagePlan:
    """The memory of one rank of one stage during a step."""

    def __init__(self, job: Job, dims: ParallelDims, stage: int) -> None:
        self.job, self.dims, self.stage = job, dims, stage
        self.is_last = stage == dims.pipeline - 1
        self.num_shards = dims.shard * dims.context
        self.uses_ddp = dims.replicate == dims.world_size
        self.is_sharded = not self.uses_ddp and (self.num_shards > 1 or dims.replicate > 1)
        self.param_counts = job.param_counts(dims.tensor)
        self.trace = job.trace(dims.tensor, dims.context)
        layer_indices = job.layers_of_ranks(dims.pipeline)[stage]
        self.num_layers = len(layer_indices)
        expert_layers = self.param_counts.expert_layers.intersection(layer_indices)
        self.block = self.param_counts.blocks[min(expert_layers, default=layer_indices[0])]
        self.experts = expert_costs(job, dims)
        self.other_weights = self._find_other_weights()

        blocks = (self.param_counts.blocks[index] for index in layer_indices)
        parameters = [*itertools.chain(self.other_weights, *blocks)]
        self.unsharded_trained_elements = num_elements(p for p in parameters if p.requires_grad)
        # Experts may be divided over other ranks than the rest.
        expert_params = [p for p in parameters if p in self.param_counts.experts]
        other_params = [p for p in parameters if p not in self.param_counts.experts]
        expert_ranks = dims.expert if dims.shards_only_experts else self.num_shards
        self.local_expert_elements, trained_experts = shard_sizes(expert_params, expert_ranks)
        local_elements, trained_elements = shard_sizes(other_params, self.num_shards)
        self.local_elements = local_elements + self.local_expert_elements
        self.trained_elements = trained_elements + trained_experts
        self.bucket_elements = (
            trained_elements if dims.shards_only_experts else self.trained_elements
        )
        stack_elements = (p.numel() // expert_ranks for p in expert_params)
        self.largest_stack_elements = max(stack_elements, default=0)

        self.micro_batches = job.batches(dims).accumulation
        self.num_in_flight = count_in_flight(
            job.options.pipeline_schedule,
            stage=stage,
            num_stages=dims.pipeline,
            micro_batches=self.micro_batches,
            virtual_stages=job.options.virtual_stages,
        )

    def _find_other_weights(self) -> list[nn.Parameter]:
        """Return the weights outside of blocks on this stage.

        The head is on the last stage, and a tied one also on the first; the rest is on the first.
        """
        head, is_tied = self.param_counts.head, self.param_counts.is_tied
        weights = []
        for p in self.param_counts.other_weights:
            is_on_first_stage = p not in head or is_tied
            is_on_last_stage = p in head
            if (is_on_last_stage and self.is_last) or (is_on_first_stage and self.stage == 0):
                weights.append(p)
        return weights

    @property
    def gathers_casts(self) -> bool:
        """Whether weights are gathered in half precision."""
        return self.is_sharded and self.job.options.mixed_precision in ("bf16", "fp8")

    @property
    def caches_casts(self) -> bool:
        """Whether autocast caches its half-precision copies of weights until the step ends."""
        options = self.job.options
        # On a GPU the backward pass runs in a separate thread. There, the autocast of a recomputed
        # block is the outermost one, and its end clears all copies.
        is_recomputed_on_gpu = options.activation_checkpointing != "none" and (
            options.device != "cpu"
        )
        return (
            self.dims.is_replicated
            and self.micro_batches > 1
            and options.mixed_precision != "no"
            and not is_recomputed_on_gpu
        )

    @property
    def has_separate_groups(self) -> bool:
        """Whether embedding and head are gathered apart from the final norm."""
        # With pipelines or tied weights, they share one group with it.
        return self.dims.pipeline == 1 and not self.param_counts.shares_embedding

    @property
    def block_width(self) -> int:
        """Bytes of an element of a block's gathered weights."""
        if self.job.options.fp8_all_gather:
            return FP8
        return HALF if self.gathers_casts else FP32

    @property
    def head_width(self) -> int:
        """Bytes of an element of the gathered output head."""
        return HALF if self.gathers_casts and self.dims.tensor == 1 else FP32

    @property
    def keeps_unsharded_gradients(self) -> bool:
        """Whether gradients are reduced after the last micro-batch only."""
        return self.is_sharded and self.job.options.unsharded_gradients and self.micro_batches > 1

    def moments(self) -> list[Memory]:
        """Return the memory at each moment that may be the peak."""
        moments = [
            self._memory_in_last_backward(),
            self._memory_in_first_backward(),
            self._memory_at("optimizer's step", 0, has_gradients=True, is_optimizer_step=True),
            self._memory_in_last_forward(),
        ]
        if self.has_separate_groups and self.is_sharded:
            moments.append(self._memory_in_head_reduction())
        if self.is_last:
            moments.append(self._memory_in_loss())
        return moments

    def _memory_in_last_backward(self) -> Memory:
        """Return the memory in the backward pass of the last layer."""
        unreduced_block = self._block_gradient() - FP32 * (
            self.experts.elements - self.experts.local_elements
        )
        return self._memory_at(
            "backward of its last layer",
            self._activations_in_last_layer()
            + self._loss_activations()
            + self._backward_extra()
            + self._head_cast(),
            unreduced_bytes=self._head_gradient() + unreduced_block,
        )

    def _memory_in_first_backward(self) -> Memory:
        """Return the memory in the backward pass of the first layer, where all others are done."""
        num_done = self.num_layers - 1
        activations = (
            self._activations_in_last_layer()
            - self._activation_bytes(self.num_layers)
            + self._activation_bytes(1)
            + num_done * self._freed_casts()
        )
        if self.caches_casts and not self.job.is_compiled:  # else each block makes its copies
            activations += num_done * self.trace.block_casts
        return self._memory_at(
            "backward of its first layer",
            activations + self._backward_extra() + self._head_cast(),
            has_gradients=True,
        )

    def _memory_in_last_forward(self) -> Memory:
        """Return the memory in the forward pass of the last layer."""
        return self._memory_at(
            "forward of its last layer",
            self._activations_after_forward() + self.trace.block_forward_extra + self._head_cast(),
            gathers_head=True,
        )

    def _memory_in_head_reduction(self) -> Memory:
        """Return the memory while the gradient of the output head is reduced."""
        # The gradient, the message and the result of a reduce-scatter; gloo copies the message.
        num_copies = 2 + 1 / self.num_shards + (self.job.options.device == "cpu")
        return self._memory_at(
            "reduction of the head's gradient",
            self._activations_in_last_layer() + self._loss_activations(),
            unreduced_bytes=int(num_copies * self._head_gradient()),
            gathers_head=True,
        )

    def _memory_in_loss(self) -> Memory:
        """Return the memory while the loss is computed."""
        return self._memory_at(
            "loss",
            self._activations_after_forward(),
            unreduced_bytes=self._head_gradient(),
            logits=max(0, self.trace.loss_extra - self._head_gradient()),
            gathers_head=True,
        )

    def _block_gradient(self) -> int:
        """Return the bytes of the gradients of a block's weights."""
        return FP32 * num_elements(p for p in self.block if p.requires_grad)

    def _head_gradient(self) -> int:
        """Return the bytes of the gradient of the output head; 0 before the last stage."""
        if not self.is_last:
            return 0
        return FP32 * num_elements(p for p in self.param_counts.head if p.requires_grad)

    def _head_cast(self) -> int:
        """Return the bytes of autocast's copy of the output head; the loss counts its own copy."""
        return HALF * num_elements(self.param_counts.head) if self.caches_casts else 0

    def _backward_extra(self) -> int:
        """Return the temporary bytes of a block's backward pass, without gradients of weights."""
        return max(0, self.trace.block_backward_extra - self._block_gradient())

    def _loss_activations(self) -> int:
        """Return the bytes that remain of the loss, or the message of the next stage."""
        if self.is_last:
            return self.trace.backward_loss - self.trace.retained_loss
        return self.trace.hidden

    def _freed_casts(self) -> int:
        """Return the bytes of a block's half-precision copies freed after the forward pass."""
        if self.gathers_casts or self.caches_casts:
            return 0
        return self.trace.block_casts - self.trace.backward_casts

    def _activations_after_forward(self) -> float:
        """Return the bytes of activations of the micro-batches in flight after a forward pass."""
        return self.num_in_flight * self._activation_bytes(self.num_layers)

    def _activations_in_last_layer(self) -> float:
        """Return the bytes of activations at the beginning of the last layer's backward pass."""
        freed = self.num_in_flight * self.num_layers * self._freed_casts()
        return self._activations_after_forward() - freed

    def _activation_bytes(self, num_layers: int) -> float:
        """Return the bytes of one micro-batch's activations at the end of its forward pass.

        If weights are gathered in half precision, autocast caches no copies of them, except of a
        rank's experts, which are not gathered.
        """
        trace, experts = self.trace, self.experts
        cast_bytes = trace.block_casts if self.gathers_casts else 0
        expert_bytes: float = 0
        if experts.elements:
            if cast_bytes == 0 < trace.block_casts:  # of all experts
                cast_bytes = min(trace.block_casts, HALF * experts.elements)
            is_recomputed = self.job.options.activation_checkpointing != "none"
            num_expert_layers = 1 if is_recomputed else num_layers
            expert_bytes = (experts.casts + experts.activations) * num_expert_layers
        input_bytes = trace.inputs if self.stage == 0 else trace.hidden
        return input_bytes + num_layers * (trace.block - cast_bytes) + expert_bytes

    def _memory_at(
        self,
        moment: str,
        activations: float,
        *,
        unreduced_bytes: int = 0,
        logits: int | None = None,
        has_gradients: bool = False,
        is_optimizer_step: bool = False,
        gathers_head: bool = False,
    ) -> Memory:
        """Return the memory at a moment.

        Args:
            moment: Name of the moment.
            activations: Bytes.
            unreduced_bytes: Bytes of this micro-batch's gradients that are not reduced yet.
            logits: Bytes; by default the bytes that stay from step to step.
            has_gradients: Whether all gradients exist, even without accumulation or buckets.
            is_optimizer_step: Whether the moment is in the optimizer's step.
            gathers_head: Whether the output head is gathered, even without accumulation.
        """
        optimizer = self.job.optimizer
        if logits is None:
            logits = self.trace.retained_loss if self.is_last else 0
        buffers = self._buffer_bytes(
            unreduced_bytes=unreduced_bytes,
            is_backward=unreduced_bytes > 0 or has_gradients,
            is_optimizer_step=is_optimizer_step,
            gathers_head=gathers_head,
        )
        gradients = self._gradient_bytes(
            has_gradients=has_gradients, is_optimizer_step=is_optimizer_step
        )
        if not self.is_sharded:
            gradients += unreduced_bytes
        return Memory(
            moment=moment,
            stage=self.stage,
            parameters=self.local_elements,
            weights=FP32 * self.local_elements,
            gradients=gradients,
            optimizer=int(optimizer.per_element * self.trained_elements),
            extra={
                kind: self._extra_bytes(state, is_optimizer_step=is_optimizer_step)
                for kind, state in optimizer.extra.items()
            },
            activations=int(activations),
            logits=logits,
            buffers=buffers,
        )

    def _gradient_bytes(self, *, has_gradients: bool, is_optimizer_step: bool) -> int:
        """Return the bytes of accumulated gradients at a moment, as for `_memory_at`."""
        if self.keeps_unsharded_gradients and not is_optimizer_step:
            return FP32 * self.unsharded_trained_elements
        # DistributedDataParallel allocates its buckets of gradients at the start.
        has_buckets = self.uses_ddp and self.dims.world_size > 1
        if has_gradients or self.micro_batches > 1:
            return FP32 * self.trained_elements
        return FP32 * self.bucket_elements if has_buckets else 0

    def _buffer_bytes(
        self,
        *,
        unreduced_bytes: int,
        is_backward: bool,
        is_optimizer_step: bool,
        gathers_head: bool,
    ) -> int:
        """Return the bytes of buffers, gathered weights and messages, as for `_memory_at`."""
        size = self.param_counts.buffers
        if self.job.options.device != "cpu":
            size += CONTEXT
        if not self.is_sharded:
            if self.micro_batches > 1 and self.dims.world_size > 1:
                # Gradients accumulate outside the buckets, which the last micro-batch fills.
                size += FP32 * self.bucket_elements
            return size
        size += unreduced_bytes
        if not is_optimizer_step:
            return size + self._gathered_bytes(is_backward=is_backward, gathers_head=gathers_head)
        traffic = self.job.optimizer.traffic
        if traffic is not None and self.num_shards * self.dims.tensor > 1:
            size += self._matrix_bytes(traffic)
        return size

    def _matrix_bytes(self, traffic: MatrixTraffic) -> int:
        """Return the temporary bytes of an update of whole matrices.

        These are buckets of gradients and of updates: one is computed while two are sent. Experts
        that are not sent are updated one stack after another.
        """
        if traffic.with_experts:
            return 6 * FP32 * min(traffic.bucket, self.local_elements)
        bucket = min(traffic.bucket, self.local_elements - self.local_expert_elements)
        return 6 * FP32 * max(bucket, self.largest_stack_elements)

    def _extra_bytes(self, state: StateMemory, *, is_optimizer_step: bool) -> int:
        """Return the bytes of an extension's state; of a sharded layer, only its owner has some."""
        temporary = state.stepping if is_optimizer_step else state.recording
        if self.dims.is_replicated:
            return state.replicated + temporary
        fraction = self.num_layers / len(self.param_counts.blocks)
        if is_optimizer_step and state.divided_stepping:
            temporary = state.divided_stepping // self.num_shards
        return int(fraction * (state.divided / self.num_shards + temporary))

    def _gathered_bytes(self, *, is_backward: bool, gathers_head: bool) -> int:
        """Return the bytes of gathered weights (this layer and the next) and of reduced gradients.

        Weights outside of blocks stay gathered from the forward to the end of the backward pass.
        Embedding and head are freed after their use in the last micro-batch if they have separate
        groups.
        """
        counts = self.param_counts
        other_weights, size = self.other_weights, 0
        if self.has_separate_groups:
            separate_params = counts.embedding | counts.head
            other_weights = [p for p in other_weights if p not in separate_params]
            if self.micro_batches > 1:
                size += FP32 * num_elements(counts.embedding)
            if self.micro_batches > 1 or gathers_head:
                size += self.head_width * num_elements(counts.head)
        size += FP32 * num_elements(other_weights)

        block_elements = num_elements(self.block) - self.experts.elements
        size += 2 * self.block_width * block_elements
        if is_backward:
            size += FP32 * block_elements
        # Of this layer; their gradient counts as unreduced.
        expert_width = FP32 if self.job.options.mixed_precision == "no" else HALF
        return size + expert_width * self.experts.gathered_elements
