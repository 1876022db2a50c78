"""The strategy of any layout, over the ranks of a test."""

import math
import os
from typing import Any

import torch

from llm.optim.optimizers import make_adamw
from llm.optim.options import OptimizerOptions
from llm.parallel.accelerator import make_accelerator
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.dims import ParallelDims
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.options import ParallelOptions, PrecisionOptions
from llm.parallel.pipeline.pipelined import PipelineStrategy


def cpu_accelerator(mixed_precision: str = "no", **options: Any) -> Any:
    precision = PrecisionOptions(mixed_precision=mixed_precision, **options)
    return make_accelerator(precision, device=torch.device("cpu"))


def dims_of(**sizes: int) -> ParallelDims:
    """The dims with these sizes, such as shard=2; the ranks that are left replicate."""
    ranks = int(os.environ["WORLD_SIZE"])
    return ParallelDims(replicate=ranks // math.prod(sizes.values()), **sizes)


def make_strategy(
    sizes: dict[str, int], mixed_precision: str = "no", **options: Any
) -> AcceleratedStrategy:
    """A strategy on the ranks that there are, without a model yet.

    Args:
        sizes: As for `dims_of`.
        mixed_precision: Of `PrecisionOptions`.
        options: Of `ParallelOptions`, for a pipeline or shards.
    """
    accelerator, dims = cpu_accelerator(mixed_precision), dims_of(**sizes)
    if dims.pipeline > 1:
        return PipelineStrategy(ParallelOptions(**options), accelerator, dims)
    if dims.world_size > 1:
        return ShardedStrategy(ParallelOptions(**options), accelerator, dims)
    return AcceleratedStrategy(accelerator)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW for comparisons of layouts: eps is above the rounding errors of their gradients."""
    options = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-4)
    return make_adamw(options, model)
