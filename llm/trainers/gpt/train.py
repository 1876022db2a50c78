"""The story of a training run (`train`), and of an evaluation with `--eval_only` (`evaluate`)."""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.load import load_state, newest_valid
from llm.checkpoint.retention import prune
from llm.config.toml import to_toml
from llm.data.options import device_batch_size
from llm.errors import DeviceMemoryError, LLMError, PeerLostError, RestartError
from llm.metrics.hardware import GIB, device_memory, is_out_of_memory
from llm.metrics.tracker import task_values
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import is_shared, on_all_ranks, on_rank0
from llm.runtime.files import write_whole
from llm.runtime.health import Health
from llm.runtime.logging import EventHandler, event, log_to_file
from llm.runtime.signals import EXIT_PREEMPTED, Interruption
from llm.runtime.world import World, device_of, ranks_per_node
from llm.trainers.gpt.build_run import (
    check_same_start,
    leave_later_steps,
    load_start,
    load_weights,
    make_loop_extensions,
    make_model,
    make_strategy,
)
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.evaluation import make_evaluate
from llm.trainers.gpt.inputs import copy_model, read_evaluation, read_training
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.reporting import (
    connect_trackers,
    forget_points,
    generate_command,
    log_end,
    log_sample,
    log_start,
    make_tracker,
    open_tensorboard,
    remember_wandb,
    resume_command,
)
from llm.trainers.gpt.results import open_repository, push, write_results
from llm.trainers.gpt.run_setup import TrainSetup, resolved_config
from llm.trainers.gpt.seams import evaluate_weights

PEER_SECONDS = 5.0
"""Seconds to wait for the watchdog to name the failed rank."""

logger = logging.getLogger("llm")


def train(config: CoreConfig, world: World, *, config_file: Path | None) -> int:
    """Train as configured; every rank calls it.

    Args:
        config: The options.
        world: Rank and world size of this process.
        config_file: The TOML file of `--config`.

    Returns:
        0, or `EXIT_PREEMPTED` after a request to stop.

    Raises:
        PeerLostError: Another rank has died or hangs.
        LLMError: An option, the data or a checkpoint cannot be used.
    """
    began = time.perf_counter()
    # Created here, so that the time limit includes reading the text and the weights.
    limit = None if config.exit_after is None else 60 * config.exit_after
    interruption = Interruption(time_limit=limit)
    # Read everything before process groups form: bad input is refused with one sentence.
    setup = on_all_ranks(lambda: read_training(config, world, config_file=config_file))
    searches_batch_size = config.per_device_train_batch_size == "auto" and not setup.resume_from
    config = resolved_config(config, setup)
    model = on_all_ranks(lambda: make_model(config, setup, world))
    with setup.run.lock() if world.is_main else contextlib.nullcontext():
        repository = on_all_ranks(
            lambda: open_repository(config, setup.run.path) if world.is_main else None
        )
        # Assigned to `model`, to drop the last reference to the layers of other stages.
        strategy, model = make_strategy(config, setup, model, world)
        check_same_start(setup)
        load_weights(setup.init_from, strategy)
        if searches_batch_size:
            from llm.trainers.gpt.find_batch_size import find_batch_size

            config, setup = find_batch_size(config, setup, strategy)
        with run_context(config, setup, strategy, world) as health:
            trainer = make_trainer(config, setup, strategy, model, health, interruption)
            # From here on a signal saves and stops; earlier it ends the process at once.
            interruption.watch()
            load_start(setup, trainer)
            on_all_ranks(lambda: connect_trackers(config, setup, strategy))
            # From here on, no rank refuses the run.
            on_all_ranks(lambda: open_folder(config, setup, strategy))
            log_start(config, setup, strategy, model)
            leave_later_steps(config, setup, trainer)
            logger.info(f"initialized in {time.perf_counter() - began:.1f} s")
            outcome, setup = fit_with_restarts(config, setup, trainer)
            trainer.tracker.close()
            if outcome == "preempted":
                log_preempted(config, setup, trainer)
            else:
                # Only rank 0 writes; the others wait, so they learn of its error here.
                on_all_ranks(lambda: finish(config, setup, trainer, model))
        strategy.close()
        if repository is not None and outcome == "finished":
            push(setup.run.path, repository)
    interruption.ignore()
    return EXIT_PREEMPTED if outcome == "preempted" else 0


def make_trainer(
    config: CoreConfig,
    setup: TrainSetup,
    strategy: AcceleratedStrategy,
    model: PreTrainedModel,
    health: Health,
    interruption: Interruption,
) -> Trainer:
    """Return the trainer of a prepared model.

    Raises:
        DataError: The validation data are too short to evaluate on.
        LLMError: Rank 0 cannot copy the model's configuration and the tokenizer.
    """
    copies = on_all_ranks(lambda: copy_model(setup, model) if strategy.rank == 0 else {})
    tracker = make_tracker(config, setup, strategy, model)

    def on_batch() -> None:
        trainer.between_batches()

    trainer = Trainer(
        config,
        setup,
        strategy,
        health=health,
        interruption=interruption,
        tracker=tracker,
        evaluate=make_evaluate(config, setup, strategy, on_batch=on_batch),
        sample=partial(
            log_sample,
            config,
            setup,
            strategy,
            model,
            should_stop=lambda: interruption.reason is not None,
        ),
        copies=copies,
        extensions=make_loop_extensions(
            setup, strategy, model, keep_alive=on_batch, paused=tracker.paused
        ),
    )
    return trainer


def open_folder(config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy) -> None:
    """Open the run's folder: write the log so far, `status.json`, TensorBoard's files."""
    run = setup.run
    run.is_open = True
    if strategy.rank == 0:
        if setup.resume_from is not None:  # the disk may have no room for another checkpoint
            prune(
                run.checkpoints,
                saved=setup.resume_from.step,
                keep_newest=config.keep_checkpoints,
                keep_best=config.save_top_k,
            )
        run.open(overwrite=config.overwrite_output_dir, config=to_toml(config))
        log_to_file(run.log)
        logger.addHandler(EventHandler(run.events))
        open_tensorboard(config, setup, strategy)
        remember_wandb(run, strategy.accelerator.trackers)


@contextlib.contextmanager
def run_context(
    config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy, world: World
) -> Iterator[Health]:
    """Watch the other ranks, and write `status.json` if an error ends the run in its open folder.

    Raises:
        PeerLostError: Replaces an error caused by the loss of another rank.
        DeviceMemoryError: Replaces an error about full device memory.
    """
    run = setup.run
    reported = False

    def report(failure: str) -> None:
        # A rank that waits for its end may see rank 0 end first, with the same error.
        if run.is_open and strategy.rank == health.reporter and not reported:
            run.write_status("failed", reason=failure)

    health = Health(
        rank=strategy.rank,
        world_size=strategy.world_size,
        timeout=config.timeout,
        share=lambda address: on_rank0(lambda: address),
        on_loss=report,
        stacks=run.stacks,
    )
    try:
        with explain_out_of_memory(config, world):  # inside, because it goes into `status.json`
            yield health
        health.close()
    except BaseException as error:
        if is_shared(error):
            health.close()  # ranks that end now are not lost
        # A lost rank makes a collective fail on all others; the watchdog names it shortly after.
        foreseen = isinstance(error, LLMError | KeyboardInterrupt | SystemExit)
        foreseen = foreseen and not isinstance(error, PeerLostError)
        failure = health.wait_for_failure(0.0 if foreseen else PEER_SECONDS)
        health.stop()
        if failure is not None:
            raise PeerLostError(failure, reported=True) from error
        with contextlib.suppress(OSError):  # the disk may have caused the error
            report(f"{type(error).__name__}: {error}")
        reported = True
        raise


def fit_with_restarts(
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
            setup = _restart_training(config, setup, trainer, checkpoint, asked)


def _restart_training(
    config: CoreConfig,
    setup: TrainSetup,
    trainer: Trainer,
    checkpoint: Checkpoint,
    request: RestartError,
) -> TrainSetup:
    """Load a checkpoint, and skip samples from there on.

    Args:
        config: The options.
        setup: The run's present setup.
        trainer: The trainer, reset on every rank.
        checkpoint: The checkpoint to continue from.
        request: The request: first step to skip, and the reason.
    """
    skipped_range = trainer.loader.sample_range(
        max(checkpoint.step, request.first), trainer.state.step
    )
    skipped = trainer.loader.skipped.skip([skipped_range])
    logger.info(
        f"Going back to step {checkpoint.step} because of {request.reason}, without the samples "
        f"{skipped_range[0]:,} to {skipped_range[1] - 1:,}.",
        extra=event(
            "rewind", step=checkpoint.step, skip_samples=f"{skipped_range[0]}:{skipped_range[1]}"
        ),
    )
    trainer.tracker.close()
    setup = replace(setup, resume_from=checkpoint, skipped=skipped)
    load_start(setup, trainer)
    leave_later_steps(config, setup, trainer)
    trainer.loader = replace(trainer.loader, skipped=skipped)
    trainer.metadata["skip_samples"] = str(skipped)
    trainer.saved_at = None
    forget_points(trainer.strategy, step=checkpoint.step)
    if trainer.strategy.rank == 0:
        config = replace(config, skip_samples=str(skipped))
        setup.run.open(overwrite=False, config=to_toml(config))
    return setup


def log_preempted(config: CoreConfig, setup: TrainSetup, trainer: Trainer) -> None:
    """Log why the run stopped and the command that resumes it."""
    step = trainer.state.step
    reason = trainer.interruption.reason or "a request to another rank"
    logger.info(
        f"Stopped by {reason} after step {step}, which is saved. To continue: "
        f"{resume_command(config, setup.run, trainer.strategy.world_size)}"
    )
    if trainer.strategy.rank == 0:
        setup.run.write_status("preempted", reason=reason, step=step)
    trainer.interruption.keep_exit_code()


def finish(config: CoreConfig, setup: TrainSetup, trainer: Trainer, model: PreTrainedModel) -> None:
    """Export the model and its results, and log the last lines; every rank calls it."""
    if not trainer.results and trainer.evaluate is not None:
        # The run was already finished when it was resumed, so this start has not evaluated.
        trainer.results = trainer.evaluate_weights()
    task_results: dict[str, dict[str, float]] = {}
    for extension in trainer.extensions:
        task_results |= extension.task_results()
    with trainer.exported.swapped() if trainer.exported else contextlib.nullcontext():
        write_results(config, setup, trainer, model, task_results)
        if config.sample_prompt is not None and setup.dims.is_replicated:
            trainer.sample(None)
        elif config.sample_prompt is not None:
            logger.info(
                "No rank has the whole model, so --sample_prompt is left to "
                + generate_command(config, setup.run)
            )
    if trainer.strategy.rank == 0:
        log_end(config, setup, trainer.state, trainer.results, exported=trainer.exported)
        loss = trainer.results.get("loss", 0.0)
        diverged = None if math.isfinite(loss) else "the validation loss is not finite"
        setup.run.write_status("finished", reason=diverged, step=trainer.state.step)


def evaluate(config: CoreConfig, world: World) -> None:
    """Evaluate a model or a run's checkpoint, and write `eval_results.json`; every rank calls it.

    Raises:
        LLMError: An option, the data or a checkpoint cannot be used.
    """
    setup = on_all_ranks(lambda: read_evaluation(config, world))
    config = replace(config, **setup.by_device)
    model = on_all_ranks(lambda: make_model(config, setup, world))
    # Assigned to `model`, to drop the last reference to the layers of other stages.
    strategy, model = make_strategy(config, setup, model, world)
    check_same_start(setup)
    log_start(config, setup, strategy, model)
    load_weights(setup.resume_from, strategy)
    evaluate_model = make_evaluate(config, setup, strategy)
    assert evaluate_model is not None  # read_evaluation requires validation data
    extensions = make_loop_extensions(
        setup, strategy, model, keep_alive=lambda: None, paused=contextlib.nullcontext
    )
    for extension in extensions:
        if setup.resume_from is not None and extension.part is not None:
            load_state(setup.resume_from, {extension.part: extension})
    results = evaluate_weights(evaluate_model, extensions, is_final=False)
    for extension in extensions:
        results |= task_values(extension.task_results())
    logger.info(" | ".join(f"{name}: {value:.6g}" for name, value in results.items()))
    if strategy.rank == 0:
        setup.run.path.mkdir(parents=True, exist_ok=True)
        path = setup.run.path / "eval_results.json"
        write_whole(path, json.dumps(results, indent=1) + "\n")
        logger.info(f"results: {path}")
    strategy.close()


@contextlib.contextmanager
def explain_out_of_memory(config: CoreConfig, world: World) -> Iterator[None]:
    """Replace a device's allocation error by a sentence with remedies.

    Raises:
        DeviceMemoryError: Replaces an error that says "out of memory".
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(_out_of_memory(config, world)) from error


def _out_of_memory(config: CoreConfig, world: World) -> str:
    device = device_of(world)
    total = device_memory(device)
    size = "" if total is None else f" of its {total / GIB:.1f} GiB"
    per_node = ranks_per_node(os.environ, world.world_size)
    sentence = f"Out of memory on {device}{size} (rank {world.rank}): {_memory_remedies(config)}."
    if config.several_models:  # the plan refuses it
        return sentence
    flags = [f"--nodes {-(-world.world_size // per_node)}", f"--gpus_per_node {per_node}"]
    if total is not None:
        flags.append(f"--memory_gib {total / GIB:.1f}")
    return (
        f"{sentence} `llm-trainers plan` with the options of this run and {' '.join(flags)} shows "
        "how the memory is used, and with --search the layouts that fit."
    )


def _memory_remedies(config: CoreConfig) -> str:
    """Return the options that can still lower the memory."""
    remedies = []
    size = device_batch_size(config)
    if size > 1 and not config.eval_only:
        remedies.append(f"lower --per_device_train_batch_size {size}")
    if config.per_device_eval_batch_size > 1:
        remedies.append(
            f"lower --per_device_eval_batch_size {config.per_device_eval_batch_size}"
            + ("" if config.eval_only else " if it happens in an evaluation")
        )
    if config.activation_checkpointing != "full" and not config.eval_only:
        remedies.append("recompute activations by --activation_checkpointing full")
    sizes = "--data_parallel_shard_size, --tensor_parallel_size or --pipeline_parallel_size"
    remedies.append(f"shard the model over more ranks by {sizes}")
    return ", or ".join(remedies)
