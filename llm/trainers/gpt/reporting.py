"""What a run tells while it trains: its trackers, and samples of what the model writes."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from transformers import PreTrainedModel

from llm.checkpoint.retention import mark_superseded
from llm.config.toml import to_toml
from llm.errors import DivergedError
from llm.metrics.hardware import device_peak_flops
from llm.metrics.tracker import Tracker
from llm.models.flops import flops_per_token
from llm.models.sampling import sample_text
from llm.parallel.base import AcceleratedStrategy
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.inputs import TrainSetup

SAMPLE_TOKENS = 120

logger = logging.getLogger("llm")


def make_tracker(
    config: GPTConfig, setup: TrainSetup, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> Tracker:
    """Open the trackers, and remove what an earlier start left of later steps."""
    accelerator = strategy.accelerator
    step = setup.resume_from.step if setup.resume_from else 0
    if strategy.rank == 0 and setup.resume_from is not None:
        mark_superseded(setup.run.checkpoints, after=step)
    _open_trackers(config, setup, accelerator, step=step)

    def find_peak_flops() -> float:
        if config.device_peak_tflops is not None:
            return config.device_peak_tflops * 1e12 * strategy.world_size
        return device_peak_flops(strategy.device, config.mixed_precision) * strategy.world_size

    return Tracker(
        metrics_path=setup.run.metrics if strategy.rank == 0 else None,
        log_to_trackers=lambda values, step: accelerator.log(values, step=step),
        device=strategy.device,
        total_steps=setup.plan.total_steps,
        flops_per_token=flops_per_token(model, block_size=setup.block_size),
        find_peak_flops=find_peak_flops,
    )


def _open_trackers(
    config: GPTConfig, setup: TrainSetup, accelerator: Accelerator, *, step: int
) -> None:
    names: list[Any] = [name for name in config.report_to if name != "none"]
    if "tensorboard" in names:
        # TensorBoard drops the points of an earlier start from this step on: no step shows twice.
        # Those of the checkpoint's own step were written before it was saved, and stay.
        board = TensorBoardTracker("tensorboard", setup.run.path, purge_step=step + 1)
        names[names.index("tensorboard")] = board
    accelerator.project_configuration.set_directories(str(setup.run.path))
    accelerator.log_with = names
    if names:
        accelerator.init_trackers("llm")
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.writer.add_text("config", f"```\n{to_toml(config)}\n```", step)
            _tell_hyperparameters(tracker.writer, config)
        else:
            tracker.store_init_configuration(dataclasses.asdict(config))


def _tell_hyperparameters(writer: Any, config: GPTConfig) -> None:
    """Fill TensorBoard's table of runs, in the same files as the curves."""
    from torch.utils.tensorboard.summary import hparams

    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in dataclasses.asdict(config).items()
        if value not in (None, ())
    }
    # The numbers here are never shown: the table reads the curves of these names.
    for summary in hparams(values, {"eval/loss": 0.0, "train/loss": 0.0}):
        writer.file_writer.add_summary(summary)


def write_sample(config: GPTConfig, setup: TrainSetup, model: PreTrainedModel) -> str | None:
    """What the model writes behind `sample_prompt`; None, with a warning, where it has diverged."""
    try:
        return sample_text(
            model,
            setup.tokenizer,
            prompt=config.sample_prompt or "",
            max_new_tokens=SAMPLE_TOKENS,
            seed=setup.seed,
        )
    except DivergedError as error:
        logger.warning(f"There is no sample. {error}")
        return None


def make_sample(
    config: GPTConfig, setup: TrainSetup, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> Callable[[int], None] | None:
    """A function that lets the model write after a step; None if nobody asked.

    All ranks call it; rank 0 writes.
    """
    if config.sample_every is None:
        return None

    def sample(step: int) -> None:
        with strategy.averaged():
            if strategy.rank != 0:
                return
            text = write_sample(config, setup, model)
        if text is None:
            return
        logger.info(f"a sample at step {step}:\n\n{text}\n")
        for tracker in strategy.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.writer.add_text("sample", f"```\n{text}\n```", step)

    return sample
