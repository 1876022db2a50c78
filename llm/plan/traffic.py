"""What a rank sends in one step, to ranks of its node and to other nodes."""

import dataclasses

from llm.models.options import recomputation
from llm.parallel.dims import ParallelDims
from llm.plan.job import Job
from llm.plan.param_counts import FP32, num_elements


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
        in_node = self.in_node / (job.device.node_link * 1e9)
        return max(in_node, self.between_nodes / (job.device.network_link * 1e9))


def transfers(job: Job, layout: ParallelDims) -> list[Transfer]:
    """What the rank that sends most sends in one step.

    Collectives are counted as rings, in which each of n ranks sends (n - 1) / n of the whole
    for a gather or a reduce-scatter and twice that for an all-reduce. Where a node holds several
    ranks of a ring, the ring leaves the node once, and they share that crossing.
    """
    options, per_node = job.options, job.options.gpus_per_node
    param_counts, trace = job.param_counts(layout.tensor), job.trace(layout.tensor, layout.context)
    micro_batches = job.batches(layout).accumulation
    layers = max(map(len, job.layers_of_ranks(layout.pipeline)))
    block, others = num_elements(param_counts.blocks[0]), num_elements(param_counts.others)
    t, c, r, n = layout.tensor, layout.context, layout.replicate, layout.shard * layout.context
    width = FP32 if options.mixed_precision == "no" else 2
    tokens = options.per_device_train_batch_size * job.length // c
    hidden = tokens * trace.width * width
    passes = 2 + (recomputation(options) == "full")
    found = []
    if t > 1:
        size = 2 * passes * layers * micro_batches * hidden * 2 * (t - 1) / t
        found.append(_ring("tensor", "sums of hidden states", size, t, per_node))
    if c > 1:
        size = passes * layers * micro_batches * (c - 1) * tokens * trace.key_width * width
        found.append(_ring("context", "keys and values", size, c, per_node // t))
    if n > 1:
        gathered_width = 2 if options.mixed_precision in ("bf16", "fp8") else FP32
        gathers = 2 * layers * block * gathered_width + FP32 * others
        sums = FP32 * (layers * block + others)
        size = micro_batches * (gathers + sums) * (n - 1) / n
        found.append(_ring("shard", "weights and gradients", size, n, per_node // t))
    if r > 1:
        size = 2 * (r - 1) / r * FP32 * (layers * block + others) / n
        found.append(_ring("replicate", "gradients", size, r, per_node // (t * n)))
    if layout.pipeline > 1:
        size = 2 * micro_batches * options.virtual_stages * hidden * (FP32 / width)
        inside = t * n * r * 2 <= per_node
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


def _ring(axis: str, what: str, size: float, ranks: int, on_node: int) -> Transfer:
    """A collective in which a rank sends `size`, with room on a node for `on_node` of its ranks."""
    on_node = max(1, min(ranks, on_node))
    between = 0.0 if on_node == ranks else size / on_node
    return Transfer(
        axis=axis,
        what=what,
        in_node=size if on_node == ranks else size - between,
        between_nodes=between,
        overlapped=axis in ("shard", "replicate"),
    )
