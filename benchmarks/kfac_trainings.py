"""Trainings as processes that end with their benchmark; the results of finished ones are kept."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kfac_report import StepTimes
from benchmarks.measure import say, search_path
from llm.errors import LLMError

ROOT = Path(__file__).parent.parent


class Trainings:
    """Runs trainings as processes, several at a time.

    Args:
        common: The settings that all trainings share.
        jobs: Trainings at once.
        kept: File with a line for each finished training, which is not run again; None keeps none.
        module: The module of the processes, which calls `serve`.
    """

    def __init__(
        self,
        common: dict[str, Any],
        *,
        jobs: int,
        kept: Path | None,
        module: str = "benchmarks.kfac_run",
    ) -> None:
        self._common, self._jobs, self._kept, self._module = common, jobs, kept, module
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._finished: dict[str, Any] = {}
        if kept is not None and kept.exists():
            lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
            # A line without its end is that of a benchmark which was killed as it wrote.
            self._finished = dict(json.loads(line) for line in lines if line.endswith("\n"))
            kept.write_text("".join(line for line in lines if line.endswith("\n")), "utf-8")

    def run(self, cases: Sequence[dict[str, Any]]) -> list[Any]:
        """Train each case; return the results, such as validation losses, in the same order."""
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

        while len(self._processes) < min(self._jobs, len(wanted)):
            self._processes.append(_Process(self._module, threads=1))
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                for job in [pool.submit(train, process) for process in self._processes]:
                    job.result()
            except BaseException:
                # Processes end before threads, so none waits for its training.
                wanted.clear()
                for process in self._processes:
                    process.close()
                self._processes.clear()
                raise
        return [self._finished[key] for key in keys]

    def _keep(self, key: str, result: Any) -> None:
        with self._lock:
            self._finished[key] = result
            say(f"{key}: {result}")
            if self._kept is not None:
                with self._kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, result]) + "\n")

    def steps(self, case: dict[str, Any], *, threads: int | None = None) -> StepTimes:
        """Time the steps of all methods of a case, by default with all threads."""
        # The rate keeps the weights as they are: learning single samples by heart would saturate
        # the softmax, whose denormals slow a CPU down for one method and not for another.
        case = self._common | case | {"learning_rate": 1e-6, "betas": (0.9, 0.95), "seed": 0}
        with _Process(self._module, threads=threads) as process:
            taken: StepTimes = process.ask("steps", case)
            return taken


class _Process:
    """A process of a module that calls `serve`; it ends with its input and so with this one."""

    def __init__(self, module: str, *, threads: int | None) -> None:
        limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONPATH": search_path(ROOT), **limit},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
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


def serve(tasks: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Answer each line of the input, a task and its settings, by a line.

    The process ends when its input does, also amid a training: then the benchmark has ended.

    Args:
        tasks: Functions of the settings, by task.
    """
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        task, settings = json.loads(lines.get())
        print(json.dumps(tasks[task](settings)), flush=True)
