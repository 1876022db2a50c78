"""Options of the layout: precision, sharding of one model, and decentralized training."""

import itertools
from typing import Literal

from llm.config.options import fields, option, option_group

PARALLELISM = "Parallelism"

Topology = Literal["complete", "exp", "ring", "alternating-exp-ring"]


@option_group("Speed and memory", resume="logged")
class PrecisionOptions:
    """The precision of forward and backward."""

    mixed_precision: Literal["no", "fp8", "fp16", "bf16"] | None = option(
        None,
        "Precision of forward and backward; weights stay float32. By default bf16 on CUDA GPUs "
        "that support it, else no.",
        resume="fixed",
    )
    deterministic: bool = option(
        False,
        "Use only deterministic kernels, so that runs are bit-identical on GPUs too; slower.",
    )
    tf32: bool | None = option(
        None,
        "Let float32 matrix products round their inputs to TF32. On by default on CUDA GPUs; no "
        "effect elsewhere.",
    )
    all_reduce_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        "Precision of gradients in messages between ranks that hold whole weights. bf16 halves the "
        "traffic, but rounds gradients and partial sums.",
    )


@option_group(PARALLELISM, resume="logged")
class ParallelOptions:
    """How ranks divide one model."""

    data_parallel_shard_size: int = option(
        1,
        "Number of ranks that share every weight, gradient and moment; the remaining ranks hold "
        "copies.",
        at_least=1,
    )
    unsharded_gradients: bool = option(
        False,
        "Reduce-scatter the gradients of sharded weights once per step, not once per micro-batch; "
        "until then each rank holds 4 bytes for every weight of the model.",
        requires=("data_parallel_shard_size",),
    )
    tensor_parallel_size: int = option(
        1,
        "Number of ranks that share the heads and columns of every layer; keep them on one node.",
        at_least=1,
    )
    context_parallel_size: int = option(
        1,
        "Number of ranks that share every sample; block_size must be a multiple of twice this "
        "number.",
        at_least=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "Number of ranks that share the layers; micro-batches are pipelined, so "
        "gradient_accumulation_steps should be several times larger.",
        at_least=1,
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = option(
        "1f1b",
        "Order of the passes of a stage: all forward passes first (gpipe); one forward and one "
        "backward in turn, which keeps fewer activations (1f1b); or the same with several stages "
        "per rank, which idle less (interleaved-1f1b).",
        resume="free",
    )
    virtual_stages: int = option(
        1,
        "Stages per rank, for interleaved-1f1b.",
        requires=("pipeline_parallel_size",),
        at_least=1,
        resume="free",
    )


@option_group("Decentralized training", resume="fixed")
class DecentralizedOptions:
    """Replicas that average their weights, by gossip or DiLoCo."""

    data_parallel: Literal["allreduce", "gossip", "diloco"] = option(
        "allreduce",
        "How ranks train one model: with the mean gradient of all ranks (allreduce); or with "
        "separate weights, averaged with a few ranks in each step (gossip) or with all ranks "
        "every inner_steps steps (diloco).",
    )
    topology: Topology = option(
        "ring",
        "Ranks that average in each step of gossip; `python -m llm.parallel.topology` shows them.",
        requires=("data_parallel=gossip",),
    )
    gossip_order: Literal["overlap", "blocking"] = option(
        "overlap",
        "Whether weights are exchanged while the next gradient is computed, or each step waits for "
        "them.",
        requires=("data_parallel=gossip",),
    )
    gossip_group: Literal["world", "nodes"] = option(
        "world",
        "Replicas of gossip: each rank, or each node, if its ranks share their gradients.",
        requires=("data_parallel=gossip",),
    )
    inner_steps: int = option(
        500,
        "Steps that ranks train alone between two common steps of diloco.",
        requires=("data_parallel=diloco",),
        at_least=1,
    )
    outer_learning_rate: float = option(
        0.7, "Learning rate of diloco's common step.", requires=("data_parallel=diloco",), above=0
    )
    outer_momentum: float = option(
        0.9,
        "Nesterov momentum of diloco's common step.",
        requires=("data_parallel=diloco",),
        at_least=0,
        below=1,
    )

    @property
    def several_models(self) -> str | None:
        """The option that gives ranks separate weights; None if they train one model."""
        mode = self.data_parallel
        return None if mode == "allreduce" else f"--data_parallel {mode}"


def parallel_problems(options: ParallelOptions) -> list[str]:
    """Return a sentence for each combination of these options that cannot work."""
    problems = []
    interleaved = options.pipeline_schedule == "interleaved-1f1b"
    if interleaved != (options.virtual_stages > 1):
        problems.append(
            "--pipeline_schedule interleaved-1f1b and --virtual_stages of 2 or more go together; "
            "give both or neither."
        )
    if options.unsharded_gradients and options.pipeline_parallel_size > 1:
        problems.append(
            "--unsharded_gradients changes nothing with --pipeline_parallel_size, because "
            "gradients are then reduce-scattered once per step already; leave it out."
        )
    problems += [
        f"--{one} does not go with --{other}; leave one of them out."
        for one, other in itertools.combinations(sizes_above_one(options), 2)
        if not any({one, other} <= together for together in _TOGETHER)
    ]
    return problems


_TOGETHER = (
    {"data_parallel_shard_size", "tensor_parallel_size", "pipeline_parallel_size"},
    {"data_parallel_shard_size", "tensor_parallel_size", "context_parallel_size"},
)
"""Options that can be combined to divide one model."""


def sizes_above_one(options: ParallelOptions) -> list[str]:
    """Return the names of the options that divide one model over several ranks."""
    return [
        field.name
        for field in fields(type(options))
        if field.option.group == PARALLELISM
        and field.name.endswith("_size")
        and getattr(options, field.name) > 1
    ]
