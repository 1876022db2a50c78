"""Per-source sums of token losses."""

import torch
from torch import Tensor

from llm.runtime.labels import IGNORED


def sums_dtype(device: torch.device) -> torch.dtype:
    """Return the type of per-source sums."""
    # In float64 (not available on MPS), sums of float32 losses are nearly exact in any order.
    return torch.float32 if device.type == "mps" else torch.float64


@torch.no_grad()
def sum_by_source(
    token_losses: Tensor, labels: Tensor, sources: Tensor, *, num_sources: int
) -> Tensor:
    """Return the sum of the token losses of each source, and the number of its labels.

    Args:
        token_losses: [batch * length], fp32; 0 without a label.
        labels: [batch, length], int64; -100 for none.
        sources: [batch], int64: number of the source of each sample.
        num_sources: Number of sources.

    Returns:
        [num_sources, 2], of `sums_dtype`.
    """
    dtype = sums_dtype(labels.device)
    losses = token_losses.view_as(labels).to(dtype).sum(1)
    counts = (labels != IGNORED).to(dtype).sum(1)
    # [batch, num_sources]. On a GPU, a scatter would add in varying order.
    mine = sources.unsqueeze(1) == torch.arange(num_sources, device=labels.device)
    # Select instead of multiplying, so that an infinite loss or NaN stays with its source.
    own = [torch.where(mine, s.unsqueeze(1), 0.0).sum(0) for s in (losses, counts)]
    return torch.stack(own, dim=1)
