"""The program: parse the options, train or evaluate, and turn errors into exit codes.

Exit codes: 0 finished, 1 an unforeseen error, 2 an option or input that cannot work, or a device
without the memory for the run, 75 stopped by a signal, --exit_after or the death of its launcher,
with everything saved (run the same command again), 76 another rank has died or hangs. A signal
before training begins, when there is nothing to save yet, ends the process at once, and so does a
second one some seconds after the first: the exit code is then 128 plus the signal's number, as in a
shell.
"""

import contextlib
import dataclasses
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.config.command_line import parse_options, split_config_file
from llm.config.terminal import escape_unencodable_output, flush_output
from llm.errors import ConfigError, LLMError, ParallelError, PeerLostError, explain_wrapped_os_error
from llm.runtime.agreement import is_shared, leave_together
from llm.runtime.health import EXIT_PEER_LOST
from llm.runtime.logging import quiet_libraries, set_up_logging
from llm.runtime.process_settings import (
    ProcessEnd,
    deterministic_kernels,
    expand_segments,
    limit_spin_wait,
    raise_file_limit,
    restart_with_kept_memory,
    use_private_compile_cache,
)
from llm.runtime.signals import watch_launcher
from llm.runtime.world import World, set_torchrun_variables, world_from_environment
from llm.trainers.gpt.config import check_config, read_preset_options
from llm.trainers.gpt.data_tokenizer import use_tokenizer_of_data

if TYPE_CHECKING:
    from llm.trainers.gpt.extensions import GPTConfig

GRACE_SECONDS = 3.0
"""Grace period for the failing rank to print its error before the launcher kills the job."""

logger = logging.getLogger("llm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer and return the exit code."""
    escape_unencodable_output()
    process_end = ProcessEnd() if argv is None else None
    try:
        exit_code = _run_and_log_errors(argv)
    finally:
        flush_output()  # otherwise a full disk behind it would replace the exit code
    if process_end is not None:
        process_end.exit_code = exit_code
    return exit_code


def _run_and_log_errors(argv: Sequence[str] | None) -> int:
    """Train or evaluate, turn an error into a line of the log, and return the exit code."""
    try:
        world = world_from_environment()
    except ParallelError as error:
        set_up_logging(rank=0)  # the rank is unknown, so each process logs the error
        logger.error(f"error: {error}")
        return 2
    set_up_logging(rank=world.rank)
    watch_launcher()
    try:
        arguments = _start_program() if argv is None else argv
        config = parse_args(arguments)
        return run(config, world, config_file=split_config_file(arguments)[0])
    except PeerLostError as error:
        if not error.reported:
            logger.error(f"error: {error}")
        return EXIT_PEER_LOST
    except LLMError as error:
        _log_error_once(error, str(error), world)
        return 2
    except KeyboardInterrupt:
        logger.error("Interrupted before training began.")
        return 130
    except Exception as error:
        sentence = explain_wrapped_os_error(error)
        if sentence is None:  # with its stack, in the run's log and on the console
            logger.exception("The run failed.")
            return 1
        _log_error_once(error, sentence, world)
        return 2


def _start_program() -> Sequence[str]:
    """Set up a process that runs only this program, and return the arguments of its command."""
    with contextlib.suppress(OSError, RuntimeError):  # stderr is missing or has no file
        faulthandler.enable()  # show the place of a bus error, for example from a failing disk
    arguments = sys.argv[1:]
    if not {"-h", "--help"} & {*arguments}:
        restart_with_kept_memory()  # before `parse_args`, which logs what it chooses
    return arguments


def parse_args(argv: Sequence[str]) -> "GPTConfig":
    """Read the options and check them against each other.

    Raises:
        ConfigError: An option is unknown, malformed, or does not fit the others; or an installed
            extension is broken.
        DataError: No option names the tokenizer, and the first token file does not exist.
    """
    # Imported here, so that a broken extension is refused with one sentence.
    from llm.trainers.gpt.extensions import GPTConfig
    from llm.trainers.gpt.recorded_config import read_inherited_options

    config = parse_options(
        GPTConfig,
        argv,
        prog="llm-trainers train",
        description="Pretrain any Hugging Face causal language model on any text.",
        inherit=lambda values: read_preset_options(values) | read_inherited_options(values),
    )
    config = use_tokenizer_of_data(config)
    _check_launcher_plugins()
    config = _use_launcher_precision(config)
    check_config(config)
    return config


def _check_launcher_plugins() -> None:
    """Refuse the plugins of `accelerate config`, since nobody has tried them."""
    for plugin in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        variable = f"ACCELERATE_USE_{plugin}"
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"):
            raise ConfigError(
                f"Accelerate's configuration turns {plugin} on ({variable}): turn it off there, "
                "and divide the model by --data_parallel_shard_size or --tensor_parallel_size."
            )


def _use_launcher_precision(config: "GPTConfig") -> "GPTConfig":
    """Return options with the precision of Accelerate's launcher, unless they set one."""
    if config.mixed_precision in (None, "no"):
        # `accelerate launch --mixed_precision bf16` and `accelerate config` set this variable.
        precision: Any = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision in ("fp8", "fp16", "bf16"):
            return dataclasses.replace(config, mixed_precision=precision)
    return config


def _log_error_once(error: Exception, sentence: str, world: World) -> None:
    """Log an error on rank 0 or on the only rank that raised it, before a launcher kills the ranks.

    The sentence is its message for the log.
    """
    # An error that is not of this package is found by the rank with the file.
    found_here = getattr(error, "found_here", not is_shared(error))
    if world.is_main or found_here:
        logger.error(f"error: {sentence}")
    # A launcher kills all ranks as soon as one ends: the logging rank must be first.
    if is_shared(error):
        leave_together(GRACE_SECONDS)
    elif world.world_size > 1 and not (world.is_main or found_here):
        time.sleep(GRACE_SECONDS)
        logger.error(f"error: {sentence}")  # still alive, so no other rank failed with this error


def run(config: "GPTConfig", world: World, *, config_file: Path | None) -> int:
    """Train or evaluate as configured and return the exit code."""
    set_torchrun_variables()
    raise_file_limit()
    limit_spin_wait()
    expand_segments()
    use_private_compile_cache()
    quiet_libraries()
    # Imported here so that --help and wrong options do not need torch.
    from llm.trainers.gpt.out_of_memory import explain_out_of_memory
    from llm.trainers.gpt.train import evaluate, train

    deterministic = deterministic_kernels() if config.deterministic else contextlib.nullcontext()
    with explain_out_of_memory(config, world), deterministic:
        if not config.eval_only:
            return train(config, world, config_file=config_file)
        evaluate(config, world)
    return 0
