"""Profile some steps of a run with PyTorch's profiler: writes a trace and a short table.

The trace opens in Perfetto or chrome://tracing.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from llm.data.loader import StepBatch
from llm.errors import one_line
from llm.runtime.files import write_whole
from llm.trainers.gpt.seams import LoopExtension

logger = logging.getLogger("llm")

# An operation belongs to the first class with a word in its name, or in the name of an operation
# that calls it.
_CLASSES = (
    (
        "communication",
        ("c10d", "gloo", "nccl", "allreduce", "all_reduce", "DistributedDataParallel"),
    ),
    ("loss", ("ChunkedCrossEntropy", "cross_entropy", "log_softmax", "nll_loss")),
    ("optimizer", ("Optimizer.step", "_fused_adam", "_foreach_", "linalg_vector_norm")),
    ("attention", ("scaled_dot_product", "flash", "softmax")),
    ("matmul", ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "gemm")),
)
_OTHER, _WAITING = "other operations", "waiting"
_DEVICES = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}


class StepProfiler(LoopExtension):
    """Profiles the steps start + 1 to stop.

    Args:
        span: (start, stop).
        folder: Folder of the traces and the table.
        rank: Rank of this process; every rank writes a trace, rank 0 also the table.
        device: Device of the model.
        paused: Returns a context with time that does not count as training.
    """

    def __init__(
        self,
        span: tuple[int, int],
        *,
        folder: Path,
        rank: int,
        device: torch.device,
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._start, self._stop = span
        self._folder = folder
        self._rank = rank
        self._on_gpu = device.type in _DEVICES
        self._activities = [ProfilerActivity.CPU, *_DEVICES.get(device.type, ())]
        self._profile: Any = None
        self._paused = paused

    def before_step(self, step: int) -> None:
        """Start the profile if it begins with the next step.

        Args:
            step: Steps done.
        """
        if step != self._start or self._profile is not None:  # a rewind repeats steps
            return
        if self._on_gpu:
            torch.accelerator.synchronize()
        self._profile = profile(activities=self._activities)
        self._profile.__enter__()
        self._began = time.perf_counter()

    def after_step(self, step: int, batch: StepBatch) -> None:
        """Stop and write the profile if it ends with this step."""
        if step != self._stop or self._profile is None:
            return
        if self._on_gpu:
            torch.accelerator.synchronize()
        self._seconds = time.perf_counter() - self._began
        self._profile.__exit__(None, None, None)
        with self._paused():
            self._write_profile()

    def close(self) -> None:
        """Log after the last step if this start has not seen the whole span."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
        if self._stop >= 0 and self._rank == 0:
            logger.info(
                f"--profile {self._start}:{self._stop}: this start did not train all of these "
                "steps, and nothing was written."
            )

    def _write_profile(self) -> None:
        """Write the trace, and on rank 0 the table; an error does not end the training."""
        try:
            self._write_files()
        except Exception as error:  # the profiler's library and its file format raise their own
            logger.warning(f"The profile cannot be written to {self._folder} ({one_line(error)}).")
        self._profile, self._start, self._stop = None, -1, -1

    def _write_files(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank{self._rank}.trace.json.gz"
        self._profile.export_chrome_trace(str(trace))
        if self._rank == 0:
            busy = time_by_class(self._profile.events(), on_gpu=self._on_gpu)
            lines = table(busy, self._seconds, steps=self._stop - self._start)
            write_whole(self._folder / "profile.txt", "\n".join(lines) + "\n")
            logger.info("\n".join([*lines, f"trace: {trace}"]))


def time_by_class(events: Iterable[Any], *, on_gpu: bool) -> dict[str, float]:
    """Return the seconds of a profile's operations by class.

    Args:
        events: The profile's events. Their self times exclude the operations that they call.
        on_gpu: Count the device's time instead of the host's.
    """
    busy = dict.fromkeys((*(name for name, _ in _CLASSES), _OTHER), 0.0)
    for event in events:
        if event.device_type.name != "CPU":
            continue  # a kernel; its time counts for the operation that launched it
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        busy[_class_of(event)] += microseconds / 1e6
    return busy


def _class_of(event: Any) -> str:
    names = []
    while event is not None:
        names.append(str(event.name))
        event = event.cpu_parent
    for name, keywords in _CLASSES:
        if any(keyword in text for text in names for keyword in keywords):
            return name
    return _OTHER


def table(busy: dict[str, float], seconds: float, *, steps: int) -> list[str]:
    """Return the lines of the table; time without operations is waiting, for data or Python.

    Args:
        busy: Seconds by class, from `time_by_class`.
        seconds: Seconds of all steps.
        steps: Number of steps.
    """
    rows = {**busy, _WAITING: max(0.0, seconds - sum(busy.values()))}
    total = sum(rows.values())
    lines = [f"profile of {steps} steps, {1000 * seconds / steps:.1f} ms each:"]
    for name, share in sorted(rows.items(), key=lambda row: -row[1]):
        lines.append(f"  {name:<18}{1000 * share / steps:>10.1f} ms{share / total:>8.1%}")
    return lines
