"""Run programs as whole process trees and measure their CPU time, wall-clock time and memory.

Linux only. The measuring process must stay small, without numpy or torch: a child process inherits
its parent's peak memory from the kernel.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SAMPLE_SECONDS = (
    1.0  # reading a process's page table ten times a second slows a small model by 8 %
)
_LOOK_SECONDS = 0.02
_LINGER_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_LAST_CHARACTERS = 600


class CaseFailed(Exception):
    """A program ended with an error; the message holds the end of its log."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program to measure.

    Attributes:
        name: Its name in tables.
        command: The program and its arguments.
        folder: Its working folder, emptied before every run.
        environment: Variables added to those of the measuring process.
        directory: Working folder of a program that only runs in its own.
        read: Reads figures from the files of a run in `folder`, which include `log.txt`.
        milestone: Pattern of a log line whose time is measured.
    """

    name: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    read: Callable[[Path], dict[str, Any]] | None = None
    milestone: str | None = None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources of a run.

    Attributes:
        cpu_seconds: User and system time of the program and all its descendants.
        wall_seconds: Time from start to end.
        peak_megabytes: The largest sum of the tree's memory, shared pages counted once, in samples
            1 s apart; or the peak of its largest process, if that is more.
        reported: The JSON object in its last line of output, and the figures of `Case.read`;
            `milestone_seconds` is the time from the start to the line of `Case.milestone`.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_megabytes: float
    reported: dict[str, Any]


def run(case: Case) -> Usage:
    """Run a program to its end, and wait for descendants that outlive it.

    Raises:
        CaseFailed: The program could not be started, or ended with an error.
    """
    _adopt_orphans(True)
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir(parents=True)
    log = case.folder / "log.txt"
    begin = time.perf_counter()
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(
                case.command,
                cwd=case.directory or case.folder,
                env={**os.environ, **case.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CaseFailed(f"{case.command[0]}: {error.strerror}") from error
    sampler = _MemorySampler(process.pid)
    watcher = _LogWatcher(log, case.milestone, begin)
    try:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - begin
        cpu, largest = usage.ru_utime + usage.ru_stime, usage.ru_maxrss
        for orphan in _orphans(process.pid):
            cpu += orphan.ru_utime + orphan.ru_stime
            largest = max(largest, orphan.ru_maxrss)
    finally:
        _kill_group(process.pid)
        _adopt_orphans(False)
        sampled = sampler.stop()
        reached = watcher.stop()
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    if process.returncode:
        raise CaseFailed(f"exit code {process.returncode}: ...{text[-_LAST_CHARACTERS:]}")
    reported = _last_object(text) | ({} if case.read is None else case.read(case.folder))
    if reached is not None:
        reported["milestone_seconds"] = reached
    return Usage(
        cpu_seconds=cpu,
        wall_seconds=wall,
        peak_megabytes=max(sampled, largest) * 1024 / 1e6,
        reported=reported,
    )


def search_path(root: Path) -> str:
    """Return the PYTHONPATH of this process with a folder before it.

    Packages may be in a folder that only this variable names, as on a machine without a registry.
    """
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


def say(message: str) -> None:
    """Print progress to the standard error stream, apart from the report."""
    print(message, file=sys.stderr, flush=True)


def interleave(
    cases: Sequence[Case], repeats: int, say: Callable[[str], None] = say
) -> dict[str, list[Usage]]:
    """Run A B C A B C ..., so that a machine that slows down slows all programs.

    Args:
        cases: The programs. One that fails is left out from then on.
        repeats: Runs of each.
        say: Reports every run.

    Returns:
        The runs of each program by its name; none for one that failed.
    """
    results: dict[str, list[Usage]] = {case.name: [] for case in cases}
    failed: set[str] = set()
    for number in range(repeats):
        for case in cases:
            if case.name in failed:
                continue
            try:
                usage = run(case)
            except CaseFailed as error:
                say(f"{case.name} FAILED and is left out: {error}")
                failed.add(case.name)
                results[case.name].clear()
                continue
            results[case.name].append(usage)
            say(
                f"{number + 1}/{repeats} {case.name}: {usage.cpu_seconds:.2f} CPU-s, "
                f"{usage.wall_seconds:.2f} s, {usage.peak_megabytes:.0f} MB {_brief(usage)}"
            )
    return results


def figures(runs: Sequence[Usage], name: str) -> list[float]:
    """Return a figure of all runs: as the program reported it, else as it was measured."""
    return [float(run.reported.get(name, getattr(run, name, float("nan")))) for run in runs]


def median(runs: Sequence[Usage], name: str) -> float:
    """Return the median of a figure over the runs."""
    return statistics.median(figures(runs, name))


def _brief(usage: Usage) -> str:
    return json.dumps(usage.reported) if usage.reported else ""


def _adopt_orphans(adopt: bool) -> None:
    # Without this a descendant that outlives its parent becomes init's child: its time is lost.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _orphans(group: int) -> list[Any]:
    """Return the usage of processes of a group that outlived its leader, once they have ended."""
    found: list[Any] = []
    deadline = time.monotonic() + _LINGER_SECONDS
    while True:
        try:
            pid, _, usage = os.wait4(-group, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid:
            found.append(usage)
            continue
        if time.monotonic() > deadline:
            _kill_group(group)
        time.sleep(0.01)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _last_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text.rpartition("\n")[2])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class _LogWatcher:
    """A thread that waits for a line in the log of a program."""

    def __init__(self, log: Path, pattern: str | None, begin: float) -> None:
        self._log = log
        self._pattern = None if pattern is None else re.compile(pattern, re.MULTILINE)
        self._begin = begin
        self._seconds: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """End the thread; return the seconds until the line appeared, or None."""
        self._ended.set()
        self._thread.join()
        return self._seconds

    def _follow(self) -> None:
        while self._pattern is not None and self._seconds is None:
            if self._pattern.search(self._log.read_text(errors="replace")):
                self._seconds = time.perf_counter() - self._begin
            elif self._ended.wait(_LOOK_SECONDS):
                return


class _MemorySampler:
    """A thread that samples the memory of all processes of a session."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the thread; return the peak in KiB."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _follow(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            pids = [name for name in os.listdir("/proc") if name.isdigit()]
            total = sum(_proportional_kib(pid) for pid in pids if self._belongs(pid))
            self._peak = max(self._peak, total)

    def _belongs(self, pid: str) -> bool:
        try:
            # The name in brackets may hold brackets; after it: state, parent, group, session.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return int(fields[3]) == self._session


def _proportional_kib(pid: str) -> int:
    """Return the memory of a process; a page shared by n processes counts 1/n."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:  # it has just ended
        pass
    return 0
