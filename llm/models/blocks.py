"""The repeated layers of a model: what is sharded, recomputed and cut into stages as a whole."""

from torch import nn


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The transformer blocks of a model, in order.

    They are the longest list of modules of one kind; of two, the one with more parameters.

    Raises:
        ValueError: The model has no such list.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    lists = [m for m in lists if any(True for _ in m.parameters())]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers.")
    return max(lists, key=lambda m: (sum(p.numel() for p in m.parameters()), len(m)))
