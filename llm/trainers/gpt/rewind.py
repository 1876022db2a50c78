"""Training that goes back to a checkpoint when the loss spikes (`--on_loss_spike rewind`)."""

import logging
from dataclasses import replace
from typing import Literal

from llm.checkpoint.format import Checkpoint, checkpoint_folders, read_manifest
from llm.checkpoint.verify import Verifiers
from llm.config.toml import to_toml
from llm.errors import CheckpointError, DivergedError, LossSpikeError
from llm.runtime.logging import event
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.reporting import forget_points
from llm.trainers.gpt.run_setup import TrainSetup
from llm.trainers.gpt.setup import leave_later_steps, load_start
from llm.trainers.gpt.step_report import samples_of

logger = logging.getLogger("llm")


def fit(
    config: CoreConfig, setup: TrainSetup, trainer: Trainer
) -> tuple[Literal["finished", "preempted"], TrainSetup]:
    """Train to the last step or a request to stop, going back where the loss spikes.

    Returns:
        How training ended, and the setup with the samples that were left out in the end.

    Raises:
        LossSpikeError: The loss spiked, and the run does not go back, or has no checkpoint yet.
        DivergedError: The loss spiked, and the run has gone back `max_rewinds` times.
    """
    while True:
        try:
            return trainer.fit(), setup
        except LossSpikeError as spike:
            if config.on_loss_spike != "rewind":
                raise
            if trainer.state.rewinds >= config.max_rewinds:
                raise DivergedError(
                    f"{spike} The run has gone back {trainer.state.rewinds} times already "
                    "(--max_rewinds)."
                ) from None
            trainer.health.heartbeat(step=trainer.state.step, phase="start")
            # Until the first one is saved, a resumed run goes back to where it came from.
            checkpoint = _newest_checkpoint(setup, trainer) or setup.start
            if checkpoint is None:
                raise
            setup = _rewind(config, setup, trainer, checkpoint, spike.first)


def _newest_checkpoint(setup: TrainSetup, trainer: Trainer) -> Checkpoint | None:
    """Return the newest valid checkpoint, which precedes the spike: none is saved after one."""
    strategy = trainer.strategy
    folders = strategy.broadcast_object(checkpoint_folders(setup.run.checkpoints))
    share = Verifiers(rank=strategy.rank, world_size=strategy.world_size).share
    for path in reversed(folders):
        checkpoint, problem = None, None
        try:
            checkpoint = read_manifest(path)
            problem = checkpoint.problem(read=share(checkpoint.files))
        except CheckpointError as error:
            problem = str(error)
        if not any(strategy.gather_objects(problem)):
            return checkpoint
    return None


def _rewind(
    config: CoreConfig, setup: TrainSetup, trainer: Trainer, checkpoint: Checkpoint, first: int
) -> TrainSetup:
    """Load a checkpoint, and leave out the samples around a spike from there on.

    These are the samples of the steps from one logging interval before the spike, whose updates may
    have led to it, up to the step at which it was noticed.

    Args:
        config: The options.
        setup: The run as it was.
        trainer: The trainer, which every rank sets back.
        checkpoint: Where to go on.
        first: The first step that spiked, counted from 0.
    """
    state = trainer.state
    rewinds, noticed = state.rewinds + 1, state.step
    left_out = samples_of(
        trainer.loader, max(checkpoint.step, first - config.logging_steps), noticed
    )
    skipped = trainer.loader.skipped.skip([left_out])
    logger.info(
        f"Going back to step {checkpoint.step} because of the spike at step {first + 1}, without "
        f"the samples {left_out[0]:,} to {left_out[1] - 1:,} (time {rewinds} of --max_rewinds "
        f"{config.max_rewinds}).",
        extra=event("rewind", step=checkpoint.step, skip_samples=f"{left_out[0]}:{left_out[1]}"),
    )
    trainer.tracker.close()
    setup = replace(setup, resume_from=checkpoint, skipped=skipped)
    load_start(setup, trainer)
    leave_later_steps(config, setup, trainer)
    trainer.state.rewinds = rewinds
    trainer.loader = replace(trainer.loader, skipped=skipped)
    trainer.metadata["skip_samples"] = str(skipped)
    trainer.saved_at = None
    forget_points(trainer.strategy, after=checkpoint.step)
    if trainer.strategy.rank == 0:
        config = replace(config, skip_samples=str(skipped))
        setup.run.open(overwrite=False, config=to_toml(config))
    return setup
