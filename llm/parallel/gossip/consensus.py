"""The mean of all ranks' weights, which is what is evaluated and exported."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llm.parallel.gossip.buckets import BUCKET_BYTES, make_buckets


class Consensus:
    """Weights of which each rank has its own, and their mean.

    Attributes:
        distance: How far ranks were from the mean when it was last taken: the root of the mean
            squared norm of the difference, divided by the norm of the mean; a float64 scalar.

    Args:
        tensors: The weights, in an order that is the same on all ranks.
        world_size: Number of ranks.
        parts: How many ranks in a row hold different parts of one replica's weights.
        bucket_bytes: About how much a message holds.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        world_size: int,
        parts: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._tensors = list(tensors)
        self._world_size = world_size
        self._bucket_bytes = bucket_bytes
        on_mps = any(tensor.device.type == "mps" for tensor in self._tensors)
        self._dtype = torch.float32 if on_mps else torch.float64
        self._replicas = world_size // parts
        self._group = dist.new_group() if world_size > 1 else None
        self._holders = self._group  # of the same part
        if parts > 1:
            groups = [list(range(part, world_size, parts)) for part in range(parts)]
            self._holders, _ = dist.new_subgroups_by_enumeration(groups)
        self.distance: Tensor | None = None

    @torch.no_grad()
    def mean(self) -> list[Tensor]:
        """The mean over all ranks, in new tensors; every rank must call it."""
        means = [tensor.detach().clone() for tensor in self._tensors]
        if self._world_size == 1:
            return means
        for bucket in make_buckets(means, bucket_bytes=self._bucket_bytes):
            bucket.fill()
            # Sums of half precision would lose what tells the ranks apart.
            total = bucket.flat.float() if bucket.flat.itemsize < 4 else bucket.flat
            dist.all_reduce(total, group=self._holders)
            bucket.flat.copy_(total.div_(self._replicas))
            bucket.empty()
        self._measure(means)
        return means

    def _measure(self, means: list[Tensor]) -> None:
        squares = torch.zeros(2, dtype=self._dtype, device=means[0].device)
        for tensor, mean in zip(self._tensors, means, strict=True):
            squares[0] += (tensor - mean).to(self._dtype).square().sum()
            squares[1] += mean.to(self._dtype).square().sum()
        dist.all_reduce(squares, group=self._group)
        self.distance = (squares[0] / squares[1]).sqrt()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean in the place of the weights, and the weights back afterwards."""
        if self._world_size == 1:
            yield
            return
        own = [tensor.detach().clone() for tensor in self._tensors]
        means = self.mean()
        self._put(means)
        del means
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._tensors, values)


@torch.no_grad()
def read_mean(
    tensors: Mapping[str, Tensor],
    read: Callable[[int, Mapping[str, Tensor]], None],
    *,
    replicas: int,
) -> None:
    """Overwrite tensors with the mean of what several replicas have saved.

    It is summed in float64 on the host and rounded once: the mean stays what it was.

    Args:
        tensors: What to overwrite, by name.
        read: Called with the number of a replica and tensors on the host by name, which it
            overwrites with those that the replica has saved.
        replicas: How many have saved.
    """
    saved = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
    sums = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in saved.items()}
    for replica in range(replicas):
        read(replica, saved)
        for name, tensor in saved.items():
            sums[name] += tensor
    for name, tensor in tensors.items():
        tensor.copy_(sums[name].div_(replicas))
