"""The training state of one rank in host memory, and the choice of tensors that it writes.

If several ranks hold a tensor, one of them writes it; a sharded tensor is written shard by shard,
each shard once.
"""

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_FILE_BYTES = 1 << 30  # a file is assembled in memory before it is written
_SLAB_BYTES = 1 << 30
_ALIGNMENT = 64
_WITH_STREAMS = {"cuda"}  # device types that can copy while they compute

OwnerRanks = Callable[[str], Sequence[int]]
"""Maps the path of a tensor to the ranks that hold it, in order."""


class HostCopies:
    """Copies of tensors in host memory; a GPU may still be copying.

    Call `wait_on_device` before you change the tensors, and `wait_on_host` before you read the
    copies.

    Attributes:
        tensors: The copies, by path.

    Args:
        tensors: As above.
        sources: The tensors being copied, kept alive until `wait_on_device`. Otherwise, if training
            replaces one during the copy, the allocator could reuse its memory.
        done: The event at the end of the copies; None if they are complete.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        sources: Sequence[torch.Tensor] = (),
        done: Any = None,
    ) -> None:
        self.tensors = tensors
        self._sources, self._done = sources, done

    def wait_on_device(self) -> None:
        """Make later operations on the device wait for the copies; the host does not wait."""
        if self._sources:
            self._done.wait()  # in the stream of the caller
            self._sources = ()

    def wait_on_host(self) -> None:
        """Wait until the copies are complete."""
        if self._done is not None:
            # A new thread would use the first GPU, and CUDA would create a context there.
            torch.get_device_module(self._done.device).set_device(self._done.device)
            self._done.synchronize()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A training state in host memory.

    Attributes:
        step: Optimizer steps done.
        copies: The tensors that this rank writes.
        file_of: For each tensor of any rank, the number of its file on the rank that writes it.
        plain: The rest of the state, as JSON.
        metadata: Plain values for the manifest.
    """

    step: int
    copies: HostCopies
    file_of: dict[str, int]
    plain: str
    metadata: dict[str, Any]


def assign_writers(
    state: Mapping[str, torch.Tensor], *, rank: int, world_size: int, owner_ranks: OwnerRanks
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Choose the tensors that this rank writes; every rank computes the same assignment.

    Args:
        state: All tensors that this rank holds, by path.
        rank: Rank of this process.
        world_size: Number of ranks.
        owner_ranks: Ranks that hold a tensor that is not sharded.

    Returns:
        The tensors of this rank, and for each tensor in `state` the number of its file on the rank
        that writes it.
    """
    loads = [0] * world_size
    files = [_Files() for _ in range(world_size)]
    shard_files = _Files()
    local_tensors, file_of = {}, {}
    # Tensors on the most ranks come first: tensors that fewer ranks know must not change their
    # writers. Then the largest, for an even load.
    items = sorted(state.items(), key=lambda i: (-len(owner_ranks(i[0])), -i[1].nbytes, i))
    for path, tensor in items:
        if not isinstance(tensor, DTensor):
            writer = min(owner_ranks(path), key=loads.__getitem__)
            file_of[path] = files[writer].put(tensor.nbytes)
            loads[writer] += tensor.nbytes
            if writer == rank:
                local_tensors[path] = tensor
    # A sharded tensor without elements is not written.
    sharded = [(p, t) for p, t in items if isinstance(t, DTensor) and t.numel()]
    for number, (path, tensor) in enumerate(sharded):
        axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        num_shards = math.prod(size for size, placement in axes if not placement.is_replicate())
        file_of[path] = shard_files.put(tensor.nbytes // num_shards)
        if tensor.to_local().numel() and _writes_shard(tensor, number):
            local_tensors[path] = tensor
    return local_tensors, file_of


class _Files:
    """Numbers the files of a rank, from 1."""

    def __init__(self) -> None:
        self._number = 1
        self._bytes = 0

    def put(self, num_bytes: int) -> int:
        if self._bytes >= _FILE_BYTES:
            self._number, self._bytes = self._number + 1, 0
        self._bytes += num_bytes
        return self._number


def _writes_shard(tensor: DTensor, number: int) -> bool:
    """Return whether this rank writes its shard; replicas alternate tensor by tensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for size, at, placement in zip(
        tensor.device_mesh.shape, coordinate, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            number, writer = divmod(number, size)
            if at != writer:
                return False
    return True


def copy_to_host(
    tensors: Mapping[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    *,
    first: Container[str] = (),
) -> HostCopies:
    """Copy tensors, or this rank's shards of them, into host memory.

    A GPU copies on a separate stream while it computes.

    Args:
        tensors: Tensors to copy, by path.
        buffers: Memory of the last copies, to reuse; updated.
        first: Paths of tensors to copy before any later operation of the device, so that they may
            change or be freed at once.
    """
    local = {
        path: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for path, tensor in tensors.items()
    }
    device = next((t.device for t in local.values() if t.device.type in _WITH_STREAMS), None)
    if any(not _fits_buffer(buffers.get(path), tensor) for path, tensor in local.items()):
        buffers.clear()  # before the new memory is allocated
        buffers.update(_allocate_buffers(local, pinned=device is not None))
    copies: dict[str, torch.Tensor] = {}
    for path, tensor in tensors.items():
        copies[path] = buffers[path]
        if isinstance(tensor, DTensor):
            # from_local would move the copy back to the mesh's device.
            copies[path] = DTensor(buffers[path], tensor._spec, requires_grad=False)
    if device is None:
        for path, source in local.items():
            buffers[path].copy_(source)
        return HostCopies(copies)
    at_once = {path: source for path, source in local.items() if path in first}
    later = {path: source for path, source in local.items() if path not in first}
    if at_once:
        _copy_aside(at_once, buffers, device).wait()  # in the stream of the caller
    return HostCopies(copies, sources=[*later.values()], done=_copy_aside(later, buffers, device))


def _copy_aside(
    sources: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], device: torch.device
) -> Any:
    """Start the copies when the device has computed the sources; return the event at their end."""
    streams = torch.get_device_module(device)
    aside = _stream_of_copies(device)
    aside.wait_stream(streams.current_stream(device))
    with streams.stream(aside):
        for path, source in sources.items():
            buffers[path].copy_(source, non_blocking=True)
    done = streams.Event(blocking=True)  # a waiting thread sleeps
    done.record(aside)
    return done


@functools.cache
def _stream_of_copies(device: torch.device) -> Any:
    """Return one stream for all saves, because the allocator keeps memory per stream."""
    return torch.get_device_module(device).Stream(device)


def _fits_buffer(buffer: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _allocate_buffers(
    tensors: Mapping[str, torch.Tensor], *, pinned: bool
) -> dict[str, torch.Tensor]:
    """Return host memory for a copy of each tensor; pinned if a GPU copies into it.

    torch rounds each pinned block up to a power of two, so tensors share slabs of power-of-two
    sizes. The largest are placed first, each in the first slab with room.
    """
    slabs: list[_Slab] = []
    for path, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        room = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        slab = next((slab for slab in slabs if slab.used + room <= slab.capacity), None)
        if slab is None:
            slab = _Slab(capacity=max(_SLAB_BYTES, 1 << (room - 1).bit_length()))
            slabs.append(slab)
        slab.offsets[path] = slab.used
        slab.used += room
    buffers = {}
    for slab in slabs:
        memory = torch.empty(slab.used, dtype=torch.uint8, pin_memory=pinned).numpy()
        for path, offset in slab.offsets.items():
            tensor = tensors[path]
            # Through NumPy, so that each tensor has a separate storage: the writer would copy views
            # of a larger one. Contiguous, as in a file, regardless of the tensor's strides.
            part = torch.from_numpy(memory[offset : offset + tensor.nbytes])
            buffers[path] = part.view(tensor.dtype).view(tensor.shape)
    return buffers


@dataclass(kw_only=True)
class _Slab:
    """A block of host memory that several tensors share.

    Attributes:
        capacity: Maximum size in bytes.
        used: Bytes in use; only these are allocated.
        offsets: Where each tensor begins, in bytes.
    """

    capacity: int
    used: int = 0
    offsets: dict[str, int] = field(default_factory=dict)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor, or of this rank's shard of it, are finite."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # Unlike torch.isfinite, aminmax does not need a mask of the tensor's size.
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))
