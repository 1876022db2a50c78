"""A made-up accelerator `gpux`, whose tensors have shapes, types and a device, but no values.

Tensors of the host stay real: a program may read them. Call `install` once in a process of its own,
since PyTorch can neither rename nor remove a device.
"""

import functools
import sys
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # the collectives' shapes, for PyTorch 2.10
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from tests.support.in_flight import Flight, is_ours

NAME = "gpux"

# What autocast computes in half precision on CUDA, where models and optimizers use it.
_CAST = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"),
    *("conv1d", "scaled_dot_product_attention", "_grouped_mm"),
)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_libraries: list[torch.library.Library] = []  # their kernels are registered while they live


class _Stream:
    """The stream of all that is computed, or an event on it: nothing runs asynchronously.

    So are the streams that FSDP makes.
    """

    device_index = device_type = stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device(NAME, 0)

    def record_event(self, *args: Any) -> "_Stream":
        return _Stream()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class SideStream(_Stream):
    """A stream that the package has made: it may run what it is given at any time until a wait.

    Attributes:
        current: The one that is given operations; None while they are computed as usual.
        computed: Number of operations that are computed as usual.
        waits_for: How many of them it waits for.
        flights: What it has been given.
    """

    current: ClassVar["SideStream | None"] = None
    computed: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.waits_for = 0
        self.flights: list[Flight] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waits_for = SideStream.computed

    def __enter__(self) -> "SideStream":
        SideStream.current = self
        return self

    def __exit__(self, *error: Any) -> None:
        SideStream.current = None


class _Event(_Stream):
    """An event that the package has made."""

    def record(self, stream: SideStream | None = None) -> None:
        self._flights = [] if stream is None else list(stream.flights)

    def wait(self) -> None:
        for flight in self._flights:
            flight.land_on_device()

    def synchronize(self) -> None:
        for flight in self._flights:
            flight.land_on_device()
            flight.land_on_host()


class _Backend(_DummyBackendModule):
    """The module `torch.gpux`."""

    device = _Stream
    default_generators = (torch.default_generator,)

    def Stream(self, *args: Any, **kwargs: Any) -> _Stream:
        return SideStream() if is_ours(sys._getframe(1)) else _Stream()

    def Event(self, *args: Any, **kwargs: Any) -> _Stream:
        return _Event() if is_ours(sys._getframe(1)) else _Stream()

    def stream(self, stream: _Stream | None) -> _Stream:
        return stream or _Stream()

    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, *args: Any) -> None: ...

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, *args: Any) -> None: ...


def install(rank: int, world_size: int) -> torch.device:
    """Add the device to PyTorch, and be one of several ranks whose messages are lost."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    _add_missing_shapes()
    # Attention has no kernel of its own here: its products stay in the precision of their inputs.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    if world_size > 1:
        backend = f"cpu:fake,{NAME}:fake"
        dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
        make_group = dist.new_group
        dist.new_group = lambda *args, backend=None, **kwargs: make_group(
            *args, backend="cpu:fake" if backend == "gloo" else backend, **kwargs
        )
        # It reads the number of parameters of other ranks, which nobody has sent.
        distributed._verify_param_shape_across_processes = lambda *args, **kwargs: None
    return torch.device(NAME, 0)


def answer_all_reduces(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel have the gradients that it sends for those of all ranks."""

    def send(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer(), group=group)
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(bucket.buffer())
        return answer

    if isinstance(model, distributed.DistributedDataParallel):
        model.register_comm_hook(model.process_group, send)


def _add_missing_shapes() -> None:
    """Say what two operations return that fake tensors cannot run."""
    shapes = torch.library.Library("aten", "IMPL", "Meta")
    shapes.impl("_fused_sgd_", lambda *args, **kwargs: None)
    shapes.impl(
        "geqrf", lambda a: (torch.empty_like(a), a.new_empty(*a.shape[:-2], min(a.shape[-2:])))
    )
    _libraries.append(shapes)


def cast_as_on_cuda() -> None:
    """Give the device the casts of CUDA's autocast; call it when the package has added its own."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    casts = torch.library.Library("aten", "IMPL")
    for name in _CAST:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"):
            operation = getattr(torch.ops.aten, name).default
            casts.impl(name, functools.partial(_cast, operation), "AutocastPrivateUse1")
    _libraries.extend((others, casts))


def _cast(operation: Any, *args: Any, **kwargs: Any) -> Any:
    def lower(value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype(NAME)) if is_wide else value

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operation(*map(lower, args), **{name: lower(v) for name, v in kwargs.items()})
