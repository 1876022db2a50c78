"""A mode that notes what a GPU refuses or waits for, while a program runs on a made-up device."""

import linecache
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.support.in_flight import InFlight
from tests.support.made_up_device import NAME, SideStream
from tests.support.package import PACKAGE

_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "convolution"}
# They write nothing, or only reserve memory. Views are recognized by their schema.
_WITHOUT_LAUNCH = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "set_", "resize_", "record_stream", "_local_scalar_dense"),
}
_READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select"}
_ANSWERS = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0}


@dataclass
class Notes:
    """What an operation has let the device do, with the lines of the package where it was.

    Attributes:
        reads: Where the host waits for a value of the device.
        host_messages: Where a process group of the device is given a tensor of the host.
        wide_products: Where matrices in float32 are multiplied.
        launches: How often each operation that computes something was called for tensors of the
            device. One on lists of tensors counts once, and so does a decomposition.
        collectives: How often each collective was called for tensors of the device.
        peak: Most bytes that tensors of the device took at once.
        in_flight: Where a buffer of an asynchronous message is used before the wait for it, or a
            tensor that another stream uses; and where that stream does not wait for the device.
    """

    reads: list[str] = field(default_factory=list)
    host_messages: list[str] = field(default_factory=list)
    wide_products: list[str] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    in_flight: list[str] = field(default_factory=list)


class Strict(TorchDispatchMode):
    """Gives the device fake tensors and the host real ones, and notes what crosses between them.

    Whoever reads a value of the device is told 1, or True. What needs tensors on one device raises
    if they are on two, as on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stack, self._fake = ExitStack(), FakeTensorMode(allow_non_fake_inputs=True)
        self._notes = Notes()
        self._in_flight = InFlight(lambda use: self._notes.in_flight.append(f"{use} at {_where()}"))
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def take_notes(self) -> Notes:
        """Return the notes since the last call."""
        notes, self._notes = self._notes, Notes(peak=self._live_bytes())
        return notes

    def __enter__(self) -> "Strict":
        self._stack.enter_context(self._fake)
        # `torch.tensor` then makes its tensor on the host, and copies it to the device.
        torch._C._set_only_lift_cpu_tensors(True)
        self._in_flight.install()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)
        self._stack.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not all(issubclass(kind, FakeTensor | torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor, which calls the operations of its local tensor
        kwargs = kwargs or {}
        aside = SideStream.current
        if aside is None:
            self._in_flight.check_operation(func, args, kwargs)
        leaves = [*_leaves(args), *_leaves(kwargs.values())]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_message(name.strip("_"), tensors, leaves)
        elif _launches(func, name) and _is_on_device(leaves):
            self._notes.launches[name] += 1
        if any(tensor.device.type == NAME for tensor in tensors):
            if aside is not None:
                self._launch(aside, func, args, kwargs)
            elif name in _READS or _copies_to_host(name, args, kwargs):
                self._notes.reads.append(f"{name} at {_where()}")
            if name in _PRODUCTS and any(_is_wide_matrix(tensor) for tensor in tensors):
                self._notes.wide_products.append(f"{name} at {_where()}")
            if name == "_local_scalar_dense":
                return _ANSWERS.get(tensors[0].dtype, 1)
        elif not _is_on_device(leaves):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        # Given a tensor of the host only, FakeTensorMode would allocate memory on the device.
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            args, kwargs = tree_map_only(torch.Tensor, self._without_values, (args, kwargs))
        result = func(*args, **kwargs)
        self._count(result)
        if aside is None:
            SideStream.computed += 1
        return result

    def _launch(self, aside: SideStream, func: Any, args: Any, kwargs: Any) -> None:
        if aside.waits_for != SideStream.computed:
            self._notes.in_flight.append(f"{func.name()} of what is computed at {_where()}")
        aside.flights.append(self._in_flight.launch(func, args, kwargs))

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _count(self, result: Any) -> None:
        """Add the storages that an operation has made to the memory in use."""
        tensors = [leaf for leaf in _leaves([result]) if isinstance(leaf, torch.Tensor)]
        own = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == NAME]
        new = [storage for storage in own if storage._cdata not in self._storages]
        for storage in new:
            key = storage._cdata
            self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key))
        if new:
            self._notes.peak = max(self._notes.peak, self._live_bytes())

    def _live_bytes(self) -> int:
        """Return the bytes in use; FSDP resizes storages, so that no sum can be kept."""
        live = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in live if storage is not None)

    def _note_message(self, name: str, tensors: list[torch.Tensor], leaves: list[Any]) -> None:
        if name in ("barrier", "wait_tensor"):
            return
        if all(tensor.device.type == NAME for tensor in tensors):
            self._notes.collectives[name] += 1
        elif any(NAME in _device_types(leaf) for leaf in leaves):
            self._notes.host_messages.append(f"{name} at {_where()}")


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Those of `tree_leaves` for the arguments of an operation, at a tenth of its time."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _is_on_device(leaves: Iterable[Any]) -> bool:
    """Whether an operation has a tensor of the device, or makes one."""
    devices = (leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return any(isinstance(each, torch.device) and each.type == NAME for each in devices)


def _launches(func: Any, name: str) -> bool:
    return func.namespace != "prim" and not func.is_view and name not in _WITHOUT_LAUNCH


def _device_types(leaf: Any) -> list[str]:
    """The devices whose tensors a process group, among the arguments of a collective, is for."""
    if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
        leaf = dist.ProcessGroup.unbox(leaf)
    elif isinstance(leaf, str) and leaf in dist.distributed_c10d._world.pg_names.values():
        leaf = dist.distributed_c10d._resolve_process_group(leaf)
    if not isinstance(leaf, dist.ProcessGroup):
        return []
    return [device.type for device in leaf._device_types]


def _copies_to_host(name: str, args: Any, kwargs: Any) -> bool:
    if name == "copy_":
        return args[0].device.type == "cpu"
    target = kwargs.get("device")
    return name == "_to_copy" and target is not None and target.type == "cpu"


def _is_wide_matrix(tensor: torch.Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.dtype == torch.float32


def _where() -> str:
    """The innermost line of the package that runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(PACKAGE)):
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            return f"{file}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return "no line of the package"
