"""The training state of one rank in host memory, and the choice of tensors that it writes.

If several ranks hold a tensor, one of them writes it; a sharded tensor is written shard by shard,
each shard once.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_FILE_BYTES = 1 << 30  # a file is assembled in memory before it is written
_MIN_SHARE_BYTES = 64 << 20
"""Bytes that one rank writes before replicas of it share the work: a resume opens every file."""

_SLAB_BYTES = 1 << 30
_ALIGNMENT_BYTES = 64
_ASYNC_COPY_DEVICES = {"cuda"}  # device types that can copy while they compute

OwnerRanks = Callable[[str], Sequence[int]]
"""Maps the path of a tensor to the ranks that hold it, in order."""


class HostCopies:
    """Copies of tensors in host memory; a GPU may still be copying.

    Call `wait_on_device` before you change the tensors, and `wait_on_host` before you read the
    copies.

    Args:
        tensors: The copies, by path.
        sources: The tensors being copied, which stay alive until `wait_on_device`. Otherwise, if
            training replaces one during the copy, the allocator could reuse its memory.
        end_event: The event at the end of the copies; None if they are complete.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        sources: Sequence[torch.Tensor] = (),
        end_event: Any = None,
    ) -> None:
        self.tensors = tensors
        self._sources, self._end_event = sources, end_event

    def wait_on_device(self) -> None:
        """Make later operations on the device wait for the copies; the host does not wait."""
        if self._sources:
            self._end_event.wait()  # in the stream of the caller
            self._sources = ()

    def wait_on_host(self) -> None:
        """Wait until the copies are complete."""
        if self._end_event is not None:
            # A new thread would use the first GPU, and CUDA would create a context there.
            torch.get_device_module(self._end_event.device).set_device(self._end_event.device)
            self._end_event.synchronize()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A training state in host memory.

    Attributes:
        step: Optimizer steps done.
        copies: The tensors that this rank writes.
        file_index_by_path: For each tensor that this rank holds, the index (from 1) of its file on
            the rank that writes it.
        plain: The rest of the state, as JSON.
        metadata: Plain values for the manifest.
    """

    step: int
    copies: HostCopies
    file_index_by_path: dict[str, int]
    plain: str
    metadata: dict[str, Any]


def assign_writers(
    tensor_by_path: Mapping[str, torch.Tensor],
    *,
    rank: int,
    world_size: int,
    owner_ranks: OwnerRanks,
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Choose the tensors that this rank writes; every rank computes the same assignment.

    Args:
        tensor_by_path: All tensors that this rank holds, by path.
        rank: Rank of this process.
        world_size: Number of ranks.
        owner_ranks: Ranks that hold a tensor that is not sharded.

    Returns:
        The tensors of this rank; and for each path the index (from 1) of its file on the rank
        that writes it.
    """
    owners_by_path = {path: tuple(owner_ranks(path)) for path in tensor_by_path}
    # Tensors on the most ranks come first: tensors that fewer ranks know must not change their
    # writers. Then the largest, for an even load.
    paths = sorted(
        tensor_by_path,
        key=lambda path: (-len(owners_by_path[path]), -tensor_by_path[path].nbytes, path),
    )
    unsharded_tensors: dict[str, torch.Tensor] = {}
    sharded_tensors: dict[str, DTensor] = {}
    for path in paths:
        tensor = tensor_by_path[path]
        if not isinstance(tensor, DTensor):
            unsharded_tensors[path] = tensor
        elif tensor.numel():  # a sharded tensor without elements is not written
            sharded_tensors[path] = tensor
    local_tensors, file_index_by_path = _assign_unsharded_tensors(
        unsharded_tensors, owners_by_path, rank=rank, world_size=world_size
    )
    local_shards, shard_file_index_by_path = _assign_shards(sharded_tensors, owners_by_path)
    return local_tensors | local_shards, file_index_by_path | shard_file_index_by_path


def _assign_unsharded_tensors(
    tensors: Mapping[str, torch.Tensor],
    owners_by_path: Mapping[str, tuple[int, ...]],
    *,
    rank: int,
    world_size: int,
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Choose which tensors this rank writes, each as a whole.

    Args:
        tensors: The tensors that are not sharded, in the order in which writers are chosen.
        owners_by_path: Ranks that hold each tensor.
        rank: Rank of this process.
        world_size: Number of ranks.

    Returns:
        As for `assign_writers`.
    """
    bytes_by_owners: Counter[tuple[int, ...]] = Counter()
    for path, tensor in tensors.items():
        bytes_by_owners[owners_by_path[path]] += tensor.nbytes
    candidates_by_owners = {
        owners: _choose_writers(owners, num_bytes) for owners, num_bytes in bytes_by_owners.items()
    }
    bytes_by_rank = [0] * world_size
    file_allocators = [_FileAllocator() for _ in range(world_size)]
    local_tensors, file_index_by_path = {}, {}
    for path, tensor in tensors.items():
        candidate_ranks = candidates_by_owners[owners_by_path[path]]
        writer_rank = min(candidate_ranks, key=bytes_by_rank.__getitem__)
        file_index_by_path[path] = file_allocators[writer_rank].assign_file(tensor.nbytes)
        bytes_by_rank[writer_rank] += tensor.nbytes
        if writer_rank == rank:
            local_tensors[path] = tensor
    return local_tensors, file_index_by_path


def _assign_shards(
    tensors: Mapping[str, DTensor], owners_by_path: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Choose which of its shards this rank writes; replicas of a shard take turns.

    Args:
        tensors: The sharded tensors, in the order of writing.
        owners_by_path: Ranks that hold a shard of each tensor.

    Returns:
        As for `assign_writers`.
    """
    shard_bytes_by_path = {
        path: tensor.nbytes // _count_shards(tensor) for path, tensor in tensors.items()
    }
    bytes_by_owners: Counter[tuple[int, ...]] = Counter()
    for path, num_bytes in shard_bytes_by_path.items():
        bytes_by_owners[owners_by_path[path]] += num_bytes
    file_allocator = _FileAllocator()
    local_shards: dict[str, torch.Tensor] = {}
    file_index_by_path = {}
    for tensor_index, (path, tensor) in enumerate(tensors.items()):
        file_index_by_path[path] = file_allocator.assign_file(shard_bytes_by_path[path])
        max_writers = 1 + bytes_by_owners[owners_by_path[path]] // _MIN_SHARE_BYTES
        is_writer = _is_shard_writer(tensor, tensor_index, max_writers=max_writers)
        if tensor.to_local().numel() and is_writer:
            local_shards[path] = tensor
    return local_shards, file_index_by_path


def _choose_writers(ranks: Sequence[int], num_bytes: int) -> list[int]:
    """Return the ranks that share the writing of `num_bytes`, at equal distances over the nodes."""
    num_writers = min(len(ranks), 1 + num_bytes // _MIN_SHARE_BYTES)
    return [ranks[writer_index * len(ranks) // num_writers] for writer_index in range(num_writers)]


def _count_shards(tensor: DTensor) -> int:
    """Return the number of different shards of a tensor; replicas of a shard count once."""
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in axes if not placement.is_replicate())


class _FileAllocator:
    """Assigns the tensors of a rank to files of about `_FILE_BYTES`; file indices begin at 1."""

    def __init__(self) -> None:
        self._file_index = 1
        self._file_bytes = 0

    def assign_file(self, num_bytes: int) -> int:
        if self._file_bytes >= _FILE_BYTES:
            self._file_index, self._file_bytes = self._file_index + 1, 0
        self._file_bytes += num_bytes
        return self._file_index


def _is_shard_writer(tensor: DTensor, tensor_index: int, *, max_writers: int) -> bool:
    """Return whether this rank writes its shard of a tensor; replicas take turns, tensor by tensor.

    Args:
        tensor: A sharded tensor, perhaps with replicas of the shards along some axes of the mesh.
        tensor_index: Index of the tensor in the order of writing, the same on all ranks.
        max_writers: Maximum number of replicas along an axis that take turns.
    """
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    remaining_index = tensor_index
    for num_replicas, coordinate, placement in zip(
        tensor.device_mesh.shape, coordinates, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            num_writers = min(num_replicas, max_writers)
            remaining_index, turn = divmod(remaining_index, num_writers)
            if coordinate != turn * num_replicas // num_writers:
                return False
    return True


def copy_to_host(
    tensors: Mapping[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    *,
    blocking_paths: Container[str] = (),
) -> HostCopies:
    """Copy tensors, or this rank's shards of them, into host memory.

    A GPU copies on a separate stream while it computes.

    Args:
        tensors: Tensors to copy, by path.
        buffers: Host memory of the last copies by path, to reuse; updated.
        blocking_paths: Paths of tensors to copy before any later operation of the device, so that
            they may change or be freed at once.
    """
    sources = {path: _local_shard(tensor).detach() for path, tensor in tensors.items()}
    devices = (source.device for source in sources.values())
    device = next((device for device in devices if device.type in _ASYNC_COPY_DEVICES), None)
    _fit_buffers(buffers, sources, pinned=device is not None)
    copies = {path: _wrap_buffer(buffers[path], tensor) for path, tensor in tensors.items()}
    if device is None:
        for path, source in sources.items():
            buffers[path].copy_(source)
        return HostCopies(copies)

    blocking_sources = {path: source for path, source in sources.items() if path in blocking_paths}
    background_sources = {
        path: source for path, source in sources.items() if path not in blocking_paths
    }
    if blocking_sources:
        _start_copies(blocking_sources, buffers, device).wait()  # in the stream of the caller
    return HostCopies(
        copies,
        sources=[*background_sources.values()],
        end_event=_start_copies(background_sources, buffers, device),
    )


def _local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fit_buffers(
    buffers: dict[str, torch.Tensor], sources: Mapping[str, torch.Tensor], *, pinned: bool
) -> None:
    """Allocate all buffers again, in place, if one of them does not fit its source."""
    if any(not _fits_buffer(buffers.get(path), source) for path, source in sources.items()):
        buffers.clear()  # before the new memory is allocated
        buffers.update(_allocate_buffers(sources, pinned=pinned))


def _wrap_buffer(buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a buffer as the copy of a tensor: as a DTensor if that is one."""
    if isinstance(tensor, DTensor):
        # from_local would move the copy back to the mesh's device.
        return DTensor(buffer, tensor._spec, requires_grad=False)
    return buffer


def _start_copies(
    sources: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], device: torch.device
) -> Any:
    """Queue the copies behind the computation of their sources; return the event at their end."""
    device_module = torch.get_device_module(device)
    copy_stream = _get_copy_stream(device)
    copy_stream.wait_stream(device_module.current_stream(device))
    with device_module.stream(copy_stream):
        for path, source in sources.items():
            buffers[path].copy_(source, non_blocking=True)
    end_event = device_module.Event(blocking=True)  # a waiting thread sleeps
    end_event.record(copy_stream)
    return end_event


@functools.cache
def _get_copy_stream(device: torch.device) -> Any:
    """Return one stream for all saves, because the allocator keeps memory per stream."""
    return torch.get_device_module(device).Stream(device)


def _fits_buffer(buffer: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _allocate_buffers(
    tensors: Mapping[str, torch.Tensor], *, pinned: bool
) -> dict[str, torch.Tensor]:
    """Return host memory for a copy of each tensor; pinned if a GPU copies into it.

    torch rounds each pinned block up to a power of two, so tensors share slabs of power-of-two
    sizes.
    """
    buffers = {}
    for slab in _pack_into_slabs(tensors):
        memory = torch.empty(slab.num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()
        for path, offset in slab.offsets.items():
            tensor = tensors[path]
            # Through NumPy, so that each tensor has a separate storage: the writer would copy views
            # of a larger one. Contiguous, as in a file, regardless of the tensor's strides.
            buffer_bytes = torch.from_numpy(memory[offset : offset + tensor.nbytes])
            buffers[path] = buffer_bytes.view(tensor.dtype).view(tensor.shape)
    return buffers


@dataclass(kw_only=True)
class _Slab:
    """A block of host memory that several tensors share.

    Attributes:
        capacity: Maximum size in bytes.
        num_bytes: Bytes in use; only these are allocated.
        offsets: Where each tensor begins, in bytes, by path.
    """

    capacity: int
    num_bytes: int = 0
    offsets: dict[str, int] = field(default_factory=dict)


def _pack_into_slabs(tensors: Mapping[str, torch.Tensor]) -> list[_Slab]:
    """Assign tensors to slabs: the largest first, each to the first slab with room."""
    slabs: list[_Slab] = []
    for path, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        num_bytes = -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slab = next((slab for slab in slabs if slab.num_bytes + num_bytes <= slab.capacity), None)
        if slab is None:
            slab = _Slab(capacity=max(_SLAB_BYTES, 1 << (num_bytes - 1).bit_length()))
            slabs.append(slab)
        slab.offsets[path] = slab.num_bytes
        slab.num_bytes += num_bytes
    return slabs


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor, or of this rank's shard of it, are finite."""
    local_shard = _local_shard(tensor)
    if not local_shard.is_floating_point() or not local_shard.numel():
        return True
    # Unlike torch.isfinite, aminmax does not need a mask of the tensor's size.
    return all(math.isfinite(bound) for bound in torch.aminmax(local_shard))
