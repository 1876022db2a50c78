"""The trackers of a run: TensorBoard, and the others of Accelerate such as W&B."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    TensorBoardTracker,
    get_available_trackers,
)
from transformers import PreTrainedModel

from llm.checkpoint.run_folder import RunFolder
from llm.config.toml import to_toml
from llm.errors import ConfigError, one_line
from llm.metrics.hardware import device_peak_flops
from llm.metrics.tracker import Tracker
from llm.models.sizes import flops_per_token
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.files import write_whole
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.run_setup import TrainSetup

DEFAULT_PROJECT = "llm"


def check_trackers(config: CoreConfig) -> None:
    """Refuse a tracker that Accelerate does not have, or that lacks its package.

    Raises:
        ConfigError: Names the tracker.
    """
    available = {str(tracker) for tracker in get_available_trackers()}
    for name in config.report_to:
        if name != "none" and name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(
                f"--report_to {name} is not a tracker; choose from "
                f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))} and none."
            )
        if name != "none" and name not in available:
            raise ConfigError(
                f"--report_to {name} needs a package that is missing: pip install {name}."
            )


def connect_trackers(config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy) -> None:
    """Open the trackers of `report_to`, except TensorBoard.

    Raises:
        ConfigError: A tracker's library refuses the run; gives its reason.
    """
    accelerator = strategy.accelerator
    names = [name for name in config.report_to if name not in ("none", "tensorboard")]
    accelerator.project_configuration.set_directories(str(setup.run.path))
    accelerator.log_with = names
    project, arguments = wandb_arguments(config, setup.run)
    try:
        if names:
            accelerator.init_trackers(project, init_kwargs={"wandb": arguments})
    except Exception as error:  # an error of the tracker's library, such as a missing login
        raise ConfigError(
            f"--report_to {' '.join(config.report_to)}: {one_line(error)}. Fix that, or leave the "
            "tracker out."
        ) from error
    for tracker in accelerator.trackers:
        tracker.store_init_configuration(dataclasses.asdict(config))


def open_tensorboard(config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy) -> None:
    """Open TensorBoard's files in the run's folder; rank 0 calls it."""
    if "tensorboard" not in config.report_to:
        return
    step = setup.start.step if setup.start else 0
    # TensorBoard drops the points of an earlier start from this step on, so no step appears twice.
    # The points of the checkpoint's step were written before it was saved.
    board = TensorBoardTracker("tensorboard", setup.run.path, purge_step=step + 1)
    board.start()
    board.writer.add_text("config", f"```\n{to_toml(config)}\n```", step)
    _write_hyperparameters(board.writer, config)
    strategy.accelerator.trackers.append(board)


def make_tracker(
    config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> Tracker:
    """Return the run's Tracker; it reports to the trackers that are open by then."""

    def find_peak_flops() -> float:
        if config.device_peak_tflops is not None:
            return config.device_peak_tflops * 1e12 * strategy.world_size
        return (
            device_peak_flops(strategy.device, config.mixed_precision or "no") * strategy.world_size
        )

    return Tracker(
        metrics_path=setup.run.metrics if strategy.rank == 0 else None,
        log_to_trackers=lambda values, step: strategy.accelerator.log(values, step=step),
        device=strategy.device,
        total_steps=setup.plan.total_steps,
        flops_per_token=flops_per_token(model, block_size=setup.block_size),
        find_peak_flops=find_peak_flops,
    )


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


def forget_points(strategy: AcceleratedStrategy, *, after: int) -> None:
    """Let TensorBoard drop the points after a step, for example when a run resumes."""
    for tracker in strategy.accelerator.trackers:
        if tracker.name == "tensorboard":
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            start = SessionLog(status=SessionLog.START)
            tracker.writer.file_writer.add_event(Event(step=after + 1, session_log=start))


def wandb_arguments(config: CoreConfig, run: RunFolder) -> tuple[str, dict[str, Any]]:
    """Return the project of a run in its trackers, and the other arguments of `wandb.init`.

    The project is `project_name`. With W&B it is by default the project of the run in the folder,
    else `WANDB_PROJECT`, and W&B writes into the run's folder.
    """
    if "wandb" not in config.report_to:
        return config.project_name or DEFAULT_PROJECT, {}
    former: dict[str, str] = {}
    if not config.overwrite_output_dir:
        with contextlib.suppress(OSError, ValueError):  # missing, or cut short by a kill
            former = json.loads(run.wandb.read_text(encoding="utf-8"))
    default = former.get("project") or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
    project = config.project_name or default
    arguments: dict[str, Any] = {"dir": str(run.path)}
    if former.get("project") == project:
        arguments |= {"id": former["id"], "resume": "allow"}
    return project, arguments


def remember_wandb(run: RunFolder, trackers: Sequence[Any]) -> None:
    """Write the id of the W&B run into the run's folder, for a resume; rank 0 calls it.

    Args:
        run: The run's folder.
        trackers: Accelerate's open trackers.
    """
    for tracker in trackers:
        if tracker.name == "wandb":
            run.wandb.parent.mkdir(exist_ok=True)
            record = {"project": tracker.run_name, "id": tracker.run.id}
            write_whole(run.wandb, json.dumps(record) + "\n")
