"""Ownership of whole matrices under sharding: gradients go to owners, updates come back.

Muon, SOAP and K-FAC need whole matrices. Each matrix has one owner among the ranks with its shards,
and only the owner keeps its optimizer state. In a step the owner receives the shards of the
gradient, computes the update, and sends each rank its shard of the update. The collectives of one
bucket of matrices run while the owners compute another bucket.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llm.extensions.matrix_optim.matrix_owners import (
    ComputeUpdates,
    FactorRanks,
    MatrixOwners,
    Unit,
    Updates,
    batch_equal_units,
    compute_unit_updates,
    gradients_of,
    num_elements,
)

BUCKET = 1 << 24
"""Minimum elements of the gradients that an owner gets together, unless fewer are left."""

_SHARDING_AXES = ("tensor", "shard")
"""In the order of dividing a weight: FSDP shards the result of tensor parallelism."""


class ShardedMatrices(MatrixOwners):
    """One of the ranks with a unit's shards updates it; replicas do the same.

    Args:
        mesh: With the axes pipeline, replicate, shard and tensor.

    Attributes:
        size: Number of ranks that share the units of a stage.
        rank: Number of this rank among them.
        factor_ranks: Where K-FAC sums and keeps its factors.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        sizes = {axis: mesh[axis].size() for axis in (*_SHARDING_AXES, "replicate", "pipeline")}
        self._sizes = sizes
        self.size = sizes["shard"] * sizes["tensor"]
        self.rank = mesh.get_local_rank("shard") * sizes["tensor"] + mesh.get_local_rank("tensor")
        sharding_axes = [axis for axis in ("shard", "tensor") if sizes[axis] > 1]
        self._group: dist.ProcessGroup | None = None
        if len(sharding_axes) == 2:
            self._group = mesh["shard", "tensor"]._flatten("matrices").get_group()
        elif sharding_axes:
            self._group = mesh.get_group(sharding_axes[0])
        self._pipeline = mesh.get_group("pipeline") if sizes["pipeline"] > 1 else None
        self.factor_ranks = FactorRanks(
            rank=self.rank,
            size=self.size,
            group=self._group,
            num_replicas=sizes["replicate"],
            replicas=mesh.get_group("replicate") if sizes["replicate"] > 1 else None,
            counts_failures=self.rank == 0 and mesh.get_local_rank("pipeline") == 0,
        )
        self._cost_by_rank = [0.0] * self.size
        self._dims_by_unit: dict[Unit, list[dict[str, int]]] = {}
        self._shard_by_parameter: Mapping[Tensor, nn.Parameter] = {}

    def assign(self, units: Sequence[Unit]) -> None:
        """Assign owners to new units: the costliest first, to the rank with the least work.

        A stack has none if its shards are whole matrices.
        """
        for unit in sorted(units, key=lambda unit: -unit.cost):
            dims = [_sharded_dims(parameter) for parameter in unit.parameters]
            self._dims_by_unit[unit] = dims
            has_whole_matrices = unit.is_divisible and all(dim == 0 for dim in dims[0].values())
            if has_whole_matrices:
                continue
            if unit.owner is None:
                least_loaded_rank = self._cost_by_rank.index(min(self._cost_by_rank))
                unit.owner = least_loaded_rank
            self._cost_by_rank[unit.owner] += unit.cost

    def owns(self, unit: Unit) -> bool:
        """Return whether this rank keeps the state of a unit, or of its shard of a stack."""
        return unit.owner in (None, self.rank)

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Replace the parameters of the model in all units by this rank's shards of them."""
        self._shard_by_parameter = local_of
        for unit in self._dims_by_unit:
            unit.parameters = [local_of[parameter] for parameter in unit.parameters]

    def local(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a parameter of the model."""
        return self._shard_by_parameter.get(parameter, parameter)

    def shard_of(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor with the shape of a parameter of the model."""
        return self._shard_of_rank(tensor, _sharded_dims(parameter), self.rank)

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this is the first of the ranks with the same shard of a parameter."""
        shard_index, tensor_index = divmod(self.rank, self._sizes["tensor"])
        dims = _sharded_dims(parameter)
        return ("shard" in dims or shard_index == 0) and ("tensor" in dims or tensor_index == 0)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the sum of values over the ranks that share the units of a stage."""
        return _sum_over_group(values, self._group)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of values over all ranks that hold different parameters or shards."""
        return _sum_over_group(self.sum_over_shards(values), self._pipeline)

    def compute_updates(
        self, units: Sequence[Unit], compute: ComputeUpdates, *, dtype: torch.dtype = torch.float32
    ) -> Iterator[Updates]:
        """Yield the units that have gradients, with this rank's shards of the updates."""
        if self._group is None:
            yield from super().compute_updates(units, compute, dtype=dtype)
            return
        undivided_units = [unit for unit in units if unit.owner is None and unit.weight.numel()]
        yield from super().compute_updates(undivided_units, compute, dtype=dtype)
        divided_units = [unit for unit in units if unit.owner is not None]
        buckets = _bucket_units([unit for unit in divided_units if unit.weight.grad is not None])
        if not buckets:
            return
        wait_for_gradients = self._gather_gradients(buckets[0])
        wait_for_updates: Callable[[], Updates] = list  # nothing was sent yet
        for bucket, next_bucket in itertools.pairwise([*buckets, []]):
            gradients = wait_for_gradients()
            # The next gradients and the last updates travel while this bucket is computed.
            wait_for_gradients = self._gather_gradients(next_bucket) if next_bucket else dict
            updates = dict[Unit, list[Tensor]]()
            for equal_units in batch_equal_units(list(gradients)):
                unit_gradients = [gradients.pop(unit) for unit in equal_units]
                updates |= compute_unit_updates(equal_units, unit_gradients, compute, dtype)
            wait_for_previous_updates = wait_for_updates
            wait_for_updates = self._scatter_updates(bucket, updates, dtype)
            yield wait_for_previous_updates()
            del wait_for_previous_updates  # and the memory that it received into
        yield wait_for_updates()

    def gather_matrices(
        self, units: Sequence[Unit], get_shards: Callable[[Unit], list[Tensor]]
    ) -> dict[Unit, list[Tensor]]:
        """Return whole tensors of the units that this rank owns; all ranks send their shards.

        Args:
            units: Units with owners; the same on all ranks, in the same order.
            get_shards: Returns this rank's shard of a tensor for each parameter of a unit.
        """
        if self._group is None:
            return {unit: get_shards(unit) for unit in units}
        tensors = dict[Unit, list[Tensor]]()
        for bucket in _bucket_units(units):
            tensors |= self._gather_shards(bucket, get_shards)()
        return tensors

    def scatter_matrices(
        self, units: Sequence[Unit], tensors: Mapping[Unit, list[Tensor]]
    ) -> Updates:
        """Return this rank's shards of whole tensors; undoes `gather_matrices`."""
        if self._group is None:
            return [(unit, tensors[unit]) for unit in units]
        dtype = units[0].weight.dtype
        return [
            shards
            for bucket in _bucket_units(units)
            for shards in self._scatter_updates(bucket, tensors, dtype)()
        ]

    def _gather_gradients(self, bucket: Sequence[Unit]) -> Callable[[], dict[Unit, list[Tensor]]]:
        """Send gradients to their owners; return a function that waits for this rank's units."""
        return self._gather_shards(bucket, lambda unit: gradients_of(unit.parameters) or [])

    def _gather_shards(
        self, bucket: Sequence[Unit], get_shards: Callable[[Unit], list[Tensor]]
    ) -> Callable[[], dict[Unit, list[Tensor]]]:
        """Send shards to the owners of units; return a function that waits for whole tensors."""
        shards_to_send: list[list[Tensor]] = [[] for _ in range(self.size)]
        for unit in bucket:
            assert unit.owner is not None
            shards_to_send[unit.owner] += get_shards(unit)
        owned_units = [unit for unit in bucket if self.owns(unit)]
        received_shapes = [self._shard_shapes(owned_units, rank) for rank in range(self.size)]
        device, dtype = bucket[0].weight.device, bucket[0].weight.dtype
        wait_for_shards = self._start_all_to_all(
            shards_to_send, received_shapes, dtype, bucket[0].weight
        )

        def wait_for_matrices() -> dict[Unit, list[Tensor]]:
            matrices = {
                unit: [torch.empty(shape, dtype=dtype, device=device) for shape in unit.shapes]
                for unit in owned_units
            }
            shards = [
                shard for rank in range(self.size) for shard in self._shards_of_rank(matrices, rank)
            ]
            values = [value for tensors in wait_for_shards() for value in tensors]
            if shards:
                torch._foreach_copy_(shards, values)
            return matrices

        return wait_for_matrices

    def _scatter_updates(
        self, bucket: Sequence[Unit], updates: Mapping[Unit, list[Tensor]], dtype: torch.dtype
    ) -> Callable[[], Updates]:
        """Send shards of updates from their owners; return a function that waits for them."""
        # They were computed in another order, and shapes do not tell two of them apart.
        owned_updates = {unit: updates[unit] for unit in bucket if unit in updates}
        shards_to_send = [self._shards_of_rank(owned_updates, rank) for rank in range(self.size)]
        units_by_owner = [
            [unit for unit in bucket if unit.owner == rank] for rank in range(self.size)
        ]
        received_shapes = [self._shard_shapes(units, self.rank) for units in units_by_owner]
        wait_for_shards = self._start_all_to_all(
            shards_to_send, received_shapes, dtype, bucket[0].weight
        )

        def wait_for_updates() -> Updates:
            updates_of_unit: dict[Unit, list[Tensor]] = {}
            for units, values in zip(units_by_owner, wait_for_shards(), strict=True):
                shards = iter(values)
                updates_of_unit |= {unit: [next(shards) for _ in unit.parameters] for unit in units}
            return [(unit, updates_of_unit[unit]) for unit in bucket]

        return wait_for_updates

    def _start_all_to_all(
        self,
        tensors_to_send: Sequence[Sequence[Tensor]],
        received_shapes: Sequence[Sequence[torch.Size]],
        dtype: torch.dtype,
        like: Tensor,
    ) -> Callable[[], list[list[Tensor]]]:
        """Send tensors to each rank; return a function that waits for the tensors from each.

        Args:
            tensors_to_send: Tensors by receiving rank.
            received_shapes: Shapes by sending rank.
            dtype: Type of the tensors that are sent.
            like: Defines the device and dtype of the results.
        """
        sent_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in tensors_to_send]
        received_sizes = [sum(shape.numel() for shape in shapes) for shapes in received_shapes]
        empty_tensor = torch.empty(0, dtype=dtype, device=like.device)  # `cat` needs a tensor
        sent_values = torch.cat(
            [
                empty_tensor,
                *(tensor.reshape(-1) for tensors in tensors_to_send for tensor in tensors),
            ]
        )
        received_values = torch.empty(sum(received_sizes), dtype=dtype, device=like.device)
        exchange = dist.all_to_all_single(
            received_values,
            sent_values,
            received_sizes,
            sent_sizes,
            group=self._group,
            async_op=True,
        )

        def wait_for_tensors() -> list[list[Tensor]]:
            exchange.wait()
            values_by_rank = zip(
                received_values.to(like.dtype).split(received_sizes), received_shapes, strict=True
            )
            return [_view_shapes(rank_values, shapes) for rank_values, shapes in values_by_rank]

        return wait_for_tensors

    def _shards_of_rank(self, matrices: Mapping[Unit, Sequence[Tensor]], rank: int) -> list[Tensor]:
        """Return views of a rank's shards of whole tensors."""
        return [
            self._shard_of_rank(tensor, dims, rank)
            for unit, tensors in matrices.items()
            for tensor, dims in zip(tensors, self._dims_by_unit[unit], strict=True)
        ]

    def _shard_shapes(self, units: Sequence[Unit], rank: int) -> list[torch.Size]:
        """Return the shapes of a rank's shards of some units."""
        matrices = {
            unit: [torch.empty(shape, device="meta") for shape in unit.shapes] for unit in units
        }
        return [shard.shape for shard in self._shards_of_rank(matrices, rank)]

    def _shard_of_rank(self, tensor: Tensor, dims: Mapping[str, int], rank: int) -> Tensor:
        """Return a view of a rank's shard, which is a chunk of a chunk."""
        shard_index, tensor_index = divmod(rank, self._sizes["tensor"])
        index_by_axis = {"shard": shard_index, "tensor": tensor_index}
        for axis in _SHARDING_AXES:
            if axis in dims:
                dim, length = dims[axis], tensor.shape[dims[axis]]
                chunk_length = math.ceil(length / self._sizes[axis])
                chunk_start = min(index_by_axis[axis] * chunk_length, length)
                tensor = tensor.narrow(dim, chunk_start, min(chunk_length, length - chunk_start))
        return tensor


def _view_shapes(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return consecutive views of a flat tensor in the given shapes."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _sharded_dims(parameter: Tensor) -> dict[str, int]:
    """Return the dimension along which each axis of the mesh shards a parameter."""
    if not isinstance(parameter, DTensor):
        return {}
    names = parameter.device_mesh.mesh_dim_names or ()
    pairs = zip(names, parameter.placements, strict=True)
    return {name: p.dim for name, p in pairs if not p.is_replicate()}  # type: ignore[attr-defined]


def _bucket_units(units: Sequence[Unit]) -> list[list[Unit]]:
    """Divide units, ordered by their shapes, into buckets that end when an owner is full.

    An owner is full with `BUCKET` elements. All owners have work in a bucket, and equal units are
    in the same bucket.
    """
    buckets, loads = list[list[Unit]](), Counter[int | None]()
    for unit in sorted(units, key=lambda unit: unit.shapes):
        if not buckets or loads[unit.owner] >= BUCKET:
            buckets.append([])
            loads.clear()
        buckets[-1].append(unit)
        loads[unit.owner] += num_elements(unit)
    return buckets


def _sum_over_group(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return values
    values = values.clone()
    dist.all_reduce(values, group=group)
    return values
