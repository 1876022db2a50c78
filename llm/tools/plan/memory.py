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


def peak_memory(job: Job, layout: ParallelDims) -> Memory:
    """Return the memory of the rank at the moment with the highest total.

    Raises:
        ConfigError: The layout does not divide layers, heads, samples or batch.
    """
    stages = [StagePlan(job, layout, stage) for stage in range(layout.pipeline)]
    return max((m for stage in stages for m in stage.moments()), key=lambda memory: memory.total)


def in_flight(schedule: str, *, stage: int, stages: int, micro_batches: int, virtual: int) -> float:
    """Return the maximum number of micro-batches with activations in memory on a stage.

    GPipe holds all micro-batches. 1F1B holds one for each stage from here to the end; interleaved
    1F1B counts virtual stages (Narayanan et al. 2021, section 2.2).
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "interleaved-1f1b" and stages > 1:
        passes = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        return min(passes, micro_batches * virtual) / virtual
    return min(micro_batches, stages - stage)


class StagePlan:
    """The memory of one rank of one stage during a step."""

    def __init__(self, job: Job, layout: ParallelDims, stage: int) -> None:
        self.job, self.layout, self.stage = job, layout, stage
        self.param_counts = job.param_counts(layout.tensor)
        self.trace = job.trace(layout.tensor, layout.context)
        numbers = job.layers_of_ranks(layout.pipeline)[stage]
        self.layers = len(numbers)
        self.is_last = stage == layout.pipeline - 1
        ranks = self.ranks = layout.shard * layout.context
        self.sharded = not layout.is_replicated and (ranks > 1 or layout.replicate > 1)
        self.casts_are_gathered = self.sharded and job.options.mixed_precision in ("bf16", "fp8")
        # With pipelines or tied weights, embedding and head share one group with the final norm.
        self.has_own_ends = layout.pipeline == 1 and not self.param_counts.shares_ends
        self.block_width = HALF if self.casts_are_gathered else FP32
        if job.options.fp8_all_gather:
            self.block_width = FP8
        self.head_width = HALF if self.casts_are_gathered and layout.tensor == 1 else FP32
        self.block = self.param_counts.blocks[numbers[0]]
        self.experts = expert_costs(job, layout)
        head, is_first_stage = self.param_counts.head, stage == 0
        # The head is on the last stage, and a tied one also on the first.
        self.other_weights = [
            p
            for p in self.param_counts.other_weights
            if (p in head and self.is_last)
            or (is_first_stage and (p not in head or self.param_counts.is_tied))
        ]
        blocks = (self.param_counts.blocks[number] for number in numbers)
        parameters = [*itertools.chain(self.other_weights, *blocks)]
        self.local, self.trained = shard_sizes(parameters, ranks)
        in_experts = [p for p in parameters if p in self.param_counts.experts]
        self.local_experts, _ = shard_sizes(in_experts, ranks)
        self.largest_stack = max((p.numel() // ranks for p in in_experts), default=0)
        self.whole_trained = num_elements(p for p in parameters if p.requires_grad)
        self.micro_batches = job.batches(layout).accumulation
        self.keeps_gradients_whole = (
            self.sharded and job.options.unsharded_gradients and self.micro_batches > 1
        )
        # On a GPU the backward pass runs in a separate thread. There, the autocast of a recomputed
        # block is the outermost one, and its end clears all copies.
        recomputes = job.options.activation_checkpointing != "none"
        recomputes_on_gpu = recomputes and job.options.device != "cpu"
        self.casts_are_held = (
            layout.is_replicated
            and self.micro_batches > 1
            and job.options.mixed_precision != "no"
            and not recomputes_on_gpu
        )
        self.flight = in_flight(
            job.options.pipeline_schedule,
            stage=stage,
            stages=layout.pipeline,
            micro_batches=self.micro_batches,
            virtual=job.options.virtual_stages,
        )

    def moments(self) -> list[Memory]:
        """Return the memory at each moment that may be the peak."""
        trace, param_counts = self.trace, self.param_counts
        block_gradient = FP32 * num_elements(p for p in self.block if p.requires_grad)
        fresh_gradient = block_gradient - FP32 * (self.experts.elements - self.experts.local)
        head_gradient = FP32 * num_elements(p for p in param_counts.head if p.requires_grad)
        head_gradient *= self.is_last
        backward_extra = max(0, trace.block_backward_extra - block_gradient)
        loss_activations = trace.loss_left - trace.loss_kept if self.is_last else trace.hidden

        freed_casts = trace.block_casts - trace.casts_left
        if self.casts_are_gathered or self.casts_are_held:
            freed_casts = 0
        after_forward = self.flight * self._activation_bytes(self.layers)
        in_last_layer = after_forward - self.flight * self.layers * freed_casts
        in_first_layer = (
            in_last_layer
            - self._activation_bytes(self.layers)
            + self._activation_bytes(1)
            + (self.layers - 1) * freed_casts
        )
        head_cast = 0
        if self.casts_are_held:
            if not self.job.compiled:  # else each block makes its copies itself
                in_first_layer += (self.layers - 1) * trace.block_casts
            head_cast = HALF * num_elements(param_counts.head)  # the loss counts it itself

        moments = [
            self._memory_at(
                "backward of its last layer",
                in_last_layer + loss_activations + backward_extra + head_cast,
                fresh=head_gradient + fresh_gradient,
            ),
            self._memory_at(
                "backward of its first layer",
                in_first_layer + backward_extra + head_cast,
                done=True,
            ),
            self._memory_at("optimizer's step", 0, done=True, stepping=True),
            self._memory_at(
                "forward of its last layer",
                after_forward + trace.block_forward_extra + head_cast,
                with_head=True,
            ),
        ]
        if self.has_own_ends and self.sharded:
            # The gradient, the message and the result of a reduce-scatter; gloo copies the message.
            copies = 2 + 1 / self.ranks + (self.job.options.device == "cpu")
            moments.append(
                self._memory_at(
                    "reduction of the head's gradient",
                    in_last_layer + loss_activations,
                    fresh=int(copies * head_gradient),
                    with_head=True,
                )
            )
        if self.is_last:
            moments.append(
                self._memory_at(
                    "loss",
                    after_forward,
                    fresh=head_gradient,
                    logits=max(0, trace.loss_extra - head_gradient),
                    with_head=True,
                )
            )
        return moments

    def _activation_bytes(self, layers: int) -> float:
        """Return the activations of one micro-batch at the end of its forward pass.

        If weights are gathered in half precision, autocast caches no copies of them, except of a
        rank's experts, which are not gathered.
        """
        trace, experts = self.trace, self.experts
        casts = trace.block_casts if self.casts_are_gathered else 0
        start = trace.inputs if self.stage == 0 else trace.hidden
        if not experts.elements:
            return start + layers * (trace.block - casts)
        recomputes = self.job.options.activation_checkpointing != "none"
        if casts == 0 < trace.block_casts:  # of all experts
            casts = min(trace.block_casts, HALF * experts.elements)
        in_experts = experts.casts + experts.activations
        return start + layers * (trace.block - casts) + in_experts * (1 if recomputes else layers)

    def _memory_at(
        self,
        name: str,
        activations: float,
        *,
        fresh: int = 0,
        logits: int | None = None,
        done: bool = False,
        stepping: bool = False,
        with_head: bool = False,
    ) -> Memory:
        """Return the memory at a moment.

        Args:
            name: Name of the moment.
            activations: Bytes.
            fresh: Bytes of this micro-batch's gradients that are not reduced yet.
            logits: Bytes; by default the bytes that stay from step to step.
            done: Whether all gradients exist, even without accumulation or buckets.
            stepping: Whether the moment is in the optimizer's step.
            with_head: Whether the output head is gathered, even without accumulation.
        """
        optimizer, trained = self.job.optimizer, self.trained
        accumulates = self.micro_batches > 1
        # DistributedDataParallel allocates buckets for all gradients at the start.
        buckets = self.layout.is_replicated and self.layout.world_size > 1
        gradients = FP32 * trained if done or accumulates or buckets else 0
        if self.keeps_gradients_whole and not stepping:
            gradients = FP32 * self.whole_trained
        buffers = self.param_counts.buffers + (0 if self.job.options.device == "cpu" else CONTEXT)
        if self.sharded:
            ranks = self.layout.shard * self.layout.context * self.layout.tensor
            if stepping and optimizer.traffic is not None and ranks > 1:
                buffers += self._matrix_bytes(optimizer.traffic)
            buffers += fresh
            if not stepping:
                buffers += self._gathered_bytes(backward=fresh > 0 or done, with_head=with_head)
        else:
            gradients += fresh
            if accumulates and self.layout.world_size > 1:
                # Gradients accumulate outside the buckets, which the last micro-batch fills.
                buffers += FP32 * trained
        return Memory(
            moment=name,
            stage=self.stage,
            parameters=self.local,
            weights=FP32 * self.local,
            gradients=gradients,
            optimizer=int(optimizer.per_element * trained),
            extra={
                kind: self._extra_bytes(state, stepping=stepping)
                for kind, state in optimizer.extra.items()
            },
            activations=int(activations),
            logits=(self.trace.loss_kept if self.is_last else 0) if logits is None else logits,
            buffers=buffers,
        )

    def _matrix_bytes(self, traffic: MatrixTraffic) -> int:
        """Return the temporary bytes of an update of whole matrices.

        These are buckets of gradients and of updates: one is computed while two are sent. Experts
        that are not sent are updated one stack after another.
        """
        if traffic.with_experts:
            return 6 * FP32 * min(traffic.bucket, self.local)
        bucket = min(traffic.bucket, self.local - self.local_experts)
        return 6 * FP32 * max(bucket, self.largest_stack)

    def _extra_bytes(self, state: StateMemory, *, stepping: bool) -> int:
        """Return the bytes of a further state; only the owner of a sharded layer has its part."""
        layout = self.layout
        passing = state.stepping if stepping else state.recording
        if layout.is_replicated:
            return state.replicated + passing
        share = self.layers / len(self.param_counts.blocks)
        owners = layout.shard * layout.context
        return int(share * (state.divided / owners + passing))

    def _gathered_bytes(self, *, backward: bool, with_head: bool) -> int:
        """Return the bytes of gathered weights (this layer and the next) and of reduced gradients.

        Weights outside of blocks stay gathered from the forward to the end of the backward pass.
        Embedding and head are freed after their use in the last micro-batch if they have separate
        groups.
        """
        block = num_elements(self.block) - self.experts.elements
        other_weights, size = self.other_weights, 0
        if self.has_own_ends:
            ends = self.param_counts.embedding | self.param_counts.head
            other_weights = [p for p in other_weights if p not in ends]
            if self.micro_batches > 1:
                size += FP32 * num_elements(self.param_counts.embedding)
            if self.micro_batches > 1 or with_head:
                size += self.head_width * num_elements(self.param_counts.head)
        size += FP32 * num_elements(other_weights)
        return size + 2 * self.block_width * block + (FP32 * block if backward else 0)
