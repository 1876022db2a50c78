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
_KEYWORDS_BY_CLASS = (
    (
        "communication",
        ("c10d", "gloo", "nccl", "allreduce", "all_reduce", "DistributedDataParallel"),
    ),
    ("loss", ("ChunkedCrossEntropy", "cross_entropy", "log_softmax", "nll_loss")),
    ("optimizer", ("Optimizer.step", "_fused_adam", "_foreach_", "linalg_vector_norm")),
    ("attention", ("scaled_dot_product", "flash", "softmax")),
    ("matmul", ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "gemm")),
)
_OTHER_CLASS, _WAITING_CLASS = "other operations", "waiting"
_ACTIVITIES_BY_DEVICE = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}


class StepProfiler(LoopExtension):
    """Profiles some steps.

    Args:
        step_range: The steps, counted from 0.
        folder: Folder of the traces and the table.
        rank: Rank of this process; every rank writes a trace, rank 0 also the table.
        device: Device of the model.
        paused: Returns a context with time that does not count as training.
    """

    def __init__(
        self,
        step_range: range,
        *,
        folder: Path,
        rank: int,
        device: torch.device,
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._start_step, self._stop_step = step_range.start, step_range.stop
        self._folder = folder
        self._rank = rank
        self._is_on_gpu = device.type in _ACTIVITIES_BY_DEVICE
        self._activities = [ProfilerActivity.CPU, *_ACTIVITIES_BY_DEVICE.get(device.type, ())]
        self._profile: Any = None
        self._paused = paused

    def before_step(self, step: int) -> None:
        """Start the profile if it begins with the next step."""
        if step != self._start_step or self._profile is not None:  # a rewind repeats steps
            return
        if self._is_on_gpu:
            torch.accelerator.synchronize()
        self._profile = profile(activities=self._activities)
        self._profile.__enter__()
        self._start_time = time.perf_counter()

    def after_step(self, step: int, batch: StepBatch) -> None:
        """Stop and write the profile if it ends with this step."""
        if step != self._stop_step or self._profile is None:
            return
        if self._is_on_gpu:
            torch.accelerator.synchronize()
        self._profile_seconds = time.perf_counter() - self._start_time
        self._profile.__exit__(None, None, None)
        with self._paused():
            self._write_profile()

    def close(self) -> None:
        """Log after the last step if this start did not train all of the steps to profile."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
        if self._stop_step >= 0 and self._rank == 0:
            logger.info(
                f"--profile {self._start_step}:{self._stop_step}: this start did not train all of "
                "these steps, and nothing was written."
            )

    def _write_profile(self) -> None:
        """Write the trace, and on rank 0 the table; an error does not end the training."""
        try:
            self._write_trace_and_table()
        except Exception as error:  # the profiler's library and its file format raise their own
            logger.warning(f"The profile cannot be written to {self._folder} ({one_line(error)}).")
        self._profile, self._start_step, self._stop_step = None, -1, -1

    def _write_trace_and_table(self) -> None:
        """Write the trace of this rank, and on rank 0 write and log the table."""
        self._folder.mkdir(parents=True, exist_ok=True)
        trace_path = self._folder / f"rank{self._rank}.trace.json.gz"
        self._profile.export_chrome_trace(str(trace_path))
        if self._rank == 0:
            class_seconds = sum_seconds_by_class(self._profile.events(), on_gpu=self._is_on_gpu)
            num_steps = self._stop_step - self._start_step
            lines = format_table(class_seconds, self._profile_seconds, num_steps=num_steps)
            write_whole(self._folder / "profile.txt", "\n".join(lines) + "\n")
            logger.info("\n".join([*lines, f"trace: {trace_path}"]))


def sum_seconds_by_class(events: Iterable[Any], *, on_gpu: bool) -> dict[str, float]:
    """Return the seconds of a profile's operations by class.

    Args:
        events: The profile's events. Their self times exclude the operations that they call.
        on_gpu: Count the device's time instead of the host's.
    """
    class_seconds = dict.fromkeys((*(name for name, _ in _KEYWORDS_BY_CLASS), _OTHER_CLASS), 0.0)
    for event in events:
        if event.device_type.name != "CPU":
            continue  # a kernel; its time counts for the operation that launched it
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        class_seconds[_classify_operation(event)] += microseconds / 1e6
    return class_seconds


def _classify_operation(event: Any) -> str:
    """Return the first class with a keyword in the name of an operation or of its callers."""
    call_names = []
    while event is not None:
        call_names.append(str(event.name))
        event = event.cpu_parent
    for class_name, keywords in _KEYWORDS_BY_CLASS:
        if any(keyword in call_name for call_name in call_names for keyword in keywords):
            return class_name
    return _OTHER_CLASS


def format_table(
    class_seconds: dict[str, float], total_seconds: float, *, num_steps: int
) -> list[str]:
    """Return the lines of the table; time without operations counts as waiting for data or Python.

    Args:
        class_seconds: Seconds by class, from `sum_seconds_by_class`.
        total_seconds: Seconds of all steps.
        num_steps: Number of steps.
    """
    waiting_seconds = max(0.0, total_seconds - sum(class_seconds.values()))
    rows = {**class_seconds, _WAITING_CLASS: waiting_seconds}
    total = sum(rows.values())
    lines = [f"profile of {num_steps} steps, {1000 * total_seconds / num_steps:.1f} ms each:"]
    for name, seconds in sorted(rows.items(), key=lambda row: -row[1]):
        milliseconds = 1000 * seconds / num_steps
        lines.append(f"  {name:<18}{milliseconds:>10.1f} ms{seconds / total:>8.1%}")
    return lines
