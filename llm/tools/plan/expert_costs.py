"""What changes for a rank if tokens are sent to experts, instead of gathering their weights."""

import dataclasses

from llm.parallel.dims import ParallelDims
from llm.tools.plan.job import Job
from llm.tools.plan.rank_model import FP32, HALF, num_elements

FULLEST_LOAD = 1.5
"""Tokens of the fullest rank, relative to the mean; 1 is perfect balance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """The costs of expert parallelism in one layer and one micro-batch; 0 without it.

    Attributes:
        elements: Elements of the layer's experts, which are not gathered.
        local_elements: Elements of the experts that a rank computes.
        activations: Bytes that the fullest rank keeps in addition, for the tokens above the mean.
        casts: Bytes of a rank's experts in half precision, kept from a forward to a backward pass.
        gathered_elements: Elements of experts that a rank gathers for a layer's pass, from the
            ranks that share them; 0 if it has all of its experts.
        flops: FLOPs of the fullest rank in addition.
        message_bytes: Bytes that the fullest rank sends, to itself too.
    """

    elements: int = 0
    local_elements: int = 0
    activations: float = 0.0
    casts: int = 0
    gathered_elements: int = 0
    flops: float = 0.0
    message_bytes: float = 0.0


def expert_costs(job: Job, dims: ParallelDims) -> ExpertCosts:
    """Return the costs of expert parallelism in the first layer with experts.

    A row is a token at one of its experts. An all-to-all brings rows to the experts and another one
    brings them back, in the forward pass, in the backward pass, and in a recomputation. The
    backward pass needs the inputs and outputs of each product for a row.
    """
    if dims.expert == 1:
        return ExpertCosts()
    options, trace = job.options, job.trace(dims.tensor, dims.context)
    param_counts = job.param_counts(dims.tensor)
    block = param_counts.blocks[param_counts.typical_layer]
    expert_params = [p for p in block if p in param_counts.experts]
    stacks = [p for p in expert_params if p.ndim == 3]  # [experts, rows, columns]
    is_half = options.mixed_precision != "no"
    element_bytes = HALF if is_half else FP32
    num_products = 4 if options.activation_checkpointing == "full" else 3
    num_messages = 4 if options.activation_checkpointing == "none" else 6
    excess_rows = (FULLEST_LOAD - 1) * trace.expert_rows
    local_elements = num_elements(expert_params) // dims.expert
    # Ranks that share experts gather them in half precision already.
    is_gathered = dims.shard > dims.expert
    return ExpertCosts(
        elements=num_elements(expert_params),
        local_elements=local_elements,
        activations=excess_rows * element_bytes * sum(p.shape[1] + p.shape[2] for p in stacks),
        casts=HALF * local_elements if is_half and not is_gathered else 0,
        gathered_elements=local_elements if is_gathered else 0,
        flops=excess_rows * 2 * num_products * sum(p.numel() / len(p) for p in stacks),
        message_bytes=num_messages * FULLEST_LOAD * trace.expert_rows * trace.width * element_bytes,
    )
