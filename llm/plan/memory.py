"""Memory of one rank, by kind, at the fullest moment of a step."""

import dataclasses
from collections.abc import Sequence

from llm.parallel.layout import Layout
from llm.plan.census import FP32, Parameter, shard_sizes
from llm.plan.devices import GIB
from llm.plan.job import Job, Shares

KINDS = ("weights", "gradients", "optimizer", "kfac", "activations", "logits", "buffers")

CONTEXT = GIB
"""What a GPU's driver and the libraries for products and communication take beside tensors."""

USABLE = 0.95
"""Of a GPU's memory; the rest is lost between blocks of unlike size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank at one moment.

    Attributes:
        moment: When.
        stage: Stage of the pipeline, from 0.
        parameters: Elements of weights that the rank holds.
        weights: Weights.
        gradients: Gradients.
        optimizer: Moments of the optimizer.
        kfac: K-FAC's factors, bases, and what it takes while it steps.
        activations: What the backward pass needs, and what it takes for a while.
        logits: What the loss takes above that.
        buffers: Buffers of the model; gathered and half-precision copies of weights; what is on
            its way to other ranks; on a GPU the driver.
    """

    moment: str
    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    kfac: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, kind) for kind in KINDS)

    def fits(self, job: Job) -> bool:
        """Whether it fits into the device."""
        return self.total <= usable(job)


def usable(job: Job) -> int:
    """Bytes of the device that can be filled."""
    return job.device.memory if job.device.on_host else int(USABLE * job.device.memory)


def peak_memory(job: Job, shares: Shares, layout: Layout) -> Memory:
    """The rank and the moment that take most.

    Raises:
        ConfigError: The layout does not divide layers, heads, samples or batch.
    """
    found = []
    for stage in range(layout.pipeline):
        found += _Stage(job, shares, layout, stage).moments()
    return max(found, key=lambda memory: memory.total)


def in_flight(schedule: str, *, stage: int, stages: int, micro_batches: int, virtual: int) -> float:
    """Micro-batches whose activations a stage holds at most.

    GPipe holds all of them; 1F1B one for each stage from here to the end; interleaved 1F1B
    counts them in parts of its layers (Narayanan et al. 2021, section 2.2).
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "interleaved-1f1b" and stages > 1:
        parts = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        return min(parts, micro_batches * virtual) / virtual
    return min(micro_batches, stages - stage)


class _Stage:
    """One rank of one stage, through a step."""

    def __init__(self, job: Job, shares: Shares, layout: Layout, stage: int) -> None:
        self.job, self.layout = job, layout
        self.census = shares.census(layout.tensor)
        self.trace = shares.trace(layout.tensor, layout.context)
        numbers = shares.layers_of_ranks(layout.pipeline)[stage]
        self.stage, self.layers = stage, len(numbers)
        self.is_last = stage == layout.pipeline - 1
        self.ranks = layout.shard * layout.context
        self.sharded = not layout.is_replicated and (self.ranks > 1 or layout.replicate > 1)
        self.block = self.census.blocks[numbers[0]]
        self.others = self._others(stage == 0)
        blocks = shares.block_shards(layout.tensor, self.ranks)
        sizes = [*(blocks[number] for number in numbers), shard_sizes(self.others, self.ranks)]
        self.own, self.trained = (sum(column) for column in zip(*sizes, strict=True))
        self.micro_batches = job.micro_batches(layout)
        self.flight = in_flight(
            job.schedule,
            stage=stage,
            stages=layout.pipeline,
            micro_batches=self.micro_batches,
            virtual=job.virtual_stages,
        )

    def _others(self, is_first: bool) -> list[Parameter]:
        """Outside of blocks: the head is on the last stage, also where it is the embedding."""
        census, tied = self.census, len(self.census.untied_head) == 0
        head = [p for p in census.others if p.name in census.head]
        rest = [p for p in census.others if p.name not in census.head]
        if is_first and self.is_last:
            return list(census.others)
        if is_first:
            return [*rest, *(head if tied else [])]
        return head if self.is_last else []

    def moments(self) -> list[Memory]:
        """Memory at the moments that can be the fullest ones."""
        trace = self.trace
        head = _bytes([p for p in self.others if p.trained and p.name in self.census.head])
        head = head if self.is_last else 0
        block = _bytes([p for p in self.block if p.trained])
        working = max(0, trace.block_backward_extra - block)
        held = self.flight * self._kept(self.layers)
        gone = 0 if self._casts_are_gathered else trace.block_casts - trace.casts_left
        back = held - self.flight * self.layers * gone
        rest = back - self._kept(self.layers) + self._kept(1) + (self.layers - 1) * gone
        left = trace.loss_left - trace.loss_kept if self.is_last else trace.hidden
        moments = [
            self._moment("backward of its last layer", back + left + working, fresh=head + block),
            self._moment("backward of its first layer", rest + working, done=True),
            self._moment("optimizer's step", 0, done=True, stepping=True),
            self._moment("forward of its last layer", held + trace.block_forward_extra),
        ]
        if self.is_last:
            logits = max(0, trace.loss_extra - head)
            moments.append(self._moment("loss", held, fresh=head, logits=logits))
        return moments

    def _kept(self, layers: int) -> float:
        """Activations of one micro-batch at the end of its forward pass.

        Where weights are gathered in half precision, no copies of them are kept.
        """
        trace = self.trace
        casts = trace.block_casts if self._casts_are_gathered else 0
        start = trace.inputs if self.stage == 0 else trace.hidden
        return start + layers * (trace.block - casts)

    @property
    def _casts_are_gathered(self) -> bool:
        return self.sharded and self.job.mixed_precision in ("bf16", "fp8")

    def _moment(
        self,
        name: str,
        activations: float,
        *,
        fresh: int = 0,
        logits: int | None = None,
        done: bool = False,
        stepping: bool = False,
    ) -> Memory:
        """Memory at a moment.

        Args:
            name: When.
            activations: Bytes.
            fresh: Bytes of gradients that this micro-batch has just made, not divided yet.
            logits: Bytes; by default what of them stays from step to step.
            done: Whether gradients of all weights are there in any case.
            stepping: Whether nothing but the optimizer runs.
        """
        job, extra = self.job, self.job.extra
        own, trained = self.own, self.trained
        kept = done or self.micro_batches > 1 or (self.layout.is_replicated and not self._alone)
        gradients = FP32 * trained if kept else 0
        buffers = self.census.buffers + (0 if job.device.on_host else CONTEXT)
        if self.sharded:
            buffers += fresh
            buffers += 0 if stepping else self._gathered(backward=fresh > 0 or done)
        else:
            gradients += fresh
            if self.micro_batches > 1 and not self._alone:
                # Gradients of a step's first micro-batches lie beside DistributedDataParallel's
                # buckets, which the last one fills.
                buffers += FP32 * trained
        return Memory(
            moment=name,
            stage=self.stage,
            parameters=own,
            weights=FP32 * own,
            gradients=gradients,
            optimizer=int(extra.per_element * trained),
            kfac=extra.kfac + (extra.kfac_step if stepping else extra.kfac_recording),
            activations=int(activations),
            logits=(self.trace.loss_kept if self.is_last else 0) if logits is None else logits,
            buffers=buffers,
        )

    @property
    def _alone(self) -> bool:
        return self.layout.world_size == 1

    def _gathered(self, *, backward: bool) -> int:
        """Whole weights of the layer at work and the next, and gradients on their way.

        What is outside of blocks stays gathered from the forward to the end of the backward pass.
        """
        block = sum(p.numel for p in self.block)
        width = 2 if self._casts_are_gathered else FP32
        gathered = FP32 * sum(p.numel for p in self.others) + 2 * width * block
        return gathered + (FP32 * block if backward else 0)


def _bytes(parameters: Sequence[Parameter]) -> int:
    return FP32 * sum(p.numel for p in parameters)
