"""How the ranks of a run are laid out: which ones share data, a layer's parts, a stage."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from llm.errors import ConfigError

Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
"""From the outermost to the innermost: neighbouring ranks, which lie on one node, talk most."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the ways to divide the work; their product is the number of ranks.

    Attributes:
        pipeline: Stages, each of which holds some of the layers.
        replicate: Groups of ranks that hold the same weights and train on different samples.
        shard: Ranks that train on different samples, and each hold a part of every weight.
        context: Ranks that each hold a part of every sample.
        tensor: Ranks that each compute a part of every layer.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """How many shares a global batch is divided into."""
        return self.replicate * self.shard

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds the whole model, as DistributedDataParallel has it."""
        return self.replicate == self.world_size

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where a rank stands on each axis."""
        where: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, where[axis] = divmod(rank, getattr(self, axis))
        return where

    def data_rank(self, rank: int) -> int:
        """Number of the share of a global batch that a rank works on."""
        where = self.coordinates(rank)
        return where["replicate"] * self.shard + where["shard"]

    def rng_rank(self, rank: int) -> int:
        """The same for ranks that compute one token's numbers together, and for no others."""
        return self.data_rank(rank) * self.context + self.coordinates(rank)["context"]

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The ranks that differ on these axes only, group by group; each rank is in one of them."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, where in enumerate(itertools.product(*map(range, self.sizes))):
            key = tuple(at for axis, at in zip(AXES, where, strict=True) if axis not in axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def describe(self) -> str:
        """The axes of more than one rank, for the log."""
        parts = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return " x ".join(parts) or "one rank"


def parallel_dims(
    world_size: int, *, pipeline: int = 1, shard: int = 1, context: int = 1, tensor: int = 1
) -> ParallelDims:
    """Lay out so many ranks; what the sizes leave over replicates.

    Raises:
        ConfigError: The sizes do not divide the number of ranks.
    """
    given = {
        "--pipeline_parallel_size": pipeline,
        "--data_parallel_shard_size": shard,
        "--context_parallel_size": context,
        "--tensor_parallel_size": tensor,
    }
    product = math.prod(given.values())
    if world_size % product:
        asked = " x ".join(f"{name} {size}" for name, size in given.items() if size > 1)
        raise ConfigError(
            f"{asked} is {product} ranks, which do not divide the {world_size} that there are; "
            f"take a multiple of {product}, or make a size smaller."
        )
    return ParallelDims(
        pipeline=pipeline,
        replicate=world_size // product,
        shard=shard,
        context=context,
        tensor=tensor,
    )
