"""Modes that note operations: values that Python reads, and messages of sharded weights."""

from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item")


class Reads(TorchDispatchMode):
    """Notes the operations that hand a value of a tensor to Python: a host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if name.split(".")[0] in _READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Messages(TorchDispatchMode):
    """Lists the all-gathers and reduce-scatters inside the context, in order.

    Attributes:
        sent: Name, dtype and number of elements of the whole, of each.
    """

    NAMES: ClassVar = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce"}

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = self.NAMES.get(func._schema.name.removeprefix("c10d::"))
        if name is not None:
            whole = max(args[:2], key=torch.Tensor.numel)
            self.sent.append((name, whole.dtype, whole.numel()))
        return func(*args, **(kwargs or {}))
