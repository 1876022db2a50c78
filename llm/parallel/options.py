"""Options of the layout: precision, and the division of one model over ranks."""

import itertools
from typing import Literal

from llm.config.options import fields, option, option_group

PARALLELISM = "Parallelism"


@option_group("Speed and memory", resume="logged")
class PrecisionOptions:
    """The precision of forward and backward."""

    mixed_precision: Literal["no", "fp8", "fp16", "bf16"] | None = option(
        None,
        "Precision of forward and backward, not of weights: no, fp8, fp16 or bf16 (by default on "
        "CUDA GPUs that support it).",
        resume="fixed",
    )
    deterministic: bool = option(
        False,
        "Make runs on GPUs bit-identical, by deterministic kernels and without compiling.",
    )
    tf32: bool | None = option(
        None,
        "Round inputs of float32 matrix products to TF32; by default on CUDA GPUs.",
    )
    fp8_head: bool = option(
        False,
        "Multiply the output head in float8, with mixed_precision bf16 or fp8.",
    )
    all_reduce_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        "Precision of gradients between ranks that hold whole weights: fp32 or bf16.",
    )


@option_group(PARALLELISM, resume="logged")
class ParallelOptions:
    """How ranks divide one model."""

    data_parallel_shard_size: int = option(
        1,
        "Ranks that share every weight, gradient and moment.",
        at_least=1,
    )
    unsharded_gradients: bool = option(
        False,
        "Reduce-scatter gradients once per step, not per micro-batch, for 4 bytes per weight on "
        "each rank.",
        requires=("data_parallel_shard_size",),
    )
    fp8_all_gather: bool = option(
        False,
        "Gather weights of float8 layers in float8, with mixed_precision fp8.",
        requires=("data_parallel_shard_size",),
    )
    tensor_parallel_size: int = option(
        1,
        "Ranks that share the heads and columns of every layer; keep them on one node.",
        at_least=1,
    )
    sequence_parallel: bool = option(
        False,
        "Divide the tokens of the residual stream among tensor-parallel ranks; for gpt2, llama, "
        "mistral, qwen2 and qwen3.",
        requires=("tensor_parallel_size",),
    )
    context_parallel_size: int = option(
        1,
        "Ranks that share every sample; block_size is a multiple of twice this.",
        at_least=1,
    )
    expert_parallel_size: int = option(
        1,
        "Ranks that share every layer's experts; it divides data_parallel_shard_size, unless that "
        "is 1.",
        at_least=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "Ranks that share the layers; use several times more gradient_accumulation_steps.",
        at_least=1,
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = option(
        "1f1b",
        "Order of passes: gpipe, all forward passes first; 1f1b, in turn; or interleaved-1f1b, in "
        "turn with several stages per rank.",
        resume="free",
    )
    virtual_stages: int = option(
        1,
        "Stages per rank, for interleaved-1f1b.",
        requires=("pipeline_parallel_size",),
        at_least=1,
        resume="free",
    )


def find_parallel_problems(options: ParallelOptions) -> list[str]:
    """Return a sentence for each combination of these options that cannot work."""
    problems = []
    is_interleaved = options.pipeline_schedule == "interleaved-1f1b"
    if is_interleaved != (options.virtual_stages > 1):
        problems.append(
            "--pipeline_schedule interleaved-1f1b and --virtual_stages of 2 or more go together; "
            "give both or neither."
        )
    if options.unsharded_gradients and options.pipeline_parallel_size > 1:
        problems.append(
            "--unsharded_gradients changes nothing with --pipeline_parallel_size, because "
            "gradients are then reduce-scattered once per step already; leave it out."
        )
    expert_size, shard_size = options.expert_parallel_size, options.data_parallel_shard_size
    if shard_size > 1 and shard_size % expert_size:
        problems.append(
            f"--expert_parallel_size {expert_size} has to divide --data_parallel_shard_size "
            f"{shard_size}, because the ranks that share the weights divide the experts; with "
            f"{expert_size} for both, the remaining ranks hold copies."
        )
    if expert_size > 1 and options.unsharded_gradients:
        problems.append(
            "--unsharded_gradients does not go with --expert_parallel_size, because the gradients "
            "of experts stay divided; leave one of them out."
        )
    if options.sequence_parallel:
        problems += [
            f"--sequence_parallel does not go with --{name}; leave one of them out."
            for name in sizes_above_one(options)
            if name not in ("data_parallel_shard_size", "tensor_parallel_size")
        ]
    problems += [
        f"--{first_name} does not go with --{second_name}; leave one of them out."
        for first_name, second_name in itertools.combinations(sizes_above_one(options), 2)
        if not any({first_name, second_name} <= combination for combination in _COMBINABLE_SIZES)
    ]
    return problems


_COMBINABLE_SIZES = (
    {"data_parallel_shard_size", "tensor_parallel_size", "pipeline_parallel_size"},
    {"data_parallel_shard_size", "tensor_parallel_size", "context_parallel_size"},
    {"data_parallel_shard_size", "expert_parallel_size", "pipeline_parallel_size"},
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
