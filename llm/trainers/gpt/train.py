"""The story of a training run (`train`), and of an evaluation with `--eval_only` (`evaluate`)."""

import contextlib
import json
import logging
import math
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from llm.checkpoint.format import Checkpoint, list_checkpoint_folders
from llm.checkpoint.load import find_newest_checkpoint, load_state
from llm.checkpoint.retention import prune_checkpoints
from llm.config.toml import to_toml
from llm.errors import LLMError, PeerLostError, RestartError
from llm.metrics.rank_times import ComputeClock, RankTimes
from llm.metrics.reporter import task_values
from llm.metrics.wall_time import WallTime
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather, is_shared, on_all_ranks, on_rank0
from llm.runtime.files import write_whole
from llm.runtime.health import Health
from llm.runtime.logging import EventHandler, event, log_to_file
from llm.runtime.signals import EXIT_PREEMPTED, Interruption
from llm.runtime.world import World
from llm.trainers.gpt.build_run import (
    check_same_start,
    load_start_checkpoint,
    load_weights,
    log_first_step,
    make_model,
    make_strategy,
    supersede_later_checkpoints,
)
from llm.trainers.gpt.commands import generate_command, resume_command
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.evaluation import make_evaluator
from llm.trainers.gpt.inputs import read_evaluation, read_training
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.model_copies import collect_model_files
from llm.trainers.gpt.out_of_memory import explain_out_of_memory
from llm.trainers.gpt.results import open_repository, push_model, write_results
from llm.trainers.gpt.run_log import log_end, log_start
from llm.trainers.gpt.seams import LoopContext, evaluate_weights, make_loop_extensions
from llm.trainers.gpt.text_sample import log_sample
from llm.trainers.gpt.trackers import (
    connect_trackers,
    drop_tensorboard_points,
    make_reporter,
    open_tensorboard,
    save_wandb_run_id,
)
from llm.trainers.gpt.training_run import TrainingRun

PEER_FAILURE_WAIT_SECONDS = 5.0
"""Seconds to wait for the watchdog to name the failed rank."""

logger = logging.getLogger("llm")


def train(config: CoreConfig, world: World, *, config_file: Path | None) -> int:
    """Train as configured; every rank calls it.

    Returns:
        0, or `EXIT_PREEMPTED` after a request to stop.

    Raises:
        PeerLostError: Another rank has died or hangs.
        LLMError: An option, the data or a checkpoint cannot be used.
    """
    start_time = time.perf_counter()
    # Created here, so that the time limit includes reading the text and the weights.
    time_limit = None if config.exit_after is None else 60 * config.exit_after
    interruption = Interruption(time_limit=time_limit)
    # Read everything before process groups form: bad input is refused with one sentence.
    run = on_all_ranks(lambda: read_training(config, world, config_file=config_file))
    searches_batch_size = config.per_device_train_batch_size == "auto" and not run.resume_from
    model = on_all_ranks(lambda: make_model(run))
    with contextlib.ExitStack() as stack:
        on_rank0(lambda: stack.enter_context(run.folder.lock()))
        repository = on_all_ranks(
            lambda: open_repository(run.config, run.folder.path) if world.is_main else None
        )
        # Assigned to `model`, to drop the last reference to the layers of other stages.
        strategy, model = make_strategy(run, model)
        check_same_start(run)
        load_weights(run.init_from, strategy)
        with watch_run(run, strategy) as health:
            if searches_batch_size:
                from llm.trainers.gpt.find_batch_size import find_batch_size

                run = find_batch_size(run, strategy, model, health)
            trainer = make_trainer(run, strategy, model, health, interruption)
            # From here on a signal saves and stops; earlier it ends the process at once.
            interruption.watch()
            start_run(trainer, model)
            logger.info(f"initialized in {time.perf_counter() - start_time:.1f} s")
            with explain_out_of_memory(run.config, run.world):  # with the size that `auto` found
                outcome = fit_with_restarts(trainer)
            trainer.reporter.close()
            if outcome == "preempted":
                log_preempted(trainer)
            else:
                # Only rank 0 writes; the others wait, so they learn of its error here.
                on_all_ranks(lambda: finish_run(trainer, model))
        strategy.close()
        if repository is not None and outcome == "finished":
            push_model(run.folder.path, repository)
    interruption.ignore()
    return EXIT_PREEMPTED if outcome == "preempted" else 0


def make_trainer(
    run: TrainingRun,
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
    model_files = on_all_ranks(
        lambda: collect_model_files(run, model) if strategy.rank == 0 else {}
    )
    reporter = make_reporter(run, strategy, model)

    def on_batch() -> None:
        trainer.continue_or_stop_evaluation()

    trainer = Trainer(
        run,
        strategy,
        health=health,
        interruption=interruption,
        reporter=reporter,
        rank_times=_make_rank_times(strategy) if strategy.world_size > 1 else None,
        evaluate=make_evaluator(run, strategy, on_batch=on_batch),
        sample=partial(
            log_sample,
            run,
            strategy,
            model,
            should_stop=lambda: interruption.reason is not None,
        ),
        model_files=model_files,
        extensions=make_loop_extensions(
            LoopContext(run, strategy, model, keep_alive=on_batch, paused=reporter.paused)
        ),
    )
    return trainer


def _make_rank_times(strategy: AcceleratedStrategy) -> RankTimes:
    """Return what compares the ranks, and start to time their steps; all ranks call it."""
    if not strategy.communicates_in_forward:
        strategy.compute_clock = ComputeClock(strategy.device)
    return RankTimes(
        rank=strategy.rank,
        hosts=gather(socket.gethostname()),
        compute_clock=strategy.compute_clock,
    )


def start_run(trainer: Trainer, model: PreTrainedModel) -> None:
    """Load the state to start from, open the run's folder and log the start; all ranks call it."""
    run, strategy = trainer.run, trainer.strategy
    load_start_checkpoint(trainer)
    on_all_ranks(lambda: connect_trackers(run, strategy))
    # From here on, no rank refuses the run.
    on_all_ranks(lambda: open_run_folder(run, strategy, trainer.reporter.wall_time))
    trainer.saver.open_staging()
    log_start(run, strategy, model)
    for extension in trainer.extensions:
        for line in extension.describe():
            logger.info(line)
    supersede_later_checkpoints(trainer)
    log_first_step(trainer)


def open_run_folder(run: TrainingRun, strategy: AcceleratedStrategy, wall_time: WallTime) -> None:
    """Open the run's folder: write the log so far, `status.json`, TensorBoard's files."""
    folder = run.folder
    folder.is_open = True
    if strategy.rank == 0:
        if run.resume_from is not None:  # the disk may have no room for another checkpoint
            prune_checkpoints(folder.checkpoints, run.config, saved_step=run.resume_from.step)
        folder.open(overwrite=run.config.overwrite_output_dir, config=to_toml(run.config))
        wall_time.open(folder.goodput, num_devices=strategy.world_size)
        log_to_file(folder.log)
        logger.addHandler(EventHandler(folder.events))
        open_tensorboard(run, strategy)
        save_wandb_run_id(folder, strategy.accelerator.trackers)


@contextlib.contextmanager
def watch_run(run: TrainingRun, strategy: AcceleratedStrategy) -> Iterator[Health]:
    """Watch the other ranks, and write `status.json` if an error ends the run in its open folder.

    Raises:
        PeerLostError: Replaces an error caused by the loss of another rank.
        DeviceMemoryError: Replaces an error about full device memory.
    """
    folder = run.folder
    is_reported = False

    def write_failure(failure: str) -> None:
        # A rank that waits for its end may see rank 0 end first, with the same error.
        if folder.is_open and strategy.rank == health.reporter and not is_reported:
            folder.write_status("failed", reason=failure)

    health = Health(
        rank=strategy.rank,
        world_size=strategy.world_size,
        timeout=run.config.timeout,
        broadcast=lambda address: on_rank0(lambda: address),
        on_loss=write_failure,
        stacks_folder=folder.stacks,
    )
    try:
        # Inside, because the sentence goes into `status.json`.
        with explain_out_of_memory(run.config, run.world):
            yield health
        health.close()
    except BaseException as error:
        peer_failure = _find_peer_failure(error, health)
        health.stop()
        if peer_failure is not None:
            raise PeerLostError(peer_failure, reported=True) from error
        with contextlib.suppress(OSError):  # the disk may have caused the error
            write_failure(f"{type(error).__name__}: {error}")
        is_reported = True
        raise


def _find_peer_failure(error: BaseException, health: Health) -> str | None:
    """Return which rank is lost, as a sentence, if that has caused an error; else None."""
    if is_shared(error):
        health.close()  # ranks that end now are not lost
    if isinstance(error, PeerLostError):
        return health.wait_for_failure(PEER_FAILURE_WAIT_SECONDS)
    if isinstance(error, LLMError | KeyboardInterrupt | SystemExit):
        return health.wait_for_failure(0.0)
    # A lost rank makes a collective fail on all others; the watchdog names it shortly after.
    return health.wait_for_failure(PEER_FAILURE_WAIT_SECONDS)


def fit_with_restarts(trainer: Trainer) -> Literal["finished", "preempted"]:
    """Train to the last step or a request to stop; restart from a checkpoint on request.

    Raises:
        RestartError: The run should go back but has no checkpoint yet.
        Exception: An unforeseen error, with a note about where it leaves the run.
    """
    while True:
        try:
            return trainer.fit()
        except RestartError as request:
            trainer.health.heartbeat(step=trainer.state.step, phase="start")
            # Until this start saves a checkpoint, it goes back to the one it resumed from. After a
            # spike, none is saved.
            run = trainer.run
            checkpoint = (
                find_newest_checkpoint(run.folder.checkpoints, is_collective=True) or run.start
            )
            if checkpoint is None:
                raise
            _restart_training(trainer, checkpoint, request)
        except LLMError:
            raise
        except Exception as error:
            if trainer.strategy.world_size == 1:  # with others, a rank may wait for one that failed
                try:
                    trainer.saver.finish(is_final=True)
                except LLMError as save_error:
                    logger.warning(str(save_error))
            error.add_note(_describe_failure(trainer, error))
            raise


def _describe_failure(trainer: Trainer, error: Exception) -> str:
    """Return after which step an error ended training, in which code, and what is saved."""
    code = _find_foreign_code(error)
    place = "" if code is None else f" in {code}"
    checkpoints = list_checkpoint_folders(trainer.run.folder.checkpoints)
    last_checkpoint = (
        f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "none is saved"
    )
    return (
        f"This error{place} ended the run after step {trainer.state.step} of "
        f"{trainer.batch_plan.total_steps}; {last_checkpoint}."
    )


def _find_foreign_code(error: Exception) -> str | None:
    """Return the place in other code that this package called, without torch's wrappers, or None.

    It may be of an optimizer's class, an extension, a model, or a library.
    """
    code = None
    for frame, line_number in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package == "llm":
            code = None
        elif code is None and package not in {"torch", *sys.stdlib_module_names}:
            code = f"{module} ({frame.f_code.co_filename}, line {line_number})"
    return code


def _restart_training(trainer: Trainer, checkpoint: Checkpoint, request: RestartError) -> None:
    """Continue from a checkpoint, without the samples that the request asks to skip."""
    first_sample, end_sample = trainer.loader.sample_range(
        max(checkpoint.step, request.first), request.end
    )
    skipped = trainer.loader.skipped.skip([(first_sample, end_sample)])
    logger.info(
        f"Going back to step {checkpoint.step} because of {request.reason}, without the samples "
        f"{first_sample:,} to {end_sample - 1:,}.",
        extra=event("rewind", step=checkpoint.step, skip_samples=f"{first_sample}:{end_sample}"),
    )
    trainer.reporter.close()
    trainer.reporter.wall_time.switch("start")
    run = trainer.run = replace(trainer.run, resume_from=checkpoint, skipped=skipped)
    load_start_checkpoint(trainer)
    supersede_later_checkpoints(trainer)
    log_first_step(trainer)
    trainer.loader = replace(trainer.loader, skipped=skipped)
    trainer.metadata["skip_samples"] = str(skipped)
    trainer.last_saved_step = None
    drop_tensorboard_points(trainer.strategy, step=checkpoint.step)
    if trainer.strategy.rank == 0:  # the config.toml for a resume
        config = replace(run.config, skip_samples=str(skipped))
        run.folder.open(overwrite=False, config=to_toml(config))
    trainer.saver.open_staging()


def log_preempted(trainer: Trainer) -> None:
    """Log why the run stopped and the command that resumes it."""
    run, step = trainer.run, trainer.state.step
    reason = trainer.interruption.reason or "a request to another rank"
    logger.info(
        f"Stopped by {reason} after step {step}, which is saved. To continue: "
        f"{resume_command(run.config, run.folder.path, trainer.strategy.world_size)}"
    )
    if trainer.strategy.rank == 0:
        run.folder.write_status("preempted", reason=reason, step=step)
    trainer.interruption.keep_exit_code()


def finish_run(trainer: Trainer, model: PreTrainedModel) -> None:
    """Export the model and its results, and log the last lines; every rank calls it."""
    run = trainer.run
    if not trainer.results and trainer.evaluate is not None:
        # The run was already finished when it was resumed, so this start has not evaluated.
        trainer.results = trainer.evaluate_weights()
    task_results: dict[str, dict[str, float]] = {}
    for extension in trainer.extensions:
        task_results |= extension.task_results()
    exported_weights = trainer.exported_weights
    with exported_weights.swap_in() if exported_weights else contextlib.nullcontext():
        write_results(trainer, model, task_results)
        if run.config.sample_prompt is not None:
            _log_final_sample(trainer)
    if trainer.strategy.rank == 0:
        log_end(run, trainer.state, trainer.results, exported_weights=exported_weights)
        is_finite = math.isfinite(trainer.results.get("loss", 0.0))
        divergence = None if is_finite else "the validation loss is not finite"
        run.folder.write_status("finished", reason=divergence, step=trainer.state.step)


def _log_final_sample(trainer: Trainer) -> None:
    """Log a text of the trained model, or the command that generates one."""
    run = trainer.run
    if run.dims.is_replicated:
        trainer.sample(None)
        return
    command = generate_command(run.config, run.folder.path)
    logger.info(f"No rank has the whole model, so --sample_prompt is left to {command}")


def evaluate(config: CoreConfig, world: World) -> None:
    """Evaluate a model or a run's checkpoint, and write `eval_results.json`; every rank calls it.

    Raises:
        LLMError: An option, the data or a checkpoint cannot be used.
    """
    run = on_all_ranks(lambda: read_evaluation(config, world))
    model = on_all_ranks(lambda: make_model(run))
    # Assigned to `model`, to drop the last reference to the layers of other stages.
    strategy, model = make_strategy(run, model)
    check_same_start(run)
    log_start(run, strategy, model)
    load_weights(run.resume_from, strategy)
    evaluate_model = make_evaluator(run, strategy)
    assert evaluate_model is not None  # read_evaluation requires validation data
    extensions = make_loop_extensions(
        LoopContext(run, strategy, model, keep_alive=lambda: None, paused=contextlib.nullcontext)
    )
    for extension in extensions:
        if run.resume_from is not None and extension.part is not None:
            load_state(run.resume_from, {extension.part: extension})
    results = evaluate_weights(evaluate_model, extensions, is_final=False)
    for extension in extensions:
        results |= task_values(extension.task_results())
    logger.info(" | ".join(f"{name}: {value:.6g}" for name, value in results.items()))
    if strategy.rank == 0:
        run.folder.path.mkdir(parents=True, exist_ok=True)
        results_path = run.folder.path / "eval_results.json"
        write_whole(results_path, json.dumps(results, indent=1) + "\n")
        logger.info(f"results: {results_path}")
    strategy.close()
