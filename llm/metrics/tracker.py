"""What a run says about itself: console line, progress bar, metrics.jsonl, trackers."""

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from llm.runtime.files import sync, write_whole
from llm.runtime.logging import event

logger = logging.getLogger("llm")


class Tracker:
    """Writes the metrics of a run; only the main process does.

    Args:
        metrics_path: `metrics.jsonl`; None writes nothing at all (other ranks).
        log_to_trackers: Takes values and step, such as `Accelerator.log`.
        total_steps: Steps of the whole run.
        flops_per_token: Floating-point operations of one token, forward and backward.
        find_peak_flops: FLOP/s of all devices together at best; may take a moment to find out,
            and is asked once, after the first steps.
        memory_in_use: Says how many bytes this process has taken, None where nobody knows.
    """

    def __init__(
        self,
        *,
        metrics_path: Path | None,
        log_to_trackers: Callable[[dict[str, float], int], None],
        total_steps: int,
        flops_per_token: float,
        find_peak_flops: Callable[[], float],
        memory_in_use: Callable[[], int | None],
    ) -> None:
        self._path = metrics_path
        self._file = None if metrics_path is None else metrics_path.open("a", encoding="utf-8")
        self._log_to_trackers = log_to_trackers
        self._total_steps = total_steps
        self._flops_per_token = flops_per_token
        self._find_peak_flops = find_peak_flops
        self._peak_flops: float | None = None
        self._memory_in_use = memory_in_use
        self._record: dict[str, Any] = {}
        self._before: str | None = None  # all lines but the one that is written anew
        self._bar: Any = None

    def start(self, *, step: int, tokens: int, seconds: float) -> None:
        """Begin to measure time, and show a progress bar when someone looks."""
        if self._file is not None:
            self._bar = tqdm(
                total=self._total_steps,
                initial=step,
                unit="step",
                dynamic_ncols=True,
                disable=not sys.stderr.isatty(),
            )
        self._interval_tokens = tokens
        self._interval_step = step
        self._seconds_before = seconds
        self._started = time.perf_counter()
        self._data_wait = 0.0

    def seconds(self) -> float:
        """Seconds trained so far, over all starts of the run."""
        return self._seconds_before + time.perf_counter() - self._started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the throughput what happens inside: evaluation, saving."""
        began = time.perf_counter()
        yield
        self._started += time.perf_counter() - began

    def waited_for_data(self, seconds: float) -> None:
        """Count time in which the step had no data."""
        self._data_wait += seconds

    def step_done(self, step: int) -> None:
        """Move the progress bar."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log_training(
        self,
        values: dict[str, float],
        *,
        step: int,
        samples: int,
        tokens: int,
        learning_rate: float,
        loss_scale: float,
        global_batch_size: int,
    ) -> None:
        """Report the interval that ends with a step.

        Args:
            values: What `Meter.read` gave.
            step: Steps done.
            samples: Samples consumed by all ranks.
            tokens: Tokens consumed by all ranks.
            learning_rate: Rate of the last step.
            loss_scale: Loss scale of the last step.
            global_batch_size: Samples of a step.
        """
        if self._peak_flops is None:
            with self.paused():
                self._peak_flops = self._find_peak_flops()
        now = time.perf_counter()
        elapsed = now - self._started
        tokens_per_second = (tokens - self._interval_tokens) / elapsed
        flops = tokens_per_second * self._flops_per_token
        # No step is faster than the devices: the peak was measured, or given, too low.
        self._peak_flops = max(self._peak_flops, flops)
        ms_per_step = 1000 * elapsed / max(1, step - self._interval_step)
        record = {
            "loss": values["loss"],
            "learning_rate": learning_rate,
            "grad_norm": values["grad_norm"],
            "loss_scale": loss_scale,
            "skipped_steps": int(values["skipped_steps"]),
            "nan_steps": int(values["nan_steps"]),
            "tokens_per_second": tokens_per_second,
            "ms_per_step": ms_per_step,
            "data_wait": self._data_wait / elapsed,
            "samples": samples,
            "tokens": tokens,
            "seconds": self._seconds_before + elapsed,
            "mfu": flops / self._peak_flops,
        }
        memory = self._memory_in_use()
        if memory is not None:
            record["memory"] = memory
        self._add(step, record, group="train")
        logger.info(self._console_line(record, step=step, global_batch_size=global_batch_size))
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {values['loss']:.3f}, {tokens_per_second:.0f} tok/s")
        self._seconds_before += elapsed
        self._started, self._data_wait = now, 0.0
        self._interval_step, self._interval_tokens = step, tokens

    def _console_line(self, record: dict[str, Any], *, step: int, global_batch_size: int) -> str:
        """What Megatron-LM's log says of a step, in its words."""
        return " | ".join(
            [
                f"step {step:8d}/{self._total_steps:8d}",
                f"consumed samples: {record['samples']:12d}",
                f"ms per step: {record['ms_per_step']:.1f}",
                f"tokens/s: {record['tokens_per_second']:.0f}",
                f"MFU: {record['mfu']:.1%}",
                f"learning rate: {record['learning_rate']:.6E}",
                f"global batch size: {global_batch_size:5d}",
                f"lm loss: {record['loss']:.6E}",
                f"loss scale: {record['loss_scale']:.1f}",
                f"grad norm: {record['grad_norm']:.3f}",
                f"skipped steps: {record['skipped_steps']:3d}",
                f"nan steps: {record['nan_steps']:3d}",
            ]
        )

    def log_kfac(self, values: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Report K-FAC's health at a step that is reported."""
        record = {f"kfac_{name}": float(value) for name, value in values.items()}
        self._add(step, record, group="kfac")

    def log_evaluation(
        self, results: dict[str, float], *, step: int, training: Sequence[str] = ()
    ) -> None:
        """Report an evaluation's results, on the console with words on the training until it."""
        self._add(step, {f"eval_{name}": value for name, value in results.items()}, group="eval")
        words = [f"{name}: {value:.6g}" for name, value in results.items()]
        line = " | ".join([f"validation at step {step}", *words, *training])
        logger.info(line, extra=event("evaluation", step=step, loss=results["loss"]))

    def _add(self, step: int, record: dict[str, Any], *, group: str) -> None:
        self._record.update(record)
        scalars = {f"{group}/{name.removeprefix(f'{group}_')}": v for name, v in record.items()}
        self._log_to_trackers(scalars, step)

    def resume(self, step: int, *, evaluates: bool) -> None:
        """Tell the trackers again what an earlier start has reported of the step to go on from.

        They forget that step as they are opened, for it may get an evaluation.

        Args:
            step: Steps done.
            evaluates: Whether the step's evaluation comes now: what is reported next joins the
                line that the step has, in place of an evaluation that may stand there.
        """
        lines = [] if self._path is None else self._path.read_text(encoding="utf-8").splitlines()
        if not lines or json.loads(lines[-1])["step"] != step:
            return
        for name, value in json.loads(lines[-1]).items():
            group = next((g for g in ("eval", "kfac") if name.startswith(f"{g}_")), "train")
            if name != "step" and not (evaluates and group == "eval"):
                self._add(step, {name: math.nan if value is None else value}, group=group)
        if evaluates:
            self._before = "".join(f"{line}\n" for line in lines[:-1])
        else:
            self._record = {}

    def commit(self, step: int) -> None:
        """Write what was reported for a step as one line, and see it on disk."""
        if self._record and self._path is not None and self._file is not None:
            values = {name: _json_safe(value) for name, value in self._record.items()}
            line = json.dumps({"step": step} | values) + "\n"
            if self._before is None:
                self._file.write(line)
                sync(self._file)
            else:
                self._file.close()
                write_whole(self._path, self._before + line)
                self._file, self._before = self._path.open("a", encoding="utf-8"), None
        self._record = {}

    def close(self) -> None:
        """End the progress bar and close the file."""
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()


def _json_safe(value: Any) -> Any:
    """Non-finite numbers have no JSON; they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
