"""The trackers of a run: W&B, TensorBoard, and Accelerate's others."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker, get_available_trackers
from transformers import PreTrainedModel

from llm.checkpoint.run_folder import RunFolder
from llm.config.toml import to_toml
from llm.errors import ConfigError, one_line
from llm.metrics.hardware import device_peak_flops
from llm.metrics.prometheus import PrometheusFile
from llm.metrics.reporter import MetricsReporter
from llm.models.sizes import flops_per_token
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.files import write_whole
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.training_run import TrainingRun

_DEFAULT_PROJECT = "llm"


def make_reporter(
    run: TrainingRun, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> MetricsReporter:
    """Return the run's MetricsReporter; it reports to the trackers that are open by then."""
    prometheus_file = None
    if strategy.rank == 0 and run.config.metrics_file is not None:
        metrics_file = Path(run.config.metrics_file)
        prometheus_file = PrometheusFile(metrics_file, output_dir=run.folder.path)
    return MetricsReporter(
        metrics_path=run.folder.metrics if strategy.rank == 0 else None,
        log_to_trackers=lambda values, step: strategy.accelerator.log(values, step=step),
        device=strategy.device,
        total_steps=run.batch_plan.total_steps,
        flops_per_token=flops_per_token(model, block_size=run.block_size),
        find_peak_flops=partial(_find_peak_flops, run.config, strategy),
        prometheus_file=prometheus_file,
    )


def _find_peak_flops(config: CoreConfig, strategy: AcceleratedStrategy) -> float:
    """Return the largest FLOP/s of all devices together, from the option or the device's name."""
    if config.device_peak_tflops is not None:
        return config.device_peak_tflops * 1e12 * strategy.world_size
    precision = config.mixed_precision or "no"
    return device_peak_flops(strategy.device, precision) * strategy.world_size


def check_trackers(config: CoreConfig) -> None:
    """Refuse a tracker that Accelerate does not have, or that lacks its package.

    Raises:
        ConfigError: Names the tracker.
    """
    available_names = {str(tracker) for tracker in get_available_trackers()}
    for name in config.report_to:
        if name != "none" and name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(
                f"--report_to {name} is not a tracker of the installed Accelerate; choose from "
                f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))} and none."
            )
        if name != "none" and name not in available_names:
            raise ConfigError(
                f"--report_to {name} needs a package that is missing: pip install {name}."
            )


def connect_trackers(run: TrainingRun, strategy: AcceleratedStrategy) -> None:
    """Open the trackers of `report_to`, except TensorBoard.

    Raises:
        ConfigError: A tracker's library refuses the run; gives its reason.
    """
    accelerator = strategy.accelerator
    names = [name for name in run.config.report_to if name not in ("none", "tensorboard")]
    accelerator.project_configuration.set_directories(str(run.folder.path))
    accelerator.log_with = names
    project, arguments = _choose_wandb_arguments(run.config, run.folder)
    try:
        if names:
            accelerator.init_trackers(project, init_kwargs={"wandb": arguments})
    except Exception as error:  # an error of the tracker's library, such as a missing login
        raise ConfigError(
            f"--report_to {' '.join(run.config.report_to)}: {one_line(error)}. Fix that, or leave "
            "the tracker out."
        ) from error
    for tracker in accelerator.trackers:
        tracker.store_init_configuration(dataclasses.asdict(run.config))


def _choose_wandb_arguments(config: CoreConfig, folder: RunFolder) -> tuple[str, dict[str, Any]]:
    """Return the project of a run in its trackers, and the other arguments of `wandb.init`.

    The project is `project_name`. With W&B it is by default the project of the run in the folder,
    else `WANDB_PROJECT`, and W&B writes into the run's folder.
    """
    if "wandb" not in config.report_to:
        return config.project_name or _DEFAULT_PROJECT, {}
    saved_run = {} if config.overwrite_output_dir else _read_wandb_run(folder)
    default_project = saved_run.get("project") or os.environ.get("WANDB_PROJECT")
    project = config.project_name or default_project or _DEFAULT_PROJECT
    arguments: dict[str, Any] = {"dir": str(folder.path)}
    if saved_run.get("project") == project and "id" in saved_run:
        arguments |= {"id": saved_run["id"], "resume": "allow"}
    return project, arguments


def _read_wandb_run(folder: RunFolder) -> dict[str, str]:
    """Return project and id of the W&B run in a run's folder; empty if there is none."""
    try:
        record = json.loads(folder.wandb.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    # A file that `save_wandb_run_id` has not written is ignored.
    is_valid = isinstance(record, dict) and {*map(type, record.values())} == {str}
    return record if is_valid else {}


def save_wandb_run_id(folder: RunFolder, trackers: Sequence[Any]) -> None:
    """Write the id of the W&B run into the run's folder, for a resume; rank 0 calls it."""
    for tracker in trackers:
        if tracker.name == "wandb":
            folder.wandb.parent.mkdir(exist_ok=True)
            record = {"project": tracker.run_name, "id": tracker.run.id}
            write_whole(folder.wandb, json.dumps(record) + "\n")


def open_tensorboard(run: TrainingRun, strategy: AcceleratedStrategy) -> None:
    """Open TensorBoard's files in the run's folder; rank 0 calls it."""
    if "tensorboard" not in run.config.report_to:
        return
    step = run.start.step if run.start else 0
    # TensorBoard drops the points of an earlier start from this step on, so no step appears twice.
    # The points of the checkpoint's step were written before it was saved.
    tensorboard = TensorBoardTracker("tensorboard", run.folder.path, purge_step=step + 1)
    tensorboard.start()
    tensorboard.writer.add_text("config", f"```\n{to_toml(run.config)}\n```", step)
    _write_hyperparameters(tensorboard.writer, run.config)
    strategy.accelerator.trackers.append(tensorboard)


def _write_hyperparameters(writer: Any, config: CoreConfig) -> None:
    """Fill TensorBoard's table of runs, in the same files as the curves."""
    from torch.utils.tensorboard.summary import hparams

    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in dataclasses.asdict(config).items()
        if value not in (None, ())
    }
    # The table reads the curves with these names; the zeros are never shown.
    for summary in hparams(values, {"eval/loss": 0.0, "train/loss": 0.0}):
        writer.file_writer.add_summary(summary)


def drop_tensorboard_points(strategy: AcceleratedStrategy, *, step: int) -> None:
    """Let TensorBoard drop the points after a step, for example when a run resumes."""
    for tracker in strategy.accelerator.trackers:
        if tracker.name == "tensorboard":
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            start = SessionLog(status=SessionLog.START)
            with contextlib.suppress(Exception):  # `MetricsReporter.write` warns of a full disk
                tracker.writer.file_writer.add_event(Event(step=step + 1, session_log=start))
