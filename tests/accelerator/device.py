"""`gpux`: an accelerator that is not there, for tensors that have no memory.

PyTorch lets a backend that is written in Python take the name of a new device type. With
`FakeTensorMode` its tensors have shapes, dtypes and a device, but no values: mixing devices and
reading a value raise, and nothing is computed. Collectives go to PyTorch's fake process group.
"""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "gpux"
torch.utils.rename_privateuse1_backend(NAME)
DEVICE = torch.device(NAME, 0)
_CAST = ("mm", "addmm", "linear", "matmul", "bmm", "baddbmm", "scaled_dot_product_attention")


class _Event:
    """An event of a stream that has always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """A stream on which everything is done at once."""

    device = DEVICE

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class _Backend(_DummyBackendModule):
    """What `torch.gpux` offers."""

    Stream, Event = _Stream, _Event

    def device_count(self) -> int:
        return 8

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> list[torch.library.Library]:
    """Make `gpux` known to this process, for good; keep what is returned.

    Autocast falls through, but for the products that it casts on CUDA.
    """
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _CAST:
        packet = getattr(torch.ops.aten, name)
        aten.impl(name, _cast(packet.default))
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)
    return [everything, aten]


def _cast(op: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def below_autocast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def cast(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return below_autocast


@contextlib.contextmanager
def world(size: int, rank: int):
    """Form process groups of which this process is one rank, and in which nothing is sent."""
    made = dist.new_group

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return made(*args, backend="cpu:fake" if backend == "gloo" else backend, **kwargs)

    dist.init_process_group(
        f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=rank, world_size=size
    )
    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = made
        dist.destroy_process_group()
