"""A device that copies tensors to the host as late as it may. Tensors of the host stand in for its.

Operations run at once, except for copies on another stream. Such a copy runs when the program tells
the device to wait for it, or when the program waits for the end of the save.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from llm.checkpoint import snapshot
from llm.checkpoint.save import Saver


class Stream:
    """A stream, and the context in which copies are given to it."""

    def __init__(self, *args: Any) -> None:
        self.begun: list[Callable[[], None]] = []
        self._mode = _Late(self.begun)

    def wait_stream(self, stream: "Stream") -> None: ...

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


class _Late(TorchFunctionMode):
    def __init__(self, begun: list[Callable[[], None]]) -> None:
        super().__init__()
        self._begun = begun

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        assert kwargs == {"non_blocking": True}
        self._begun.append(lambda: func(*args))
        return args[0]


class LateCopies:
    """The module of the device.

    Args:
        patch: Sets an attribute of the package.
    """

    Stream = Stream

    def __init__(self, patch: Callable[[Any, str, Any], None]) -> None:
        self._may_end = threading.Event()
        self._lock = threading.Lock()
        finish, allocate = Saver.finish, snapshot._allocate_buffers
        module_of = torch.get_device_module

        def wait_for_save(saver: Saver, **kwargs: Any) -> None:
            self._may_end.set()
            finish(saver, **kwargs)
            self._may_end.clear()

        def get_module(device: torch.device) -> Any:
            return self if device == torch.device("cpu") else module_of(device)

        patch(Saver, "finish", wait_for_save)
        patch(snapshot, "_ASYNC_COPY_DEVICES", {"cpu"})
        patch(
            snapshot, "_allocate_buffers", lambda tensors, pinned: allocate(tensors, pinned=False)
        )
        patch(snapshot, "_get_copy_stream", Stream)
        patch(torch, "get_device_module", get_module)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def Event(self, blocking: bool) -> "_Event":
        return _Event(self._may_end, self._lock)

    def current_stream(self, device: torch.device) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Stream:
        return stream

    def set_device(self, device: torch.device) -> None: ...


class _Event:
    device = torch.device("cpu")

    def __init__(self, may_end: threading.Event, lock: threading.Lock) -> None:
        self._may_end, self._lock = may_end, lock

    def record(self, stream: Stream) -> None:
        self._copies = stream.begun

    def wait(self) -> None:
        with self._lock:
            while self._copies:
                self._copies.pop(0)()

    def synchronize(self) -> None:
        assert self._may_end.wait(60)
        self.wait()
