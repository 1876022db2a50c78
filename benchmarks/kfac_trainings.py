"""Trainings of `benchmarks.kfac`, as processes that end with it; finished ones are kept."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kfac_report import Taken
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
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._finished: dict[str, dict[str, Any]] = {}
        if kept is not None and kept.exists():
            lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
            # A line without its end is that of a benchmark which was killed as it wrote.
            self._finished = dict(json.loads(line) for line in lines if line.endswith("\n"))
            kept.write_text("".join(line for line in lines if line.endswith("\n")), "utf-8")

    def run(self, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Train each case; return the results of `benchmarks.kfac_run` in the same order."""
        pool = ThreadPoolExecutor(self._jobs)
        try:
            return list(pool.map(self._run_one, cases))
        finally:
            # Nothing is left to stop unless one has failed, or a signal has arrived.
            with self._lock:
                self._stopped = True
                for process in list(self._running):
                    process.kill()
            pool.shutdown(cancel_futures=True)
            self._stopped = False

    def steps(self, case: dict[str, Any], *, threads: int | None = None) -> Taken:
        """Time the steps of all methods of a case, by default with all threads."""
        # The rate keeps the weights as they are: learning single samples by heart would saturate
        # the softmax, whose denormals slow a CPU down for one method and not for another.
        case = case | {"learning_rate": 1e-6, "seed": 0}
        limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        taken: Taken = self._call("steps", case, limit)
        return taken

    def _run_one(self, case: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(self._common | case, sort_keys=True)
        if key in self._finished:
            say(f"{case}: kept")
            return self._finished[key]
        found: dict[str, Any] = self._call("train", case, {"OMP_NUM_THREADS": "1"})
        say(f"{case}: {found['curve'][-1][1]:.4f}")
        if self._kept is not None:
            with self._lock, self._kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, found]) + "\n")
        return found

    def _call(self, task: str, case: dict[str, Any], threads: dict[str, str]) -> Any:
        command = [sys.executable, "-m", "benchmarks.kfac_run", task]
        command += [json.dumps(self._common | case), "attached"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **threads}
        with tempfile.TemporaryFile("w+") as errors:
            with self._lock:
                if self._stopped:
                    raise LLMError(f"{case} was not begun.")
                # Its input ends when this process does, however it ends; so does the training.
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                self._running.add(process)
            with process:
                assert process.stdout is not None
                output = process.stdout.read()
                code = process.wait()
            self._running.discard(process)
            if code:
                errors.seek(0)
                raise LLMError(f"{case} failed: {errors.read().strip()[-600:]}")
        return json.loads(output.strip().rpartition("\n")[2])
