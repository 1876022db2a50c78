"""The plan of one layout: memory, arithmetic, traffic, time."""

import dataclasses

from llm.parallel.dims import ParallelDims
from llm.parallel.pipeline.schedule import bubble_fraction
from llm.plan.job import Job
from llm.plan.memory import Memory, peak_memory
from llm.plan.param_counts import FP32
from llm.plan.traffic import Transfer, transfers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a layout takes; the names are those of the JSON.

    Attributes:
        layout: The layout.
        micro_batches: Of a step, on each rank.
        tokens_per_step: Over all ranks.
        memory: Of the fullest rank.
        fits: Whether that is in the device's memory.
        flops_per_step: Over all ranks, with recomputation if there is any.
        bubble: Share of a step in which stages of the pipeline wait.
        transfers: What a rank sends.
        floor_seconds: Of a step at the device's peak.
        step_seconds: Of a step at the efficiency that is expected.
        tokens_per_second: Over all ranks, at that efficiency.
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
    """Plan a layout.

    Raises:
        ConfigError: It does not divide layers, heads, samples or batch.
    """
    memory = peak_memory(job, layout)
    batches, trace = job.batches(layout), job.trace(layout.tensor, layout.context)
    sent = transfers(job, layout)
    bubble = bubble_fraction(
        ranks=layout.pipeline,
        virtual_stages=job.options.virtual_stages,
        micro_batches=batches.accumulation,
    )
    flops = [len(layers) * trace.block_flops for layers in job.layers_of_ranks(layout.pipeline)]
    flops[-1] += trace.loss_flops
    tokens = batches.global_batch_size * job.length

    device, fp32 = job.device, job.options.mixed_precision == "no"
    peak = (device.fp32_tflops if fp32 else device.tflops) * 1e12
    inline = sum(t.seconds(job) for t in sent if not t.overlapped)
    hidden = sum(t.seconds(job) for t in sent if t.overlapped)
    # The optimizer reads and writes weights and moments and reads gradients.
    stepping = 2 * memory.weights + 2 * memory.optimizer + FP32 * memory.parameters

    def seconds(efficiency: float) -> float:
        """What hides behind products counts only as far as it takes longer than they do."""
        working = max(flops) * batches.accumulation / (peak * efficiency) + inline
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
        transfers=sent,
        floor_seconds=seconds(1.0),
        step_seconds=step_seconds,
        tokens_per_second=tokens / step_seconds,
    )


def checkpoint_bytes(job: Job) -> int:
    """Of a checkpoint: weights and optimizer, and K-FAC's state once."""
    elements = job.param_counts(1).parameters
    return int(elements * (FP32 + job.optimizer.per_element)) + job.optimizer.kfac
