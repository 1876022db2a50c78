"""How much memory tensors take while operations run, on real or fake tensors."""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CASTS = (torch.ops.aten._to_copy.default,)


class Level(NamedTuple):
    """Bytes between two marks.

    Attributes:
        live: Allocated at the end.
        peak: The most that was allocated at once.
        casts: Of `live`, copies of weights in another precision.
    """

    live: int
    peak: int
    casts: int


class MemoryMeter(TorchDispatchMode):
    """Counts the storages that operations make, from their creation until nobody holds them.

    Args:
        known: Tensors that are there already, such as weights and inputs; they do not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._sizes: dict[int, int] = {}
        self._casts: set[int] = set()
        self._live = self._peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        is_cast = func in _CASTS and args[0].untyped_storage()._cdata in self._known
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value, is_cast=is_cast)
        return result

    def mark(self) -> Level:
        """The level now; the next peak counts from here."""
        casts = sum(self._sizes[key] for key in self._casts)
        level = Level(live=self._live, peak=self._peak, casts=casts)
        self._peak = self._live
        return level

    def _count(self, tensor: Tensor, *, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        if is_cast:
            self._casts.add(key)
        self._live += self._sizes[key]
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)
        self._casts.discard(key)
