"""Programs that are forked from a process with the heavy libraries, instead of Python's start.

`llm-trainers evidence` starts several Python processes, which take seconds each to import torch.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

_CONTEXT = get_context("fork")
_LOADED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
"""Keeps the trainer from replacing its process by one that loads the libraries again."""


class ForkedProgram:
    """A stand-in for `llm.tools.evidence.rank_programs.start_program`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        arguments = (list(command[1:]), {**environment, **_LOADED}, log_path)
        self._process = _CONTEXT.Process(target=_run_python, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode


def _run_python(arguments: list[str], environment: dict[str, str], log_path: Path) -> None:
    """Run what `python` runs with these arguments: `-m MODULE ...` or `-c CODE`."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log_path.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Files of its own: those of pytest would share the position with the parent's.
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    flag, program, *words = arguments
    sys.argv = [program, *words]
    if flag == "-c":
        exec(program, {})
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
