"""The story of a training run."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel

from llm.config.toml import to_toml
from llm.errors import LLMError, PeerLostError
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.health import Health
from llm.runtime.logging import EventHandler, log_to_file
from llm.runtime.signals import EXIT_PREEMPTED
from llm.runtime.world import World
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.inputs import TrainSetup, read_training
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.publish import open_repository, push
from llm.trainers.gpt.reporting import make_tracker
from llm.trainers.gpt.results import (
    log_beginning,
    log_ending,
    log_sample,
    resume_command,
    write_results,
)
from llm.trainers.gpt.setup import (
    check_same_start,
    described,
    load_weights,
    make_model,
    make_strategy,
    make_trainer,
    restore,
)

PEER_SECONDS = 5.0
"""Seconds to wait for the watchdog to name the failed rank."""

logger = logging.getLogger("llm")


def train(config: GPTConfig, world: World, *, config_file: Path | None) -> int:
    """Train as configured; every rank calls it.

    Args:
        config: The options.
        world: Which rank this is.
        config_file: The TOML file that some of them are from.

    Returns:
        0, or `EXIT_PREEMPTED` where a request to stop came first.

    Raises:
        PeerLostError: Another rank has died or hangs.
        LLMError: In one sentence, what is wrong with an option, the data or a checkpoint.
    """
    # Everything is read before process groups form: bad input is refused by one sentence, and no
    # rank waits for another that has given up.
    setup = read_training(config, world, config_file=config_file)
    config = dataclasses.replace(config, seed=setup.seed, output_dir=str(setup.run.path))
    model = make_model(config, setup, world)
    repository = None
    if world.is_main:
        setup.run.lock()
        repository = open_repository(config, setup.run.path)
    whole = described(setup, model)
    strategy = make_strategy(config, setup, model, world)
    model = whole  # the last reference to layers that other stages hold
    check_same_start(setup, strategy)
    load_weights(setup.init_from, strategy)
    with watched(config, setup, strategy) as health:
        log_beginning(config, setup, strategy, model)
        trainer = make_trainer(config, setup, strategy, model, health)
        # From here on a signal saves and stops; before, it ended the process at once.
        trainer.interruption.watch()
        trainer.tracker = make_tracker(config, setup, strategy, model)
        restore(config, setup, trainer)
        step, total = trainer.state.step, setup.plan.total_steps
        if step == total:
            logger.info(f"All {step:,} steps are done already: nothing is left to train.")
        outcome = trainer.fit()
        trainer.tracker.close()
        if outcome == "preempted":
            tell_preempted(config, setup, trainer)
        else:
            finish(config, setup, trainer, model)
    strategy.close()
    if outcome == "preempted":
        return EXIT_PREEMPTED
    if repository is not None:
        push(setup.run.path, repository)
    return 0


@contextlib.contextmanager
def watched(
    config: GPTConfig, setup: TrainSetup, strategy: AcceleratedStrategy
) -> Iterator[Health]:
    """Open the run's folder, watch the other ranks, and keep `status.json` true whatever happens.

    Raises:
        PeerLostError: In place of an error within, where another rank is its reason.
    """
    run = setup.run

    def report(failure: str) -> None:
        if strategy.rank == health.reporter:
            run.say("failed", reason=failure)

    health = Health(
        rank=strategy.rank,
        world_size=strategy.world_size,
        timeout=config.timeout,
        share=strategy.broadcast_object,
        on_loss=report,
        stacks=run.stacks,
    )
    try:
        if strategy.rank == 0:
            run.open(overwrite=config.overwrite_output_dir, config=to_toml(config))
            log_to_file(run.log)
            logger.addHandler(EventHandler(run.events))
        yield health
        health.close()
    except BaseException as error:
        # A collective fails on all ranks when one is lost; which one is known a moment later.
        foreseen = isinstance(error, LLMError | KeyboardInterrupt | SystemExit)
        failure = health.wait_for_failure(0.0 if foreseen else PEER_SECONDS)
        if failure is not None:
            raise PeerLostError(failure) from error
        with contextlib.suppress(OSError):  # the disk may be what is wrong
            report(f"{type(error).__name__}: {error}")
        raise


def tell_preempted(config: GPTConfig, setup: TrainSetup, trainer: Trainer) -> None:
    """Say why the run stopped and how it goes on."""
    step = trainer.state.step
    reason = trainer.interruption.reason or "a request to another rank"
    logger.info(
        f"Stopped by {reason} after step {step}, which is saved. To go on: "
        f"{resume_command(config, setup.run, trainer.strategy.world_size)}"
    )
    if trainer.strategy.rank == 0:
        setup.run.say("preempted", reason=reason, step=step)


def finish(config: GPTConfig, setup: TrainSetup, trainer: Trainer, model: PreTrainedModel) -> None:
    """Write the model and its results; every rank calls it."""
    strategy = trainer.strategy
    if not trainer.results and trainer.evaluate is not None:
        # The run had ended before it was resumed.
        trainer.results = trainer.evaluate()
    write_results(config, setup, trainer, model)
    with strategy.averaged():
        if strategy.rank == 0:
            log_sample(config, setup, model)
    if strategy.rank == 0:
        log_ending(config, setup, trainer)
        loss = trainer.results.get("loss", 0.0)
        diverged = None if math.isfinite(loss) else "the validation loss is not finite"
        setup.run.say("finished", reason=diverged, step=trainer.state.step)
