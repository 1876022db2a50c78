"""Peak memory of one rank in a step, by kind."""

import dataclasses
import itertools

from llm.metrics.hardware import GIB
from llm.optim.run_optimizer import MatrixTraffic, StateMemory
from llm.parallel.dims import ParallelDims
from llm.tools.plan.expert_costs import expert_costs
from llm.tools.plan.job import Job
from llm.tools.plan.rank_model import FP32, num_elements, shard_sizes

HALF = 2
"""Bytes of a number in half precision."""

FP8 = 1
"""Bytes of a number in float8."""

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


def max_in_flight(
    schedule: str, *, stage: int, num_stages: int, micro_batches: int, virtual_stages: int
) -> float:
    """Return the maximum number of micro-batches with activations in memory on a stage.

    GPipe holds all micro-batches. 1F1B holds one for each stage from here to the end; interleaved
    1F1B counts virtual stages (Narayanan et al. 2021, section 2.2).
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "interleaved-1f1b" and num_stages > 1:
        passes = 2 * (num_stages - stage - 1) + (virtual_stages - 1) * num_stages + 1
        return min(passes, micro_batches * virtual_stages) / virtual_stages
    return min(micro_batches, num_stages - stage)


class StagePlan:
    """The memory of one rank of one stage during a step."""

    def __init__(self, job: Job, dims: ParallelDims, stage: int) -> None:
        self.job, self.dims, self.stage = job, dims, stage
        self.param_counts = job.param_counts(dims.tensor)
        self.trace = job.trace(dims.tensor, dims.context)
        layer_indices = job.layers_of_ranks(dims.pipeline)[stage]
        self.num_layers = len(layer_indices)
        self.is_last = stage == dims.pipeline - 1
        ranks = self.ranks = dims.shard * dims.context
        self.is_sharded = not dims.is_replicated and (ranks > 1 or dims.replicate > 1)
        self.gathers_casts = self.is_sharded and job.options.mixed_precision in ("bf16", "fp8")
        # With pipelines or tied weights, embedding and head share one group with the final norm.
        self.has_separate_groups = dims.pipeline == 1 and not self.param_counts.shares_embedding
        self.block_width = HALF if self.gathers_casts else FP32
        if job.options.fp8_all_gather:
            self.block_width = FP8
        self.head_width = HALF if self.gathers_casts and dims.tensor == 1 else FP32
        expert_layers = self.param_counts.expert_layers.intersection(layer_indices)
        self.block = self.param_counts.blocks[min(expert_layers, default=layer_indices[0])]
        self.experts = expert_costs(job, dims)
        head, is_first_stage = self.param_counts.head, stage == 0
        # The head is on the last stage, and a tied one also on the first.
        self.other_weights = [
            p
            for p in self.param_counts.other_weights
            if (p in head and self.is_last)
            or (is_first_stage and (p not in head or self.param_counts.is_tied))
        ]
        blocks = (self.param_counts.blocks[index] for index in layer_indices)
        parameters = [*itertools.chain(self.other_weights, *blocks)]
        self.local_elements, self.trained_elements = shard_sizes(parameters, ranks)
        expert_params = [p for p in parameters if p in self.param_counts.experts]
        self.local_expert_elements, _ = shard_sizes(expert_params, ranks)
        self.largest_stack_elements = max((p.numel() // ranks for p in expert_params), default=0)
        self.unsharded_trained_elements = num_elements(p for p in parameters if p.requires_grad)
        self.micro_batches = job.batches(dims).accumulation
        self.keeps_unsharded_gradients = (
            self.is_sharded and job.options.unsharded_gradients and self.micro_batches > 1
        )
        # On a GPU the backward pass runs in a separate thread. There, the autocast of a recomputed
        # block is the outermost one, and its end clears all copies.
        is_recomputed = job.options.activation_checkpointing != "none"
        is_recomputed_on_gpu = is_recomputed and job.options.device != "cpu"
        self.caches_casts = (
            dims.is_replicated
            and self.micro_batches > 1
            and job.options.mixed_precision != "no"
            and not is_recomputed_on_gpu
        )
        self.num_in_flight = max_in_flight(
            job.options.pipeline_schedule,
            stage=stage,
            num_stages=dims.pipeline,
            micro_batches=self.micro_batches,
            virtual_stages=job.options.virtual_stages,
        )

    def moments(self) -> list[Memory]:
        """Return the memory at each moment that may be the peak."""
        trace, param_counts = self.trace, self.param_counts
        block_gradient = FP32 * num_elements(p for p in self.block if p.requires_grad)
        unreduced_gradient = block_gradient - FP32 * (
            self.experts.elements - self.experts.local_elements
        )
        head_gradient = FP32 * num_elements(p for p in param_counts.head if p.requires_grad)
        head_gradient *= self.is_last
        backward_extra = max(0, trace.block_backward_extra - block_gradient)
        loss_activations = (
            trace.backward_loss - trace.retained_loss if self.is_last else trace.hidden
        )

        freed_casts = trace.block_casts - trace.backward_casts
        if self.gathers_casts or self.caches_casts:
            freed_casts = 0
        after_forward = self.num_in_flight * self._activation_bytes(self.num_layers)
        in_last_layer = after_forward - self.num_in_flight * self.num_layers * freed_casts
        in_first_layer = (
            in_last_layer
            - self._activation_bytes(self.num_layers)
            + self._activation_bytes(1)
            + (self.num_layers - 1) * freed_casts
        )
        head_cast = 0
        if self.caches_casts:
            if not self.job.is_compiled:  # else each block makes its copies itself
                in_first_layer += (self.num_layers - 1) * trace.block_casts
            head_cast = HALF * num_elements(param_counts.head)  # the loss counts it itself

        moments = [
            self._memory_at(
                "backward of its last layer",
                in_last_layer + loss_activations + backward_extra + head_cast,
                unreduced_bytes=head_gradient + unreduced_gradient,
            ),
            self._memory_at(
                "backward of its first layer",
                in_first_layer + backward_extra + head_cast,
                has_gradients=True,
            ),
            self._memory_at("optimizer's step", 0, has_gradients=True, is_optimizer_step=True),
            self._memory_at(
                "forward of its last layer",
                after_forward + trace.block_forward_extra + head_cast,
                gathers_head=True,
            ),
        ]
        if self.has_separate_groups and self.is_sharded:
            # The gradient, the message and the result of a reduce-scatter; gloo copies the message.
            copies = 2 + 1 / self.ranks + (self.job.options.device == "cpu")
            moments.append(
                self._memory_at(
                    "reduction of the head's gradient",
                    in_last_layer + loss_activations,
                    unreduced_bytes=int(copies * head_gradient),
                    gathers_head=True,
                )
            )
        if self.is_last:
            moments.append(
                self._memory_at(
                    "loss",
                    after_forward,
                    unreduced_bytes=head_gradient,
                    logits=max(0, trace.loss_extra - head_gradient),
                    gathers_head=True,
                )
            )
        return moments

    def _activation_bytes(self, num_layers: int) -> float:
        """Return the bytes of one micro-batch's activations at the end of its forward pass.

        If weights are gathered in half precision, autocast caches no copies of them, except of a
        rank's experts, which are not gathered.
        """
        trace, experts = self.trace, self.experts
        casts = trace.block_casts if self.gathers_casts else 0
        input_bytes = trace.inputs if self.stage == 0 else trace.hidden
        if not experts.elements:
            return input_bytes + num_layers * (trace.block - casts)
        is_recomputed = self.job.options.activation_checkpointing != "none"
        if casts == 0 < trace.block_casts:  # of all experts
            casts = min(trace.block_casts, HALF * experts.elements)
        num_expert_layers = 1 if is_recomputed else num_layers
        expert_bytes = (experts.casts + experts.activations) * num_expert_layers
        return input_bytes + num_layers * (trace.block - casts) + expert_bytes

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
        accumulates = self.micro_batches > 1
        # DistributedDataParallel allocates buckets for all gradients at the start.
        has_buckets = self.dims.is_replicated and self.dims.world_size > 1
        gradients = (
            FP32 * self.trained_elements if has_gradients or accumulates or has_buckets else 0
        )
        if self.keeps_unsharded_gradients and not is_optimizer_step:
            gradients = FP32 * self.unsharded_trained_elements
        buffers = self.param_counts.buffers + (0 if self.job.options.device == "cpu" else CONTEXT)
        if self.is_sharded:
            ranks = self.dims.shard * self.dims.context * self.dims.tensor
            if is_optimizer_step and optimizer.traffic is not None and ranks > 1:
                buffers += self._matrix_bytes(optimizer.traffic)
            buffers += unreduced_bytes
            if not is_optimizer_step:
                buffers += self._gathered_bytes(
                    is_backward=unreduced_bytes > 0 or has_gradients, gathers_head=gathers_head
                )
        else:
            gradients += unreduced_bytes
            if accumulates and self.dims.world_size > 1:
                # Gradients accumulate outside the buckets, which the last micro-batch fills.
                buffers += FP32 * self.trained_elements
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
            logits=(self.trace.retained_loss if self.is_last else 0) if logits is None else logits,
            buffers=buffers,
        )

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
        dims = self.dims
        temporary = state.stepping if is_optimizer_step else state.recording
        if dims.is_replicated:
            return state.replicated + temporary
        fraction = self.num_layers / len(self.param_counts.blocks)
        num_owners = dims.shard * dims.context
        return int(fraction * (state.divided / num_owners + temporary))

    def _gathered_bytes(self, *, is_backward: bool, gathers_head: bool) -> int:
        """Return the bytes of gathered weights (this layer and the next) and of reduced gradients.

        Weights outside of blocks stay gathered from the forward to the end of the backward pass.
        Embedding and head are freed after their use in the last micro-batch if they have separate
        groups.
        """
        block = num_elements(self.block) - self.experts.elements
        other_weights, size = self.other_weights, 0
        if self.has_separate_groups:
            excluded_params = self.param_counts.embedding | self.param_counts.head
            other_weights = [p for p in other_weights if p not in excluded_params]
            if self.micro_batches > 1:
                size += FP32 * num_elements(self.param_counts.embedding)
            if self.micro_batches > 1 or gathers_head:
                size += self.head_width * num_elements(self.param_counts.head)
        size += FP32 * num_elements(other_weights)
        return size + 2 * self.block_width * block + (FP32 * block if is_backward else 0)
