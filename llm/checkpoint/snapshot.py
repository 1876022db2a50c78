"""The part of a training state that one rank writes, copied into host memory.

What several ranks hold is written by one of them; a tensor that is divided over ranks is written
piece by piece, each piece once.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

_FILE_BYTES = 1 << 30  # a file is put together in memory before it is written

OwnerRanks = Callable[[str], Sequence[int]]
"""The path of a tensor -> the ranks that hold it, in order."""


def assign_writers(
    state: Mapping[str, torch.Tensor], *, rank: int, world_size: int, owner_ranks: OwnerRanks
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Choose what this rank writes of what it holds; every rank must call it.

    Args:
        state: All tensors that this rank holds, by path.
        rank: Of this process.
        world_size: Number of processes.
        owner_ranks: Who else holds a tensor; those of a divided one are known without.

    Returns:
        The tensors, and for each of the state the number of its file among those of its writer.
    """
    loads = [0] * world_size
    files = [_Files() for _ in range(world_size)]
    own, file_of = {}, {}
    # What all ranks hold comes first: there all must agree on who writes it.
    items = sorted(
        state.items(), key=lambda i: (len(owner_ranks(i[0])) < world_size, -i[1].nbytes, i)
    )
    whole = [(path, tensor) for path, tensor in items if not isinstance(tensor, DTensor)]
    for path, tensor in whole:
        writer = min(owner_ranks(path), key=loads.__getitem__)
        file_of[path] = files[writer].put(tensor.nbytes)
        loads[writer] += tensor.nbytes
        if writer == rank:
            own[path] = tensor
    divided = [(path, tensor) for path, tensor in items if isinstance(tensor, DTensor)]
    pieces = _Files()
    for number, (path, tensor) in enumerate(divided):
        axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        num_pieces = math.prod(size for size, place in axes if not place.is_replicate())
        file_of[path] = pieces.put(tensor.nbytes // num_pieces)
        if tensor.to_local().numel() and _writes_piece(tensor, number):
            own[path] = tensor
    return own, file_of


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


def _writes_piece(tensor: DTensor, number: int) -> bool:
    """Of the ranks that hold the same piece, one writes it: by turns, tensor by tensor."""
    where = tensor.device_mesh.get_coordinate()
    assert where is not None
    for size, at, placement in zip(tensor.device_mesh.shape, where, tensor.placements, strict=True):
        if placement.is_replicate():
            number, turn = divmod(number, size)
            if at != turn:
                return False
    return True


class HostCopies:
    """Copies of tensors in host memory that is kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors, or this rank's pieces of them, and wait until that is done."""
        on_cuda = False
        copies: dict[str, torch.Tensor] = {}
        for path, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            on_cuda = on_cuda or local.is_cuda
            buffer = self._buffers.get(path)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                # Contiguous, as a file has it, whatever the tensor's own strides are.
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[path] = buffer
            buffer.copy_(local.detach(), non_blocking=local.is_cuda)
            copies[path] = buffer
            if isinstance(tensor, DTensor):
                # from_local would move the copy back to the mesh's device.
                copies[path] = DTensor(buffer, tensor._spec, requires_grad=False)
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        return copies
