"""Time a training program on a GPU by the lines that it prints, and sample the GPU meanwhile."""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import CaseFailed

_SAMPLED = {"mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}
_USED = "memory.used"
_LEAST_MARKS = 4
_PR_SET_PDEATHSIG = 1
_LAST_LINES = 20
_COMPILER_WARNINGS = ("WON'T CONVERT", "recompile_limit")
"""Parts of torch's warnings that it runs a function uncompiled."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that trains until it is stopped.

    Attributes:
        command: The program and its arguments.
        folder: Its working folder, emptied before it starts.
        line: Pattern of a line that it prints after it has read a loss, and so has waited for the
            GPU. The group `step` is the number of finished steps, the group `peak`, if there is
            one, the most bytes of tensors so far.
        directory: Working folder of a program that only runs in its own.
        environment: Variables to add to the environment of the measuring process.
        peak: Reads the most bytes of tensors from the files of a program that does not print them.
    """

    command: Sequence[str]
    folder: Path
    line: str
    directory: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    peak: Callable[[Path], int | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Period:
    """Which steps count.

    Attributes:
        warm_up: Steps before them.
        seconds: Duration at least.
        multiple: Number that their number is a multiple of, such as an interval between updates.
    """

    warm_up: int
    seconds: float
    multiple: int = 1


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The time and the memory of a program.

    Attributes:
        ms: Wall-clock milliseconds per step, over all that counts.
        ms_median: The same of the median interval between two lines.
        steps: Steps that count.
        first_line: Seconds from the start to the first line.
        allocated: Peak of the tensors, in bytes, by torch; None where the program does not say.
        used: Peak of the GPU's memory in use, in bytes; None, like the next, without nvidia-smi.
        mhz: Median clock of the multiprocessors while steps counted.
        watts: Median power draw.
        celsius: Median temperature.
        runs_uncompiled: Whether torch has warned that some code runs uncompiled.
    """

    ms: float
    ms_median: float
    steps: int
    first_line: float
    allocated: int | None
    used: int | None
    mhz: float | None
    watts: float | None
    celsius: float | None
    runs_uncompiled: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def time_program(program: Program, period: Period, *, limit: float) -> Timed:
    """Run a program until enough steps have counted, then kill it.

    Args:
        program: The program.
        period: Which steps count.
        limit: Seconds after which it is killed in any case.

    Raises:
        CaseFailed: The program ended, or took too long, before enough steps had counted. The
            message holds the end of its output.
    """
    shutil.rmtree(program.folder, ignore_errors=True)
    program.folder.mkdir(parents=True)
    began = time.perf_counter()
    process = subprocess.Popen(
        program.command,
        cwd=program.directory or program.folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **program.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    timer = threading.Timer(limit, _kill, (process,))
    timer.start()
    sampler = Sampler()
    try:
        marks, peak, lines = _read(process, program.line, period)
    finally:
        timer.cancel()
        _kill(process)
        sampler.stop()
    counted = [mark for mark in marks if mark[1] >= period.warm_up]
    if not _is_enough(counted, period):
        took = time.perf_counter() - began
        code = process.returncode
        how = f"took {took:.0f} s" if took >= limit else f"ended with exit code {code}"
        text = "\n".join(lines[-_LAST_LINES:])
        # Many lines may follow the one that says that memory is short.
        text = "\n".join([*(line for line in lines if is_out_of_memory(line)), text])
        raise CaseFailed(f"{how} after {len(marks)} readings of its loss: {text}")
    if program.peak is not None:
        peak = program.peak(program.folder)
    intervals = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(counted)]
    steps = counted[-1][1] - counted[0][1]
    return Timed(
        ms=1000 * (counted[-1][0] - counted[0][0]) / steps,
        ms_median=1000 * statistics.median(intervals),
        steps=steps,
        first_line=marks[0][0] - began,
        allocated=peak,
        runs_uncompiled=any(warning in line for line in lines for warning in _COMPILER_WARNINGS),
        **sampler.figures(since=counted[0][0]),
    )


def is_out_of_memory(text: str) -> bool:
    """Return whether the output of a program says that its device has too little memory."""
    return "out of memory" in text.lower()


_Mark = tuple[float, int]  # time of a line, and its step


def _read(
    process: subprocess.Popen[str], pattern: str, period: Period
) -> tuple[list[_Mark], int | None, list[str]]:
    """Return the marks until enough steps have counted, the last peak, and all lines."""
    assert process.stdout is not None
    marks: list[_Mark] = []
    peak, lines, first = None, [], 0
    for line in process.stdout:
        now = time.perf_counter()
        lines.append(line.rstrip())
        found = re.search(pattern, line)
        if found is None:
            continue
        marks.append((now, int(found["step"])))
        peak = int(found.groupdict().get("peak") or 0) or None
        if marks[-1][1] < period.warm_up:
            first = len(marks)
        elif _is_enough(marks[first:], period):
            break
    return marks, peak, lines


def _is_enough(counted: Sequence[_Mark], period: Period) -> bool:
    if len(counted) < _LEAST_MARKS:
        return False
    seconds, steps = (last - first for first, last in zip(counted[0], counted[-1], strict=True))
    return seconds >= period.seconds and steps % period.multiple == 0


def _die_with_parent() -> None:
    # A benchmark that is killed cannot stop the program, which would train on and hold the GPU.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Sampler:
    """Reads clock, power, temperature and memory of the GPU twice a second, by nvidia-smi."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi") is None:
            return
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        query = ",".join([*_SAMPLED.values(), _USED])
        self._process = subprocess.Popen(
            [
                *("nvidia-smi", f"--query-gpu={query}", f"--id={gpu}"),
                *("--format=csv,noheader,nounits", "--loop-ms=500"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the sampling."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()

    def figures(self, *, since: float) -> dict[str, Any]:
        """Return the median of each figure since a time, and the most memory of the whole run."""
        counted = [row for at, row in self._rows if at >= since]
        if not counted:
            return {**dict.fromkeys(_SAMPLED), "used": None}
        medians = [statistics.median(column) for column in zip(*counted, strict=True)]
        used = max(row[-1] for _, row in self._rows)
        return {**dict(zip(_SAMPLED, medians, strict=False)), "used": int(used * 2**20)}

    def _follow(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a figure that this GPU does not have
                self._rows.append((time.perf_counter(), [float(cell) for cell in line.split(",")]))
