"""Per-source sums of token losses."""

import torch
from torch import Tensor

from llm.runtime.labels import IGNORED


def empty_sums(num_sources: int, device: torch.device) -> Tensor:
    """Return zeros for per-source losses and numbers of labels, [2, num_sources]."""
    # In float64 (not available on MPS), sums of float32 losses are nearly exact in any order.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(2, num_sources, dtype=dtype, device=device)


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
        [2, num_sources], like `empty_sums`.
    """
    zeros = empty_sums(num_sources, labels.device)
    losses = token_losses.view_as(labels).to(zeros.dtype).sum(1)
    counts = (labels != IGNORED).to(zeros.dtype).sum(1)
    # [batch, num_sources]. On a GPU, a scatter would add in varying order.
    mine = sources.unsqueeze(1) == torch.arange(num_sources, device=labels.device)
    # Select instead of multiplying, so that an infinite loss or NaN stays with its source.
    return torch.stack([torch.where(mine, s.unsqueeze(1), 0.0).sum(0) for s in (losses, counts)])
