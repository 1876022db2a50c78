"""Parse, read, build, run, and turn what went wrong into a sentence and an exit code.

Exit codes: 0 finished, 1 an unforeseen error, 2 an option or input that cannot work,
75 stopped by a signal, --exit_after or the death of its launcher, with everything saved (run the
same command again), 76 another rank has died or hangs. A signal before training begins, when there
is nothing to save yet, and a second one seconds after the first end the process at once: 128 plus
its number, as a shell counts it.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.config.command_line import config_file_of, parse
from llm.config.toml import to_toml
from llm.errors import ConfigError, LLMError
from llm.runtime.allocator import restart_with_kept_memory
from llm.runtime.events import EventHandler
from llm.runtime.files import write_whole
from llm.runtime.health import EXIT_PEER_LOST, Health
from llm.runtime.launcher import adopt_launcher
from llm.runtime.logging import log_to_file, quiet_libraries, set_up_logging
from llm.runtime.signals import EXIT_PREEMPTED, Interruption, watch_launcher
from llm.runtime.threads import limit_spin_wait
from llm.runtime.world import World, world_from_environment
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.rules import check

PEER_SECONDS = 3.0
"""For so long a rank whose communication failed waits to hear which other one is the reason."""
SPEAKER_SECONDS = 3.0
"""For so long ranks that have nothing to say stay alive while another says why all of them end."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llm.parallel.base import AcceleratedStrategy
    from llm.trainers.gpt.inputs import Inputs

logger = logging.getLogger("llm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; returns the exit code."""
    world = world_from_environment()
    set_up_logging(rank=world.rank)
    watch_launcher()
    try:
        words = sys.argv[1:] if argv is None else argv
        config = parse_args(words)
        if config.fast_malloc and argv is None:
            restart_with_kept_memory()
        return run(config, world, config_file=config_file_of(words))
    except LLMError as error:
        _refuse(error, world)
        return 2
    except KeyboardInterrupt:
        logger.error("Interrupted before training began.")
        return 130
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            _refuse(
                ConfigError(f"{error.filename or 'A file'} has too long a name; choose another."),
                world,
            )
            return 2
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            logger.exception("The run failed.")
            return 1
        where = error.filename or "the run's folder"
        logger.error(f"error: {where} cannot be written ({error.strerror}); free some space.")
        return 2
    except Exception:
        # Into the run's log as well as onto the console.
        logger.exception("The run failed.")
        return 1


def parse_args(argv: Sequence[str]) -> GPTConfig:
    """Read the options and check them against one another.

    Raises:
        ConfigError: An option is unknown, malformed, or does not fit the others.
    """
    config = parse(
        GPTConfig,
        argv,
        prog="python -m llm.trainers.gpt",
        description="Pretrain any Hugging Face causal language model on any text.",
    )
    if config.mixed_precision == "no":
        # `accelerate launch --mixed_precision bf16` and `accelerate config` say it this way.
        asked: Any = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked in ("fp8", "fp16", "bf16"):
            config = dataclasses.replace(config, mixed_precision=asked)
    check(config)
    return config


def _refuse(error: LLMError, world: World) -> None:
    """Say an error once: what all ranks find, rank 0 says; what one rank found, that one."""
    if error.found_here or (world.is_main and not error.reported):
        logger.error(f"error: {error}")
    if world.world_size > 1 and not (world.is_main or error.found_here):
        # A launcher ends all ranks as soon as one has ended: leave the speaker its time.
        time.sleep(SPEAKER_SECONDS)
        if not error.reported:  # still alive, so nobody else has found it: it is this rank's own
            logger.error(f"error: {error}")


def run(config: GPTConfig, world: World, *, config_file: Path | None) -> int:
    """Train or evaluate as configured; returns the exit code.

    Args:
        config: The options.
        world: Which rank this is.
        config_file: The TOML file that some of them are from.
    """
    adopt_launcher()
    limit_spin_wait()
    quiet_libraries()
    # Imported here, so that --help and a wrong option need no torch.
    from llm.models.build import without_weights
    from llm.trainers.gpt.inputs import read_inputs
    from llm.trainers.gpt.publish import open_repository, push
    from llm.trainers.gpt.setup import check_same_start, load_init, make_model, make_strategy

    repository = None
    inputs = read_inputs(config, world, config_file=config_file)
    model = make_model(config, inputs, world)
    if world.is_main and not config.eval_only:
        inputs.run.lock()
        repository = open_repository(config, inputs.run.path)
    # Of what the log and the model card tell, a stage knows its share only.
    described = without_weights(model) if inputs.layout.pipeline > 1 else model
    strategy = make_strategy(config, inputs, model, world)
    model = described
    check_same_start(inputs, strategy)
    load_init(inputs, strategy)
    if config.eval_only:
        code = _evaluate(config, inputs, model, strategy)
    else:
        code = _train_and_tell(config, inputs, model, strategy)
    if code == EXIT_PEER_LOST:
        return code  # what is under way never ends
    strategy.close()
    if repository is not None and code == 0:
        push(inputs.run.path, repository)
    return code


def _train_and_tell(
    config: GPTConfig,
    inputs: "Inputs",
    model: "PreTrainedModel",
    strategy: "AcceleratedStrategy",
) -> int:
    """Train, and keep `status.json` true whatever happens."""

    def tell(failure: str) -> None:
        if strategy.rank == health.reporter:
            inputs.run.say("failed", reason=failure)

    health = Health(
        rank=strategy.rank,
        world_size=strategy.world_size,
        timeout=config.timeout,
        share=strategy.share,
        on_loss=tell,
        stacks=inputs.run.stacks,
    )
    try:
        if strategy.rank == 0:
            folder = str(inputs.run.path)
            resolved = dataclasses.replace(config, seed=inputs.seed, output_dir=folder)
            toml = to_toml(resolved)
            inputs.run.open(overwrite=config.overwrite_output_dir, config=toml)
            log_to_file(inputs.run.log)
            logger.addHandler(EventHandler(inputs.run.events))
        code = _train(config, inputs, model, strategy, health)
        health.close()
        return code
    except BaseException as error:
        # Where another rank is the reason, it is known a moment later.
        foreseen = isinstance(error, LLMError | KeyboardInterrupt | SystemExit)
        if health.wait_for_verdict(0.0 if foreseen else PEER_SECONDS) is not None:
            return EXIT_PEER_LOST
        with contextlib.suppress(OSError):  # the disk may be what is wrong
            tell(f"{type(error).__name__}: {error}")
        raise


def _train(
    config: GPTConfig,
    inputs: "Inputs",
    model: "PreTrainedModel",
    strategy: "AcceleratedStrategy",
    health: Health,
) -> int:
    from llm.trainers.gpt.reporting import make_tracker
    from llm.trainers.gpt.results import (
        log_beginning,
        log_ending,
        log_sample,
        resume_command,
        write_results,
    )
    from llm.trainers.gpt.setup import make_trainer

    log_beginning(config, inputs, strategy, model)
    interruption = Interruption(after=None if config.exit_after is None else 60 * config.exit_after)
    interruption.watch()
    tracker = make_tracker(config, inputs, strategy, model)
    trainer = make_trainer(config, inputs, strategy, model, tracker, interruption, health)
    if inputs.plan is not None and trainer.state.step == inputs.plan.total_steps:
        logger.info(f"All {trainer.state.step:,} steps are done already: nothing is left to train.")
    outcome = trainer.fit()
    tracker.close()
    step = trainer.state.step
    if outcome == "preempted":
        reason = interruption.reason or "a request to another rank"
        logger.info(
            f"Stopped by {reason} after step {step}, which is saved. To go on: "
            f"{resume_command(config, inputs.run, strategy.world_size)}"
        )
        if strategy.rank == 0:
            inputs.run.say("preempted", reason=reason, step=step)
        return EXIT_PREEMPTED
    if not trainer.results and trainer.evaluate is not None:
        # The run had ended before it was resumed.
        trainer.results = trainer.evaluate()
    write_results(config, inputs, trainer, model)
    with strategy.averaged():
        if strategy.rank == 0:
            log_sample(config, inputs, model)
    if strategy.rank == 0:
        log_ending(config, inputs, trainer)
        loss = trainer.results.get("loss", 0.0)
        diverged = None if math.isfinite(loss) else "the validation loss is not finite"
        inputs.run.say("finished", reason=diverged, step=step)
    return 0


def _evaluate(
    config: GPTConfig, inputs: "Inputs", model: "PreTrainedModel", strategy: "AcceleratedStrategy"
) -> int:
    from llm.trainers.gpt.results import log_beginning
    from llm.trainers.gpt.setup import load_weights, make_evaluate

    log_beginning(config, inputs, strategy, model)
    load_weights(inputs, strategy)
    evaluate = make_evaluate(config, inputs, strategy)
    assert evaluate is not None  # read_inputs asks for validation data
    results = evaluate()
    logger.info(" | ".join(f"{name}: {value:.6g}" for name, value in results.items()))
    if strategy.rank == 0:
        inputs.run.path.mkdir(parents=True, exist_ok=True)
        path = inputs.run.path / "eval_results.json"
        write_whole(path, json.dumps(results, indent=1) + "\n")
        logger.info(f"results: {path}")
    return 0
