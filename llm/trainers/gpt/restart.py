"""Restarts training from a checkpoint without some samples, if an extension requests it."""

import logging
from dataclasses import replace
from typing import Literal

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.load import newest_valid
from llm.config.toml import to_toml
from llm.errors import RestartError
from llm.runtime.logging import event
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.reporting import forget_points
from llm.trainers.gpt.run_setup import TrainSetup
from llm.trainers.gpt.setup import leave_later_steps, load_start

logger = logging.getLogger("llm")


def fit(
    config: CoreConfig, setup: TrainSetup, trainer: Trainer
) -> tuple[Literal["finished", "preempted"], TrainSetup]:
    """Train to the last step or a request to stop; restart from a checkpoint on request.

    Returns:
        How training ended, and the setup with all skipped samples.

    Raises:
        RestartError: The run should go back but has no checkpoint yet.
    """
    while True:
        try:
            return trainer.fit(), setup
        except RestartError as asked:
            trainer.health.heartbeat(step=trainer.state.step, phase="start")
            # Until this start saves a checkpoint, it goes back to the one it resumed from. After a
            # spike, none is saved.
            checkpoint = newest_valid(setup.run.checkpoints, together=True) or setup.start
            if checkpoint is None:
                raise
            setup = _restart(config, setup, trainer, checkpoint, asked)


def _restart(
    config: CoreConfig,
    setup: TrainSetup,
    trainer: Trainer,
    checkpoint: Checkpoint,
    asked: RestartError,
) -> TrainSetup:
    """Load a checkpoint, and skip samples from there on.

    Args:
        config: The options.
        setup: The run's present setup.
        trainer: The trainer, reset on every rank.
        checkpoint: The checkpoint to continue from.
        asked: The request: first step to skip, and the reason.
    """
    left_out = trainer.loader.samples_of(max(checkpoint.step, asked.first), trainer.state.step)
    skipped = trainer.loader.skipped.skip([left_out])
    logger.info(
        f"Going back to step {checkpoint.step} because of {asked.reason}, without the samples "
        f"{left_out[0]:,} to {left_out[1] - 1:,}.",
        extra=event("rewind", step=checkpoint.step, skip_samples=f"{left_out[0]}:{left_out[1]}"),
    )
    trainer.tracker.close()
    setup = replace(setup, resume_from=checkpoint, skipped=skipped)
    load_start(setup, trainer)
    leave_later_steps(config, setup, trainer)
    trainer.loader = replace(trainer.loader, skipped=skipped)
    trainer.metadata["skip_samples"] = str(skipped)
    trainer.saved_at = None
    forget_points(trainer.strategy, after=checkpoint.step)
    if trainer.strategy.rank == 0:
        config = replace(config, skip_samples=str(skipped))
        setup.run.open(overwrite=False, config=to_toml(config))
    return setup
