"""Programs in which the n-th call of a kind fails: open, write, fsync, rename, mkdir, unlink ..."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from tests.support.package import ROOT

ACTIONS = ("fail", "fail from here", "kill", "tear")
SOURCE = Path(__file__).with_name("io_faults.c")


@dataclass(frozen=True, kw_only=True)
class IOFault:
    """A call of the file system that fails.

    Attributes:
        folder: Only calls for files in this folder count.
        kind: open (for writing), write, fsync, rename, link, mkdir, unlink, truncate, mmap or read.
        call: Which one, counted from 1 in all processes of a program; 0 is none of them.
        error: The errno of a call that fails.
        action: `fail`; `fail from here` lets all later calls fail, too; `kill` the process instead;
            `tear` writes half of the content and kills.
    """

    folder: Path
    kind: str
    call: int
    error: int = 0
    action: Literal["fail", "fail from here", "kill", "tear"] = "fail"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a program.

    Attributes:
        codes: The exit code of each rank; None for one that hung.
        output: What all of them printed.
        calls: How many calls of the fault's kind there were.
    """

    codes: list[int | None]
    output: str
    calls: int


class IOFaultServer:
    """Starts programs in processes that load the library of the faults.

    Args:
        folder: For the library and outputs.
        variables: Environment of the programs.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._folder = folder
        library = folder / "io_faults.so"
        command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.io_fault_server", str(library)],
            cwd=ROOT,
            env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._requests: IO[str] = self._server.stdin  # type: ignore[assignment]
        self._answers: IO[str] = self._server.stdout  # type: ignore[assignment]

    def run(
        self, words: Sequence[object], *, ranks: int = 1, fault: IOFault | None = None
    ) -> Outcome:
        """Run a program: `train` with its options, or the words after `llm-trainers`."""
        output, counter = self._folder / "output.txt", self._folder / "calls"
        variables = {}
        if fault is not None:
            variables = {
                "IO_FAULT_COUNTER": str(counter),
                "IO_FAULT_FOLDER": str(fault.folder),
                "IO_FAULT_KIND": fault.kind,
                "IO_FAULT_CALL": str(fault.call),
                "IO_FAULT_ERROR": str(fault.error),
                "IO_FAULT_ACTION": str(ACTIONS.index(fault.action)),
            }
        request = {
            "words": [str(word) for word in words],
            "ranks": ranks,
            "output": str(output),
            "counter": str(counter),
            "variables": variables,
        }
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        answer = json.loads(self._answers.readline())
        text = output.read_text(encoding="utf-8", errors="replace")
        return Outcome(codes=answer["codes"], output=text, calls=answer["calls"])

    def close(self) -> None:
        self._server.communicate()
