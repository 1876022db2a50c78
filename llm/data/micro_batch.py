"""What a model reads at once."""

from typing import NamedTuple

import torch


class MicroBatch(NamedTuple):
    """What the model reads at once; each int64 `[micro_batch_size, block_size]`.

    Attributes:
        input_ids: The tokens.
        labels: The token that follows each of them; -100 is ignored.
        positions: Position of each token in its document; None for positions in the window.
        documents: Number of each token's document in its window, if attention shall not cross
            from one to another.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None
