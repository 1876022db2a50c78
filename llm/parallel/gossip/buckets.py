"""Many tensors as a few flat ones, so that a message is large enough for a slow link."""

from collections.abc import Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""About how much one message holds; a larger tensor is a message of its own."""


class Bucket:
    """Tensors of one type on one device, with a flat buffer that has room for all of them.

    Attributes:
        tensors: What the bucket is for.
        flat: The buffer, one-dimensional; the end may be padding.

    Args:
        tensors: One at least.
        multiple_of: What the buffer's number of elements shall be divisible by.
    """

    def __init__(self, tensors: Sequence[Tensor], *, multiple_of: int = 1) -> None:
        self.tensors = list(tensors)
        sizes = [tensor.numel() for tensor in tensors]
        length = -(-sum(sizes) // multiple_of) * multiple_of
        self.flat = torch.zeros(length, dtype=tensors[0].dtype, device=tensors[0].device)
        pieces = self.flat[: sum(sizes)].split(sizes)
        self._views = [
            piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)
        ]

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the tensors into the buffer."""
        torch._foreach_copy_(self._views, self.tensors)

    @torch.no_grad()
    def empty(self) -> None:
        """Copy the buffer into the tensors."""
        torch._foreach_copy_(self.tensors, self._views)


def make_buckets(
    tensors: Sequence[Tensor], *, bucket_bytes: int = BUCKET_BYTES, multiple_of: int = 1
) -> list[Bucket]:
    """Put tensors into buckets, by type and device, in their order; the same on all ranks.

    Args:
        tensors: Any.
        bucket_bytes: Where a bucket is full.
        multiple_of: What a buffer's number of elements shall be divisible by.
    """
    shares: list[list[Tensor]] = []
    open_shares: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        share = open_shares.get(kind)
        held = 0 if share is None else sum(other.nbytes for other in share)
        if share is None or held + tensor.nbytes > bucket_bytes:
            share = open_shares[kind] = []
            shares.append(share)
        share.append(tensor)
    return [Bucket(share, multiple_of=multiple_of) for share in shares]
