"""The sizes of each kind of parallelism, and each rank's position in them."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

from llm.errors import ConfigError
from llm.parallel.options import ParallelOptions

Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""From the outermost to the innermost axis, which has neighboring ranks and the most traffic."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Number of ranks along each axis; their product is the world size.

    Attributes:
        pipeline: Stages; each holds some of the layers.
        replicate: Groups of ranks that hold the same weights and train on different samples.
        shard: Ranks that train on different samples and each hold a shard of every weight.
        context: Ranks that each hold a shard of every sample.
        tensor: Ranks that each compute some heads and columns of every layer.
        expert: Ranks that each compute some experts of every layer. They are neighbors on the axis
            `shard`, or `replicate` if `shard` is 1, so this does not count in the product.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Number of slices that a global batch is divided into."""
        return self.replicate * self.shard

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds the whole model, as with DistributedDataParallel."""
        return self.replicate == self.world_size and self.expert == 1

    @property
    def shards_only_experts(self) -> bool:
        """Whether experts are the only weights that are divided within a stage."""
        return self.expert > 1 and self.shard == 1

    @property
    def mesh_sizes(self) -> tuple[int, int, int, int]:
        """Pipeline stages, replicas, ranks that hold different shards or experts, and tensor."""
        if self.shards_only_experts:
            return self.pipeline, self.replicate // self.expert, self.expert, self.tensor
        return self.pipeline, self.replicate, self.shard * self.context, self.tensor

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return a rank's position on each axis."""
        coordinate_by_axis: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, coordinate_by_axis[axis] = divmod(rank, getattr(self, axis))
        return coordinate_by_axis

    def data_rank(self, rank: int) -> int:
        """Return the index of the slice of a global batch that a rank computes."""
        coordinates = self.coordinates(rank)
        return coordinates["replicate"] * self.shard + coordinates["shard"]

    def rng_rank(self, rank: int) -> int:
        """Return a number that ranks share if and only if they process the same tokens."""
        return self.data_rank(rank) * self.context + self.coordinates(rank)["context"]

    def list_rank_groups(self, *axes: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ only on these axes; each rank is in one group."""
        ranks_by_coordinates: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in enumerate(itertools.product(*map(range, self.sizes))):
            fixed_coordinates = tuple(
                coordinate
                for axis, coordinate in zip(AXES, coordinates, strict=True)
                if axis not in axes
            )
            ranks_by_coordinates.setdefault(fixed_coordinates, []).append(rank)
        return list(ranks_by_coordinates.values())

    def list_expert_groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups of ranks that divide all experts, and that hold the same ones.

        The first are neighbors, because they send tokens to each other. The ranks of a group of
        the second kind share their experts' weights, as shards.
        """
        shard_groups = self.list_rank_groups("shard")
        exchange_groups = [
            ranks[first_index : first_index + self.expert]
            for ranks in shard_groups
            for first_index in range(0, self.shard, self.expert)
        ]
        sharing_groups = [
            ranks[expert_index :: self.expert]
            for ranks in shard_groups
            for expert_index in range(self.expert)
        ]
        return exchange_groups, sharing_groups

    def describe(self) -> str:
        """Return the axes of more than one rank, for the log."""
        sizes = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        experts = f" (experts {self.expert})" if self.expert > 1 else ""
        return (" x ".join(sizes) or "one rank") + experts


def make_parallel_dims(options: ParallelOptions, world_size: int) -> ParallelDims:
    """Return the dims of a run; remaining ranks become replicas.

    Raises:
        ConfigError: The sizes do not divide the number of ranks.
    """
    size_by_option = {
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "data_parallel_shard_size": options.data_parallel_shard_size,
        "context_parallel_size": options.context_parallel_size,
        "tensor_parallel_size": options.tensor_parallel_size,
    }
    ranks_per_replica = math.prod(size_by_option.values())
    if world_size % ranks_per_replica:
        product = " x ".join(f"--{name} {n}" for name, n in size_by_option.items() if n > 1)
        raise ConfigError(
            f"{product} is {ranks_per_replica} ranks, which do not divide the {world_size} that "
            f"there are; use a number of ranks that is a multiple of {ranks_per_replica}, or make "
            "a size smaller."
        )
    replicate, expert = world_size // ranks_per_replica, options.expert_parallel_size
    if options.data_parallel_shard_size == 1 and replicate % expert:
        raise ConfigError(
            f"--expert_parallel_size {expert} has to divide the number of ranks with different "
            f"samples, which is {replicate}; choose a divisor, or other sizes."
        )
    return ParallelDims(
        pipeline=options.pipeline_parallel_size,
        replicate=replicate,
        shard=options.data_parallel_shard_size,
        context=options.context_parallel_size,
        tensor=options.tensor_parallel_size,
        expert=expert,
    )
