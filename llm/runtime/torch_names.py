"""PyTorch functions under one name for all supported versions."""

from typing import Any

import torch.distributed as dist

_collectives: Any = dist  # each version's type stubs contain only its names

# PyTorch 2.13 renamed these two and deprecated their former names.
all_gather_single = getattr(dist, "all_gather_single", None) or _collectives.all_gather_into_tensor
reduce_scatter_single = (
    getattr(dist, "reduce_scatter_single", None) or _collectives.reduce_scatter_tensor
)
