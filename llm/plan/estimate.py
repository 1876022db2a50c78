"""The plan of one layout: memory, arithmetic, traffic, time."""

import dataclasses

from llm.parallel.layout import Layout
from llm.parallel.schedules import idle_share
from llm.plan.census import FP32
from llm.plan.job import Job, Shares
from llm.plan.memory import Memory, peak_memory
from llm.plan.traffic import Transfer, transfers

DAY = 86400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a layout takes.

    Attributes:
        layout: The layout.
        micro_batches: Of a step, on each rank.
        samples: Of a step, over all ranks.
        tokens: Of a step, over all ranks.
        memory: Of the fullest rank.
        fits: Whether that is in the device's memory.
        flops: Of a step, over all ranks, with recomputation if there is any.
        bubble: Share of a step in which stages of the pipeline wait.
        transfers: What a rank sends.
        floor: Seconds of a step at the device's peak.
        seconds: Seconds of a step at the efficiency that is expected.
    """

    layout: Layout
    micro_batches: int
    samples: int
    tokens: int
    memory: Memory
    fits: bool
    flops: float
    bubble: float
    transfers: tuple[Transfer, ...]
    floor: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks, at the efficiency that is expected."""
        return self.tokens / self.seconds


def estimate(job: Job, shares: Shares, layout: Layout) -> Estimate:
    """Plan a layout.

    Raises:
        ConfigError: It does not divide layers, heads, samples or batch.
    """
    memory = peak_memory(job, shares, layout)
    micro_batches = job.micro_batches(layout)
    sent = transfers(job, shares, layout)
    idle = idle_share(
        ranks=layout.pipeline,
        virtual_stages=job.virtual_stages,
        micro_batches=micro_batches,
    )
    samples = job.samples(layout)
    return Estimate(
        layout=layout,
        micro_batches=micro_batches,
        samples=samples,
        tokens=samples * job.length,
        memory=memory,
        fits=memory.fits(job),
        flops=_flops(job, shares, layout),
        bubble=idle,
        transfers=tuple(sent),
        floor=_step_seconds(job, shares, layout, sent, memory, idle, efficiency=1.0),
        seconds=_step_seconds(job, shares, layout, sent, memory, idle, efficiency=job.efficiency),
    )


def _flops(job: Job, shares: Shares, layout: Layout) -> float:
    """Of a step over all ranks, each product counted once."""
    trace = shares.trace(layout.tensor, layout.context)
    num_layers = len(shares.census(layout.tensor).blocks)
    part = num_layers * sum(trace.block_flops) + trace.loss_flops
    sample = part * layout.tensor * layout.context
    return sample * job.micro_batches(layout) * layout.data_ranks


def _step_seconds(
    job: Job,
    shares: Shares,
    layout: Layout,
    sent: list[Transfer],
    memory: Memory,
    idle: float,
    *,
    efficiency: float,
) -> float:
    """Seconds of a step: products, what is sent among them, the bubble, the optimizer.

    What can be hidden behind products counts only as far as it takes longer than they do.
    """
    trace = shares.trace(layout.tensor, layout.context)
    ranks = shares.layers_of_ranks(layout.pipeline)
    loads = [len(layers) * sum(trace.block_flops) for layers in ranks]
    loads[-1] += trace.loss_flops
    peak = job.device.flops if job.mixed_precision != "no" else job.device.fp32_flops
    computing = max(loads) * job.micro_batches(layout) / (peak * efficiency)
    inline = sum(t.seconds(job) for t in sent if not t.overlapped)
    hidden = sum(t.seconds(job) for t in sent if t.overlapped)
    # The optimizer reads and writes weights and moments and reads gradients.
    stepping = (2 * memory.weights + 2 * memory.optimizer + FP32 * memory.parameters) / (
        job.device.bandwidth
    )
    return max((computing + inline) / (1 - idle), hidden) + stepping


def checkpoint_bytes(job: Job, shares: Shares) -> int:
    """Of a checkpoint: weights and optimizer, and K-FAC's state once."""
    parameters = shares.census(1).parameters
    return int(parameters * (FP32 + job.extra.per_element)) + job.extra.kfac
