"""Faults on order: what shall happen to a process at a named call of a named function.

The code under test knows nothing of it. Ranks that the tests fork install their faults
themselves; a process that a launcher starts finds them in its environment, see
`tests/support/site/sitecustomize.py`.
"""

import dataclasses
import errno
import functools
import importlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "LLM_TEST_FAULTS"

What = Literal[
    *("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGSTOP"),
    *("wait", "nan", "small files", "large files", "note", "out of memory", "disk error"),
]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens once.

    Attributes:
        at: The function, as `module:function` or `module:Class.method`, in the module that looks
            its name up.
        what: A signal to this process; `wait` for so many seconds; `nan` in what the function
            returns; `small files`, the largest of so many bytes, until `large files` lifts that;
            `note` the call; `out of memory`, raised as torch raises it on a GPU; a `disk error`,
            raised as Python raises it after a failed read; or another `value` than the function's.
        call: Which call of the function, counted from 1 in each process; 0 is every one.
        rank: On which rank; None is every one.
        amount: Seconds by which a signal comes later; seconds to wait; bytes; or the value.
        file: Where a line is written when it happens.
        restart: In which start of the same launch.
    """

    at: str
    what: What
    call: int = 1
    rank: int | None = None
    amount: float = 0.0
    file: Path | None = None
    restart: int = 0


def install(faults: Sequence[Fault]) -> None:
    """Let the faults of this rank happen in this process."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for fault in faults:
        if fault.rank in (None, int(os.environ["RANK"])) and fault.restart == restart:
            _install(fault)


def install_from_environment() -> None:
    """The same in a process that a launcher has started."""
    if VARIABLE in os.environ and "RANK" in os.environ:
        found = json.loads(os.environ[VARIABLE])
        install([Fault(**{**fault, "file": _path(fault["file"])}) for fault in found])


def in_environment(faults: Sequence[Fault]) -> dict[str, str]:
    """Environment variables that hand faults to the processes of a launcher."""
    here = Path(__file__).parent
    plain = [
        {**dataclasses.asdict(fault), "file": fault.file and str(fault.file)} for fault in faults
    ]
    return {
        VARIABLE: json.dumps(plain),
        "PYTHONPATH": f"{here / 'site'}{os.pathsep}{here.parent.parent}",
    }


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _install(fault: Fault) -> None:
    module, _, path = fault.at.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    @functools.wraps(function)
    def with_fault(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault.call not in (0, calls):
            return function(*args, **kwargs)
        if fault.file is not None:
            with fault.file.open("a") as file:
                file.write(f"{os.getpid()} {calls}\n")
        if fault.what == "value":
            return fault.amount
        if fault.what == "nan":
            return _undefined(function(*args, **kwargs))
        _happen(fault)
        return function(*args, **kwargs)

    setattr(owner, name, with_fault)


def _happen(fault: Fault) -> None:
    if fault.what == "wait":
        end = time.monotonic() + fault.amount
        while time.monotonic() < end:  # a signal ends no wait
            time.sleep(0.01)
    elif fault.what in ("small files", "large files"):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = int(fault.amount) if fault.what == "small files" else most
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    elif fault.what == "out of memory":
        import torch  # here, since every process of a launch imports this module

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif fault.what == "disk error":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    elif fault.what != "note":
        number = signal.Signals[fault.what]
        if fault.amount:
            timer = threading.Timer(fault.amount, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
        else:
            os.kill(os.getpid(), number)


def _undefined(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_undefined(item) for item in value)
    return value * float("nan")
