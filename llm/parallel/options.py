"""Options of the layout: precision, and how ranks divide a model."""

from dataclasses import dataclass
from typing import Literal

from llm.config.options import option

SPEED = "Speed and memory"
PARALLELISM = "Parallelism"


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """In which precision a step is computed."""

    mixed_precision: Literal["no", "fp8", "fp16", "bf16"] = option(
        "no",
        "Arithmetic of forward and backward; weights stay float32.",
        group=SPEED,
        resume="fixed",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How ranks divide one model."""

    data_parallel_shard_size: int = option(
        1,
        "Ranks that each hold a part of every weight, gradient and moment; what the sizes leave "
        "over holds copies.",
        group=PARALLELISM,
        resume="logged",
        at_least=1,
    )
    tensor_parallel_size: int = option(
        1,
        "Ranks that compute every layer together, each some of its heads and columns; keep them on "
        "one node.",
        group=PARALLELISM,
        resume="logged",
        at_least=1,
    )
    context_parallel_size: int = option(
        1,
        "Ranks that each hold a part of every sample; block_size is a multiple of twice as many.",
        group=PARALLELISM,
        resume="logged",
        at_least=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "Ranks that each hold some of the layers; the micro-batches of a step run through them "
        "one behind the other, so gradient_accumulation_steps should be several times as many.",
        group=PARALLELISM,
        resume="logged",
        at_least=1,
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = option(
        "1f1b",
        "In which order a stage takes the passes of a step: all forward passes first (gpipe), one "
        "forward and one backward in turn, which keeps fewer activations (1f1b), or so with "
        "several stages on each rank, which idle less (interleaved-1f1b).",
        group=PARALLELISM,
    )
    virtual_stages: int = option(
        1,
        "Stages of each rank, for interleaved-1f1b.",
        group=PARALLELISM,
        requires=("pipeline_parallel_size",),
        at_least=1,
    )


def parallel_problems(options: ParallelOptions) -> list[str]:
    """What cannot work about the division of a model, a sentence each."""
    problems = []
    interleaved = options.pipeline_schedule == "interleaved-1f1b"
    if interleaved != (options.virtual_stages > 1):
        problems.append(
            "--pipeline_schedule interleaved-1f1b and --virtual_stages of 2 or more go together; "
            "give both or neither."
        )
    if options.pipeline_parallel_size > 1 and options.context_parallel_size > 1:
        problems.append(
            "--context_parallel_size does not go with --pipeline_parallel_size; leave one of them "
            "out."
        )
    return problems
