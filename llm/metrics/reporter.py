"""Reports during training: console line, progress bar, metrics.jsonl, trackers."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from llm.errors import ConfigError, one_line
from llm.metrics.hardware import memory_in_use
from llm.metrics.metrics_file import MetricsFile
from llm.metrics.prometheus import PrometheusFile
from llm.metrics.wall_time import Part, WallTime
from llm.runtime.logging import event, short_form

logger = logging.getLogger("llm")

_INTERVAL_NAMES = frozenset(
    (
        *("step", "loss", "learning_rate", "grad_norm", "loss_scale", "skipped_steps", "nan_steps"),
        *("samples", "tokens", "seconds", "ms_per_step", "tokens_per_second", "data_wait"),
        *("mfu", "memory"),
    )
)
"""Names of the values of a logging interval; only some devices have the last two."""


class MetricsReporter:
    """Reports the metrics of a run; every rank has a reporter, and the main process writes.

    Args:
        metrics_path: `metrics.jsonl`; None on all ranks but the main process.
        log_to_trackers: Function of values and a step, such as `Accelerator.log`.
        device: Device of this process; its memory is reported.
        total_steps: Steps of the whole run.
        flops_per_token: Floating-point operations per token, forward and backward.
        find_peak_flops: Returns the total peak FLOP/s of all devices. It may measure them, so it is
            called once, after the first interval.
        prometheus_file: The file for Prometheus, or None.

    Attributes:
        wall_time: Accounts for the wall time of the run.
    """

    def __init__(
        self,
        *,
        metrics_path: Path | None,
        log_to_trackers: Callable[[dict[str, float], int], None],
        device: torch.device,
        total_steps: int,
        flops_per_token: float,
        find_peak_flops: Callable[[], float],
        prometheus_file: PrometheusFile | None = None,
    ) -> None:
        self._path = metrics_path
        self._log_to_trackers = log_to_trackers
        self._device = device
        self._total_steps = total_steps
        self._flops_per_token = flops_per_token
        self._find_peak_flops = find_peak_flops
        self._prometheus_file = prometheus_file
        self._peak_flops: float | None = None
        self._is_peak_exceeded = False
        self._file: MetricsFile | None = None
        self._progress_bar: Any = None
        self._first_step = 0
        self.wall_time = WallTime()

    def start(self, *, step: int, tokens: int, seconds: float) -> None:
        """Open metrics.jsonl and the progress bar, and start the clock.

        Args:
            step: Steps done. Reports of later steps from an earlier start are removed.
            tokens: Tokens consumed by all ranks.
            seconds: Seconds of training in earlier starts of the run.
        """
        if self._path is not None:
            self._first_step, self._file = step, MetricsFile(self._path, step=step)
            self._progress_bar = tqdm(
                total=self._total_steps,
                initial=step,
                unit="step",
                dynamic_ncols=True,
                disable=not sys.stderr.isatty(),
            )
        self._interval_tokens = tokens
        self._interval_step = step
        self._earlier_seconds = seconds
        self._interval_start = time.perf_counter()
        self._data_wait = 0.0
        self.wall_time.begin_training(seconds=seconds, tokens=tokens)

    def seconds(self) -> float:
        """Return the seconds of training so far, over all starts of the run."""
        return self._earlier_seconds + time.perf_counter() - self._interval_start

    @contextlib.contextmanager
    def paused(self, part: Part = "output") -> Iterator[None]:
        """Exclude the time inside the context from throughput and training time.

        Args:
            part: What the time inside is spent on.
        """
        pause_start = time.perf_counter()
        with self.wall_time.spent_on(part):
            yield
        self._interval_start += time.perf_counter() - pause_start

    def add_data_wait(self, seconds: float) -> None:
        """Add time that the loop waited for a batch."""
        self._data_wait += seconds

    def seconds_per_step(self, step: int) -> float:
        """Return the mean time of a step in the open interval, after `step` steps of the run."""
        return (time.perf_counter() - self._interval_start) / max(1, step - self._interval_step)

    def advance_bar(self, step: int) -> None:
        """Move the progress bar to a step."""
        self._apply_to_bar(lambda bar: bar.update(step - bar.n))

    def log_training(
        self,
        values: Mapping[str, float],
        *,
        extension_values: Sequence[Mapping[str, float]] = (),
        step: int,
        samples: int,
        tokens: int,
        learning_rate: float,
        loss_scale: float,
        global_batch_size: int,
        optimizer: Mapping[str, torch.Tensor],
        columns: Sequence[str] = (),
        rank_times: Mapping[str, float] | None = None,
    ) -> None:
        """Report the logging interval that ends with a step.

        Args:
            values: The result of `Meter.read`.
            extension_values: The values of each extension by name.
            step: Steps done.
            samples: Samples consumed by all ranks.
            tokens: Tokens consumed by all ranks.
            learning_rate: Learning rate of the last step.
            loss_scale: Loss scale of the last step.
            global_batch_size: Samples per step.
            optimizer: Metrics of the optimizer by name.
            columns: Further columns of the line on a terminal.
            rank_times: Times of the median and the slowest rank by name, which are not in the line.

        Raises:
            ConfigError: A value of an extension has the name of another value.
        """
        if self._peak_flops is None:
            with self.paused("start"):
                self._peak_flops = self._find_peak_flops()
        self.wall_time.tokens = tokens
        record = {
            "loss": values["loss"],
            "learning_rate": learning_rate,
            "grad_norm": values["grad_norm"],
            "loss_scale": loss_scale,
            "skipped_steps": int(values["skipped_steps"]),
            "nan_steps": int(values["nan_steps"]),
            "samples": samples,
            "tokens": tokens,
            **self._measure_interval(step=step, tokens=tokens),
        }
        extra_values = {name: value for name, value in values.items() if name not in record}
        record |= {name: float(value) for name, value in optimizer.items()}
        record |= rank_times or {}
        reserved_names = _INTERVAL_NAMES | record.keys() | extra_values.keys()
        extra_values |= _merge_extension_values(extension_values, reserved_names)
        record |= extra_values
        self._output_interval(
            record, extra_values, step=step, global_batch_size=global_batch_size, columns=columns
        )

    def _output_interval(
        self,
        record: dict[str, Any],
        extra_values: Mapping[str, float],
        *,
        step: int,
        global_batch_size: int,
        columns: Sequence[str],
    ) -> None:
        """Write the values of an interval to the files, the log, the trackers and the bar."""
        terminal_line = format_step_line(
            record, step=step, total_steps=self._total_steps, columns=columns
        )
        with self.paused():  # a slow disk does not count as a slow step
            self.write(record, step=step)
            file_line = self._format_megatron_line(
                record, extra_values, step=step, global_batch_size=global_batch_size
            )
            logger.info(file_line, extra=short_form(terminal_line))
        speed = f"{record['tokens_per_second']:.0f} tok/s"
        self._apply_to_bar(lambda bar: bar.set_postfix_str(f"loss {record['loss']:.3f}, {speed}"))

    def _measure_interval(self, *, step: int, tokens: int) -> dict[str, float]:
        """Return time, throughput and memory of the logging interval, and begin the next one."""
        interval_end = time.perf_counter()
        interval_seconds = interval_end - self._interval_start
        tokens_per_second = (tokens - self._interval_tokens) / interval_seconds
        interval_metrics = {
            "tokens_per_second": tokens_per_second,
            "ms_per_step": 1000 * interval_seconds / max(1, step - self._interval_step),
            "data_wait": self._data_wait / interval_seconds,
            "seconds": self._earlier_seconds + interval_seconds,
        }
        mfu = self._compute_mfu(tokens_per_second * self._flops_per_token)
        if mfu is not None:
            interval_metrics["mfu"] = mfu
        memory = memory_in_use(self._device)
        if memory is not None:
            interval_metrics["memory"] = memory
        self._earlier_seconds += interval_seconds
        self._interval_start, self._data_wait = interval_end, 0.0
        self._interval_step, self._interval_tokens = step, tokens
        return interval_metrics

    def _compute_mfu(self, flops: float) -> float | None:
        """Return the fraction of the devices' peak FLOP/s; above it, None and a line in the log."""
        assert self._peak_flops is not None
        if flops <= self._peak_flops:
            return flops / self._peak_flops
        # Steps cannot be faster than the devices, so the measured or given peak is too low.
        if not self._is_peak_exceeded:
            self._is_peak_exceeded = True
            logger.info(
                f"MFU is n/a where steps exceed the peak of {self._peak_flops / 1e12:.3g} TFLOP/s, "
                f"as here at {flops / 1e12:.3g}; --device_peak_tflops sets the peak of a device."
            )
        return None

    def _format_megatron_line(
        self,
        record: dict[str, Any],
        extra_values: Mapping[str, float],
        *,
        step: int,
        global_batch_size: int,
    ) -> str:
        """Return the line of a step in the format of Megatron-LM's log, for files."""
        # A name such as loss/web belongs to a source, so its columns come last.
        columns = {name: f"{name}: {value:.6E}" for name, value in extra_values.items()}
        run_columns = [text.replace("_", " ") for name, text in columns.items() if "/" not in name]
        source_columns = [text for name, text in columns.items() if "/" in name]
        return " | ".join(
            [
                f"step {step:8d}/{self._total_steps:8d}",
                f"consumed samples: {record['samples']:12d}",
                f"ms per step: {record['ms_per_step']:.1f}",
                f"tokens/s: {record['tokens_per_second']:.0f}",
                f"MFU: {record['mfu']:.1%}" if "mfu" in record else "MFU: n/a",
                f"learning rate: {record['learning_rate']:.6E}",
                f"global batch size: {global_batch_size:5d}",
                f"lm loss: {record['loss']:.6E}",
                *run_columns,
                f"loss scale: {record['loss_scale']:.1f}",
                f"grad norm: {record['grad_norm']:.3f}",
                f"skipped steps: {record['skipped_steps']:3d}",
                f"nan steps: {record['nan_steps']:3d}",
                *source_columns,
            ]
        )

    def log_evaluation(
        self, results: dict[str, float], *, step: int, training_columns: Sequence[str] = ()
    ) -> None:
        """Report an evaluation.

        Args:
            results: The results by name.
            step: Steps done.
            training_columns: Statistics of the preceding training, for the log.
        """
        self.write({f"eval_{name}": value for name, value in results.items()}, step=step)
        columns = [f"{name}: {value:.6g}" for name, value in results.items()]
        line = " | ".join([f"validation at step {step}", *columns, *training_columns])
        logger.info(line, extra=event("evaluation", step=step, loss=results["loss"]))

    def write_extension_values(self, values: Mapping[str, float], *, step: int) -> None:
        """Report the values that an extension returns every few steps.

        Raises:
            ConfigError: A value has the name of a value of each logging interval, or is not a
                number.
        """
        self.write(_merge_extension_values([values], _INTERVAL_NAMES), step=step)

    def write(self, record: Mapping[str, float], *, step: int) -> None:
        """Send the values of a report to the trackers, metrics.jsonl and the Prometheus file."""
        # An earlier start may have been killed after it wrote this evaluation's line and points.
        names_in_file = self._file.names_at_start if self._file is not None else set()
        if step == self._first_step and not names_in_file.isdisjoint(record):
            return
        # Write the line last: once it is on disk, a resumed run does not send points again.
        self._send_to_trackers(record, step=step)
        if self._file is not None:
            self._file.append(record, step=step)
        self.wall_time.write()
        if self._prometheus_file is not None:
            position = {"step": step, "total_steps": self._total_steps}
            goodput = self.wall_time.results()["goodput"]
            self._prometheus_file.update({**position, **record, "goodput": goodput})

    def flush(self) -> None:
        """Write the lines of metrics.jsonl that could not be written so far.

        Raises:
            OSError: They still cannot be written.
        """
        if self._file is not None:
            self._file.flush()

    def _send_to_trackers(self, record: Mapping[str, float], *, step: int) -> None:
        """Send values to the trackers; after a failure, warn and send no more."""
        value_by_tag = {_tracker_tag(name): value for name, value in record.items()}
        try:
            self._log_to_trackers(value_by_tag, step)
        except Exception as error:  # such as a full disk, or a server that does not answer
            logger.warning(
                f"The trackers get no more points ({one_line(error)}); metrics.jsonl does."
            )
            self._log_to_trackers = lambda values, step: None

    def _apply_to_bar(self, action: Callable[[Any], object]) -> None:
        """Call a function with the progress bar; remove the bar once the terminal is closed."""
        try:
            if self._progress_bar is not None:
                action(self._progress_bar)
        except Exception:
            with contextlib.suppress(AssertionError, RuntimeError):
                tqdm.get_lock().release()  # tqdm still holds it, and a thread that logs would wait
            self._progress_bar.disable = True
            self._progress_bar = None

    def close(self) -> None:
        """Close the progress bar and the files."""
        self.wall_time.switch("output")
        self.wall_time.write()
        self._apply_to_bar(lambda bar: bar.close())
        if self._file is not None:
            self._file.close()


def _merge_extension_values(
    values_by_extension: Sequence[Mapping[str, float]], reserved_names: Set[str]
) -> dict[str, float]:
    """Return the numbers of all extensions by name; refuse repeated names and other values."""
    merged_values: dict[str, float] = {}
    for values in values_by_extension:
        if repeated_names := sorted(values.keys() & (reserved_names | merged_values.keys())):
            raise ConfigError(
                f"An extension returns the value {repeated_names[0]}, which metrics.jsonl has "
                "already; give it another name in the extension, or leave the extension out."
            )
        for name, value in values.items():
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"An extension returns a value {name} of the type {type(value).__name__}; let "
                    "it return a number, such as tensor.item(), or leave the extension out."
                )
        merged_values |= values
    return merged_values


def format_step_line(
    record: Mapping[str, float], *, step: int, total_steps: int, columns: Sequence[str] = ()
) -> str:
    """Return the line of a step for a terminal, with at most 100 columns.

    Args:
        record: The values of metrics.jsonl.
        step: Steps done.
        total_steps: Steps of the whole run.
        columns: Further columns, before the remaining time.
    """
    step_column = f"step {step:{len(str(total_steps))}}/{total_steps}"
    num_skipped = int(record["skipped_steps"])
    if num_skipped:  # next to the step, since it counts all steps and not the logging interval
        step_column += f", {num_skipped} skipped"
    remaining_seconds = (total_steps - step) * record["ms_per_step"] / 1000
    line_columns = [
        step_column,
        f"loss {record['loss']:.3f}",
        f"lr {_format_scientific(record['learning_rate'])}",
        f"{_format_thousands(record['tokens_per_second'])} tok/s",
        *([f"MFU {record['mfu']:.0%}"] if "mfu" in record else []),
        *columns,
        f"eta {_format_duration(remaining_seconds)}",
    ]
    return "  ".join(line_columns)


def _format_scientific(number: float) -> str:
    """Return a number such as 7.2e-4."""
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if number else "0"


def _format_thousands(number: float) -> str:
    """Return a number such as 478, 16.2k or 1.03M."""
    # Above this, the smaller unit would be rounded up to 1000.
    for threshold, unit, suffix in ((999_950, 1e6, "M"), (999.5, 1e3, "k")):
        if number >= threshold:
            num_digits = 1 if number >= 10 * unit else 2
            return f"{number / unit:.{num_digits}f}{suffix}"
    return f"{number:.0f}"


def _format_duration(seconds: float) -> str:
    """Return a duration such as 0:48, 1:02:03 or 3d 04:05."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def task_values(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the results of tasks under their names in metrics.jsonl: task_TASK/METRIC."""
    return {
        f"task_{task}/{name}": value
        for task, metrics in results.items()
        for name, value in metrics.items()
    }


def _tracker_tag(name: str) -> str:
    """Return the name of a metric in the trackers: eval_loss becomes eval/loss."""
    for group in ("eval", "kfac", "moe", "task"):
        if name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"train/{name.removeprefix('train_')}"
