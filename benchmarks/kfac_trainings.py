"""Trainings of `benchmarks.kfac`, as processes that end with it; finished ones are kept."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kfac_report import StepTimes
from benchmarks.measure import say
from llm.errors import LLMError

ROOT = Path(__file__).parent.parent


class Trainings:
    """Runs trainings as processes, several at a time.

    Args:
        common: The settings that all trainings share.
        jobs: Trainings at once.
        kept: File with a line for each finished training, which is not run again; None keeps none.
    """

    def __init__(self, common: dict[str, Any], *, jobs: int, kept: Path | None) -> None:
        self._common, self._jobs, self._kept = common, jobs, kept
        self._lock = threading.Lock()
        self._finished: dict[str, float] = {}
        if kept is not None and kept.exists():
            lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
            # A line without its end is that of a benchmark which was killed as it wrote.
            self._finished = dict(json.loads(line) for line in lines if line.endswith("\n"))
            kept.write_text("".join(line for line in lines if line.endswith("\n")), "utf-8")

    def run(self, cases: Sequence[dict[str, Any]]) -> list[float]:
        """Train each case; return the validation losses in the same order."""
        keys = [json.dumps(self._common | case, sort_keys=True) for case in cases]
        wanted = deque(key for key in dict.fromkeys(keys) if key not in self._finished)
        if len(wanted) < len(cases):
            say(f"{len(cases) - len(wanted)} of {len(cases)} trainings: kept")

        def train(process: _Process) -> None:
            while True:
                try:
                    key = wanted.popleft()
                except IndexError:  # also if another thread took the last one
                    return
                self._keep(key, process.ask("train", json.loads(key)))

        # Left in the other order: processes end before threads, so none waits for its training.
        with ThreadPoolExecutor(self._jobs) as pool, contextlib.ExitStack() as processes:
            processes.callback(wanted.clear)
            jobs = [
                pool.submit(train, processes.enter_context(_Process(threads=1)))
                for _ in range(min(self._jobs, len(wanted)))
            ]
            for job in jobs:
                job.result()
        return [self._finished[key] for key in keys]

    def _keep(self, key: str, loss: float) -> None:
        with self._lock:
            self._finished[key] = loss
            say(f"{key}: {loss:.4f}")
            if self._kept is not None:
                with self._kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, loss]) + "\n")

    def steps(self, case: dict[str, Any], *, threads: int | None = None) -> StepTimes:
        """Time the steps of all methods of a case, by default with all threads."""
        # The rate keeps the weights as they are: learning single samples by heart would saturate
        # the softmax, whose denormals slow a CPU down for one method and not for another.
        case = self._common | case | {"learning_rate": 1e-6, "betas": (0.9, 0.95), "seed": 0}
        with _Process(threads=threads) as process:
            taken: StepTimes = process.ask("steps", case)
            return taken


class _Process:
    """A process of `benchmarks.kfac_run`, which ends with its input and so with this one."""

    def __init__(self, *, threads: int | None) -> None:
        limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kfac_run"],
            env={**os.environ, "PYTHONPATH": str(ROOT), **limit},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, task: str, case: dict[str, Any]) -> Any:
        """Return the answer to a task.

        Raises:
            LLMError: The process has failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([task, case]) + "\n")
        self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        raise LLMError(f"{task} of {case} failed: {self._errors.read().strip()[-600:]}")
