"""Buffers of asynchronous messages and copies, which nothing may use before the wait for them.

NCCL sends on a stream of its own, and a save copies on another. Such a `wait` does not wait on the
host: it orders what the program launches later behind the message. What is launched before races
with it, mostly unnoticed.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.support.package import PACKAGE


@dataclass
class Flight:
    """An operation on another stream.

    Attributes:
        land_on_device: Called when the device waits for it: its tensors of the device are free.
        land_on_host: Called when the host waits for it.
    """

    land_on_device: Callable[[], None]
    land_on_host: Callable[[], None]


class InFlight:
    """Follows the asynchronous messages that the package sends, from `install` on.

    Args:
        note: Is told of each use of a buffer that is in flight.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        # By storage: whether the message overwrites it, and a reference that notices its end.
        self._buffers: dict[int, tuple[bool, Any]] = {}

    def install(self) -> None:
        """Replace the functions of `torch.distributed` and PyTorch that the package calls."""
        functions = {dist.isend: False, dist.irecv: True, dist.all_reduce: True}
        followed = {f: self._followed(f, received) for f, received in functions.items()}
        make, send_batch, to_list = dist.P2POp, dist.batch_isend_irecv, torch.Tensor.tolist
        originals = {own: function for function, own in followed.items()}

        def batch(operations: list[Any]) -> list[Any]:
            works = send_batch(operations)
            if not is_ours(sys._getframe(1)):
                return works
            buffers = [(operation.tensor, functions[operation.op]) for operation in operations]
            # The first wait ends all of them: NCCL has one `Work` for a batch.
            return [_Work(work, self._fly(buffers)) for work in works]

        def as_list(tensor: torch.Tensor) -> Any:  # it is no operation that a mode sees
            self.check("tolist", [(tensor, False)])
            return to_list(tensor)

        for function, own in followed.items():
            setattr(dist, function.__name__, own)
        dist.P2POp = lambda op, *args, **kwargs: make(originals.get(op, op), *args, **kwargs)
        dist.batch_isend_irecv, torch.Tensor.tolist = batch, as_list

    def check_operation(self, operation: Any, args: Any, kwargs: Any) -> None:
        """Note the buffers in flight that an operation uses; a view of one is no use."""
        if self._buffers and not operation.is_view:
            self.check(operation.name(), _uses(operation, args, kwargs))

    def launch(self, operation: Any, args: Any, kwargs: Any) -> Flight:
        """Take what an operation on another stream uses as in flight."""
        uses = _uses(operation, args, kwargs)
        return Flight(
            self._fly([use for use in uses if use[0].device.type != "cpu"]),
            self._fly([use for use in uses if use[0].device.type == "cpu"]),
        )

    def check(self, name: str, uses: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """Note the buffers in flight among tensors that are read or, if True, written."""
        for tensor, writes in uses:
            received, _ = self._buffers.get(tensor.untyped_storage()._cdata, (None, None))
            if received or (received is not None and writes):
                self._note(name)

    def _followed(self, function: Any, received: bool) -> Any:
        @functools.wraps(function)
        def followed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            work = function(tensor, *args, **kwargs)
            if work is None or not is_ours(sys._getframe(1)):
                return work
            return _Work(work, self._fly([(tensor, received)]))

        return followed

    def _fly(self, buffers: list[tuple[torch.Tensor, bool]]) -> Callable[[], None]:
        """Take buffers as in flight until the function that is returned is called."""
        keys = []
        for tensor, received in buffers:
            storage = tensor.untyped_storage()
            keys.append(key := storage._cdata)
            self._buffers[key] = received, weakref.ref(storage, lambda _, key=key: self._end(key))

        def land() -> None:
            for key in keys:
                self._buffers.pop(key, None)

        return land

    def _end(self, key: int) -> None:
        if self._buffers.pop(key, None) is not None:
            self._note("free")


class _Work:
    """A `Work` whose buffers are in flight until its `wait`."""

    def __init__(self, work: Any, land: Callable[[], None]) -> None:
        self._work, self._land = work, land

    def wait(self, *args: Any) -> Any:
        self._land()
        return self._work.wait(*args)


def _uses(operation: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
    """Return the tensors of an operation, and whether it writes them."""
    arguments = operation._schema.arguments
    given = [*zip(arguments, args, strict=False)]
    given += [(argument, kwargs.get(argument.name)) for argument in arguments[len(args) :]]
    return [
        (leaf, argument.alias_info is not None and argument.alias_info.is_write)
        for argument, value in given
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


def is_ours(frame: Any) -> bool:
    """Whether a frame is one of the package."""
    return frame.f_code.co_filename.startswith(str(PACKAGE))
