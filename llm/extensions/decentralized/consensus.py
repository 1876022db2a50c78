"""The mean of all replicas' weights, which is evaluated, saved and exported."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llm.parallel.flat_buffers import FlatBuffer, group_for_flat_buffers


class Consensus:
    """Weights that differ between replicas, and their mean.

    Attributes:
        distance: RMS distance of the replicas from their mean, divided by the norm of the mean; a
            float64 scalar (float32 on MPS) from the last computation, None before the first.

    Args:
        tensors: The weights that this rank holds, in the same order on all ranks.
        world_size: Number of ranks.
        shards_per_replica: Number of consecutive ranks that share one replica's weights.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, world_size: int, shards_per_replica: int = 1
    ) -> None:
        self._tensors = list(tensors)
        self._world_size = world_size
        is_on_mps = any(tensor.device.type == "mps" for tensor in self._tensors)
        self._dtype = torch.float32 if is_on_mps else torch.float64
        self._num_replicas = world_size // shards_per_replica
        self._shard_group = None  # the default group
        if shards_per_replica > 1:
            ranks_by_shard = [
                list(range(shard_index, world_size, shards_per_replica))
                for shard_index in range(shards_per_replica)
            ]
            self._shard_group, _ = dist.new_subgroups_by_enumeration(ranks_by_shard)
        self.distance: Tensor | None = None

    def mean(self) -> list[Tensor]:
        """Return the mean over all replicas, in new tensors; every rank must call it."""
        means = [tensor.detach().clone() for tensor in self._tensors]
        if self._world_size > 1:
            self._average_tensors(means, self._tensors)
        return means

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Overwrite the weights with the mean, and restore them afterwards."""
        if self._world_size == 1:
            yield
            return
        weights = [tensor.detach().clone() for tensor in self._tensors]
        self._average_tensors(self._tensors, weights)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._tensors, weights)

    @torch.no_grad()
    def _average_tensors(self, tensors: Sequence[Tensor], local_weights: Sequence[Tensor]) -> None:
        """Overwrite tensors with their mean over all replicas, and set `distance`.

        Apart from these two copies of the weights, one flat buffer is in memory at a time.

        Args:
            tensors: This replica's weights.
            local_weights: Another copy of them, which does not change.
        """
        for group in group_for_flat_buffers(tensors):
            self._average_group(group)
        squares = torch.zeros(2, dtype=self._dtype, device=tensors[0].device)
        for weight, mean in zip(local_weights, tensors, strict=True):
            squares[0] += (weight - mean).to(self._dtype).square().sum()
            squares[1] += mean.to(self._dtype).square().sum()
        dist.all_reduce(squares)
        self.distance = (squares[0] / squares[1]).sqrt()

    def _average_group(self, group: Sequence[Tensor]) -> None:
        buffer = FlatBuffer(group)  # freed before the next one is made
        buffer.pack()
        # A sum in half precision would round away the differences between replicas.
        buffer_sum = buffer.flat.float() if buffer.flat.itemsize < 4 else buffer.flat
        dist.all_reduce(buffer_sum, group=self._shard_group)
        buffer.flat.copy_(buffer_sum.div_(self._num_replicas))
        buffer.unpack()


@torch.no_grad()
def load_replica_mean(
    tensors: Mapping[str, Tensor],
    read_replica: Callable[[int, Mapping[str, Tensor]], None],
    *,
    num_replicas: int,
) -> None:
    """Overwrite tensors with the mean of several saved replicas.

    The sum is float64 on the host and rounded once, so that saving and loading keep the mean.

    Args:
        tensors: Tensors to overwrite, by name.
        read_replica: Overwrites host tensors, by name, with a saved replica's; takes its number.
        num_replicas: Number of replicas saved.
    """
    replica_tensors = {
        name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()
    }
    sums = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in replica_tensors.items()}
    for replica_index in range(num_replicas):
        read_replica(replica_index, replica_tensors)
        for name, tensor in replica_tensors.items():
            sums[name] += tensor
    for name, tensor in tensors.items():
        tensor.copy_(sums[name].div_(num_replicas))
