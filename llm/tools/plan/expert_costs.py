"""What changes for a rank if tokens are sent to experts, instead of gathering their weights."""

import dataclasses

from llm.parallel.dims import ParallelDims
from llm.tools.plan.job import Job
from llm.tools.plan.rank_model import FP32, num_elements

LOAD = 1.5
"""Tokens of the fullest rank, relative to the mean; 1 is perfect balance."""

_HALF = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """The costs of expert parallelism in one layer and one micro-batch; 0 without it.

    Attributes:
        elements: Elements of the layer's experts, which are not gathered.
        local: Elements of a rank's experts.
        activations: Bytes that the fullest rank keeps in addition, for the tokens above the mean.
        casts: Bytes of a rank's experts in half precision.
        flops: FLOPs of the fullest rank in addition.
        message_bytes: Bytes that the fullest rank sends, to itself too.
    """

    elements: int = 0
    local: int = 0
    activations: float = 0.0
    casts: int = 0
    flops: float = 0.0
    message_bytes: float = 0.0


def expert_costs(job: Job, layout: ParallelDims) -> ExpertCosts:
    """Return the costs in the first layer, which stands for all.

    A row is a token at one of its experts. An all-to-all brings rows to the experts and another one
    brings them back, in the forward pass, in the backward pass, and in a recomputation. Kept for
    the backward pass are a row's inputs and outputs of each product.
    """
    if layout.expert == 1:
        return ExpertCosts()
    options, trace = job.options, job.trace(layout.tensor, layout.context)
    param_counts = job.param_counts(layout.tensor)
    experts = [p for p in param_counts.blocks[0] if p in param_counts.experts]
    stacks = [p for p in experts if p.ndim == 3]
    half = options.mixed_precision != "no"
    width = _HALF if half else FP32
    recomputes = options.activation_checkpointing != "none"
    products = 4 if options.activation_checkpointing == "full" else 3
    excess_rows = (LOAD - 1) * trace.expert_rows
    local = num_elements(experts) // layout.expert
    return ExpertCosts(
        elements=num_elements(experts),
        local=local,
        activations=excess_rows * width * sum(p.shape[1] + p.shape[2] for p in stacks),
        casts=_HALF * local * half,
        flops=excess_rows * 2 * products * sum(p.numel() / len(p) for p in stacks),
        message_bytes=(4 + 2 * recomputes) * LOAD * trace.expert_rows * trace.width * width,
    )
