"""Pack tensors into flat buffers; each buffer is sent as one message."""

from collections.abc import Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Approximate message size, for good use of slow links; a larger tensor is sent alone."""


class Bucket:
    """Tensors of one dtype and device, with a flat buffer for all of them.

    Groups of tensors come from `group_for_buckets`.

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
    def fill(self) -> None:
        """Copy the tensors into the buffer."""
        torch._foreach_copy_(self._views, self._tensors)

    @torch.no_grad()
    def empty(self) -> None:
        """Copy the buffer into the tensors."""
        torch._foreach_copy_(self._tensors, self._views)


def group_for_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors for buckets of `BUCKET_BYTES`, by type and device, in their order.

    Args:
        tensors: In the same order on all ranks, so that the buckets agree.
    """
    groups: list[list[Tensor]] = []
    open_group_by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        dtype_and_device = tensor.dtype, tensor.device
        group = open_group_by_kind.get(dtype_and_device)
        num_bytes = 0 if group is None else sum(group_tensor.nbytes for group_tensor in group)
        if group is None or num_bytes + tensor.nbytes > BUCKET_BYTES:
            group = open_group_by_kind[dtype_and_device] = []
            groups.append(group)
        group.append(tensor)
    return groups
