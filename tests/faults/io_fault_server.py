"""Runs programs whose calls of the file system fail: reads requests and writes answers as JSON.

It has imported all libraries, so a program costs a fork. `io_faults.py` starts it, with the library
of the faults preloaded and its path as the argument.
"""

# ruff: noqa: F401
import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llm.prepare
import llm.prepare.train_tokenizer
import llm.tools.checkpoints
import llm.tools.fetch
import llm.tools.report.report
import tests.support.preload
from llm.__main__ import main as run_program
from llm.checkpoint import save
from llm.trainers.gpt import main as trainer
from tests.support.ranks import free_port

SECONDS = 60.0
"""A program that takes longer hangs."""


def serve() -> None:
    library = ctypes.CDLL(sys.argv[1])
    save._RETRY_DELAYS = (0.02, 0.05)
    trainer.GRACE_SECONDS = 0.5
    for line in sys.stdin:
        request = json.loads(line)
        counter = Path(request["counter"])
        counter.write_bytes(bytes(4096))
        codes = run(library, request)
        calls = int.from_bytes(counter.read_bytes()[:8], sys.byteorder)
        sys.stdout.write(json.dumps({"codes": codes, "calls": calls}) + "\n")
        sys.stdout.flush()


def run(library: ctypes.CDLL, request: dict[str, Any]) -> list[int | None]:
    """Run the ranks of a program; return their exit codes, None for one that hangs."""
    port, world_size = free_port(), request["ranks"]
    Path(request["output"]).write_text("")
    processes = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            if world_size > 1:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
                numbers = (rank, rank, world_size, world_size, port)
                os.environ |= {name: str(n) for name, n in zip(names, numbers, strict=True)}
                os.environ["MASTER_ADDR"] = "127.0.0.1"
            work(library, request)
        processes.append(process)
    return [wait(process) for process in processes]


def work(library: ctypes.CDLL, request: dict[str, Any]) -> None:
    """Be one rank of a program, with the faults; never returns."""
    code = 1
    try:
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= request["variables"]
        library.arm_io_fault()
        code = start(request["words"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def start(words: Sequence[str]) -> int:
    try:
        if words[0] == "train":
            return trainer.main(words[1:])
        sys.argv = ["llm-trainers", *words]
        return run_program() or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0


def wait(process: int) -> int | None:
    """Wait for a process, and end its workers with it."""
    deadline = time.monotonic() + SECONDS
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    serve()
