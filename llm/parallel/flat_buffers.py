"""Pack tensors into flat buffers; each buffer is sent as one message."""

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_BUFFER_BYTES = 64 * 2**20
"""Message size for good use of slow links; a larger tensor gets a buffer of this tensor alone."""


class FlatBuffer:
    """Tensors of one dtype and device, with a flat buffer for all of them.

    Groups of tensors come from `group_for_flat_buffers`.

    Args:
        tensors: One at least.
        multiple_of: A divisor of the buffer's number of elements.

    Attributes:
        flat: The buffer, one-dimensional; its end may be padding.
    """

    def __init__(self, tensors: Sequence[Tensor], *, multiple_of: int = 1) -> None:
        self._tensors = list(tensors)
        sizes = [tensor.numel() for tensor in tensors]
        num_elements = -(-sum(sizes) // multiple_of) * multiple_of
        self.flat = torch.zeros(num_elements, dtype=tensors[0].dtype, device=tensors[0].device)
        flat_slices = self.flat[: sum(sizes)].split(sizes)
        self._views = [
            flat_slice.view(tensor.shape)
            for flat_slice, tensor in zip(flat_slices, tensors, strict=True)
        ]

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the tensors into the buffer."""
        torch._foreach_copy_(self._views, self._tensors)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the buffer into the tensors."""
        torch._foreach_copy_(self._tensors, self._views)


def group_for_flat_buffers(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one dtype and device, in their order, up to `MAX_BUFFER_BYTES` a group.

    Args:
        tensors: In the same order on all ranks, so that the groups agree.
    """
    groups: list[list[Tensor]] = []
    last_group_by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        group = last_group_by_kind.get(kind)
        num_bytes = 0 if group is None else sum(group_tensor.nbytes for group_tensor in group)
        if group is None or num_bytes + tensor.nbytes > MAX_BUFFER_BYTES:
            group = last_group_by_kind[kind] = []
            groups.append(group)
        group.append(tensor)
    return groups
