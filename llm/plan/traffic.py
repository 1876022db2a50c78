"""What a rank sends in one step, to ranks of its node and to other nodes."""

import dataclasses

from llm.parallel.layout import Layout
from llm.plan.census import FP32
from llm.plan.job import Job, Shares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes that one rank sends in one step for one purpose.

    Attributes:
        axis: The layout's axis.
        what: What is sent.
        in_node: Bytes to ranks of the same node.
        between_nodes: Bytes to other nodes: this rank's share of what leaves the node.
        overlapped: Whether it can be hidden behind arithmetic.
    """

    axis: str
    what: str
    in_node: float
    between_nodes: float
    overlapped: bool

    def seconds(self, job: Job) -> float:
        """Time on the slower of the two links."""
        device = job.device
        return max(self.in_node / device.node_link, self.between_nodes / device.network_link)


def transfers(job: Job, shares: Shares, layout: Layout) -> list[Transfer]:
    """What the rank that sends most sends in one step.

    Collectives are counted as rings, in which each of n ranks sends (n - 1) / n of the whole
    for a gather or a reduce-scatter and twice that for an all-reduce. Where a node holds several
    ranks of a ring, the ring leaves the node once, and they share that crossing.
    """
    census = shares.census(layout.tensor)
    trace = shares.trace(layout.tensor, layout.context)
    micro_batches = job.micro_batches(layout)
    layers = max(map(len, shares.layers_of_ranks(layout.pipeline)))
    half = job.mixed_precision != "no"
    width = 2 if half else FP32
    tokens = job.micro_batch_size * job.length // layout.context
    hidden = tokens * trace.width * width
    passes = 2 + int(job.gradient_checkpointing)
    found = []
    t, c, s, r = layout.tensor, layout.context, layout.shard, layout.replicate
    if t > 1:
        size = 2 * passes * layers * micro_batches * hidden * 2 * (t - 1) / t
        found.append(_ring(job, "tensor", "sums of hidden states", size, t, 1, inline=True))
    if c > 1:
        size = passes * layers * micro_batches * (c - 1) * tokens * trace.key_width * width
        found.append(_ring(job, "context", "keys and values", size, c, t, inline=True))
    block = sum(p.numel for p in census.blocks[0])
    others = sum(p.numel for p in census.others)
    n = s * c
    if n > 1:
        half_blocks = job.mixed_precision in ("bf16", "fp8")
        gathers = 2 * layers * block * (2 if half_blocks else FP32) + FP32 * others
        sums = FP32 * (layers * block + others)
        size = micro_batches * (gathers + sums) * (n - 1) / n
        found.append(_ring(job, "shard", "weights and gradients", size, n, t, inline=False))
    if r > 1:
        size = 2 * (r - 1) / r * FP32 * (layers * block + others) / n
        found.append(_ring(job, "replicate", "gradients", size, r, t * n, inline=False))
    if layout.pipeline > 1:
        parts = job.virtual_stages if job.schedule == "interleaved-1f1b" else 1
        size = 2 * micro_batches * parts * hidden * (FP32 / width)
        inside = t * n * r * 2 <= job.gpus_per_node
        found.append(
            Transfer(
                axis="pipeline",
                what="hidden states and their gradients",
                in_node=size if inside else 0.0,
                between_nodes=0.0 if inside else size,
                overlapped=False,
            )
        )
    return found


def _ring(
    job: Job, axis: str, what: str, size: float, ranks: int, stride: int, *, inline: bool
) -> Transfer:
    """A collective over `ranks` ranks that lie `stride` apart, in which a rank sends `size`."""
    on_node = max(1, min(ranks, job.gpus_per_node // stride))
    between = 0.0 if on_node == ranks else size / on_node
    return Transfer(
        axis=axis,
        what=what,
        in_node=size if on_node == ranks else size - between,
        between_nodes=between,
        overlapped=not inline,
    )
