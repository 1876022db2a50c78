"""Functions that start a program with the options of its command, in another process.

The package offers them as `llm.train` and so on, and imports them when they are used first. A
keyword is the name of an option. `True` turns a switch on and `False` off, a sequence holds several
values, a mapping becomes JSON, and `None` unsets an option, as the word `none` does on the command
line.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from llm.errors import LLMError, ProgramError
from llm.runtime.signals import EXIT_PREEMPTED
from llm.tools.python.child_process import (
    ChildProcess,
    make_program_error,
    program_command,
    run_program,
)
from llm.tools.python.live_curves import make_display, show_line
from llm.tools.python.trained_run import Run

Value: TypeAlias = bool | int | float | str | os.PathLike[str]
OptionValue: TypeAlias = Value | Sequence[Value] | Mapping[str, Any] | None
"""The value of an option."""


def train(*, num_processes: int = 1, show: bool = True, **options: OptionValue) -> Run:
    """Train a model, as `llm-trainers train` does.

    An interruption (Ctrl-C, or the stop button of a notebook) lets the run save a checkpoint and
    end, and is raised again. The run also ends if this process dies.

    Args:
        num_processes: Number of processes on this machine, started by torchrun if it is more than
            one; usually the number of GPUs.
        show: Whether to show the progress: curves in a notebook, otherwise the lines of the log.
        options: Options of the trainer.

    Returns:
        The run. Its status is `preempted` if it stopped early, as after `exit_after` minutes.

    Raises:
        ProgramError: The trainer refuses an option or an input, or the run fails. The message is
            the sentence of the command.
    """
    arguments = to_arguments(options)
    run = Run(_find_output_dir(arguments))
    earlier_status = _read_status_file(run)
    output, exit_code = _run_trainer(
        arguments, num_processes=num_processes, display=make_display(run.path) if show else None
    )
    # torchrun hides the exit codes of its processes. A refused start leaves the former status.
    has_stopped = exit_code == EXIT_PREEMPTED or (
        num_processes > 1 and run.status == "preempted" and _read_status_file(run) != earlier_status
    )
    if exit_code != 0 and not has_stopped:
        raise make_program_error("train", output, exit_code)
    return run


def evaluate(
    *, num_processes: int = 1, show: bool = True, **options: OptionValue
) -> dict[str, float]:
    """Evaluate a model or the checkpoint of a run, as `llm-trainers train --eval_only` does.

    Args:
        num_processes: Number of processes on this machine.
        show: Whether to show the lines of the log.
        options: Options of the trainer.

    Returns:
        The results by name, as in `eval_results.json`.

    Raises:
        ProgramError: The trainer refuses an option or an input, or the evaluation fails.
    """
    arguments = [*to_arguments(options), "--eval_only"]
    path = _find_output_dir(arguments) / "eval_results.json"
    output, exit_code = _run_trainer(
        arguments, num_processes=num_processes, display=show_line if show else None
    )
    if exit_code != 0:
        raise make_program_error("train", output, exit_code)
    results: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return results


def plan(**options: OptionValue) -> dict[str, Any]:
    """Predict memory, traffic and time of a run, as `llm-trainers plan --json` does.

    Args:
        options: Options of the program, which are the options of the trainer and the devices.

    Returns:
        The numbers by their keys in the JSON, and `fits`: whether the run fits into the memory.

    Raises:
        ProgramError: An option cannot work.
    """
    arguments = to_arguments({**options, "json": True})
    output, exit_code = run_program("plan", arguments, expected_codes=(0, 1))
    values: dict[str, Any] = json.loads(output)
    return {**values, "fits": exit_code == 0}


def generate(run: str | os.PathLike[str], **options: OptionValue) -> list[str]:
    """Generate text with a trained model, as `llm-trainers generate` does.

    Args:
        run: A run or its folder, a checkpoint's folder, or a folder that from_pretrained can load.
        options: Options of the program, such as `prompt`.

    Returns:
        The texts, `num_samples` of them.

    Raises:
        ProgramError: An option cannot work, a file cannot be read, or the model has diverged.
    """
    arguments = to_arguments({"run": run, **options})
    output, _ = run_program("generate", arguments)
    texts = re.split(r"^--- text \d+ of \d+, --seed \d+\n", output, flags=re.MULTILINE)
    return [text.removesuffix("\n") for text in (texts[1:] or texts)]


def to_arguments(options: dict[str, OptionValue]) -> list[str]:
    """Return options as arguments of a command line.

    Raises:
        ProgramError: `help` is not an option, or a value is a class.
    """
    arguments: list[str] = []
    for name, value in options.items():
        if name in ("h", "help"):
            raise ProgramError(
                f"{name} is not an option of a function; llm-trainers PROGRAM --help lists them."
            )
        if isinstance(value, type):
            raise ProgramError(
                f"{name} does not take the class {value.__qualname__} itself; give its name, such "
                f'as {name}="package.module:{value.__qualname__}".'
            )
        if value is True:
            arguments.append(f"--{name}")
        elif value is False:
            arguments.append(f"--no_{name}")
        elif value is None:
            arguments.append(f"--{name}=none")
        elif isinstance(value, Mapping):
            arguments.append(f"--{name}={json.dumps(value)}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            texts = [_to_argument(item) for item in value] or ["none"]
            # A value after "=" may begin with a dash.
            arguments += [f"--{name}={texts[0]}"] if len(texts) == 1 else [f"--{name}", *texts]
        else:
            arguments.append(f"--{name}={_to_argument(value)}")
    return arguments


def _to_argument(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _read_status_file(run: Run) -> bytes:
    """Return the contents of the run's `status.json`, which differ after each start; or nothing."""
    path = run.path / "status.json"
    return path.read_bytes() if path.is_file() else b""


def _find_output_dir(arguments: Sequence[str]) -> Path:
    """Return the folder that the trainer writes to.

    Raises:
        ProgramError: The trainer refuses the options.
    """
    from llm.trainers.gpt.main import parse_args
    from llm.trainers.gpt.output_folder import choose_default_output_dir

    try:
        config = parse_args(arguments)
    except LLMError as error:
        raise ProgramError(str(error), exit_code=2) from error
    return Path(config.output_dir or choose_default_output_dir(config))


def _run_trainer(
    arguments: Sequence[str], *, num_processes: int, display: Callable[[str], None] | None
) -> tuple[str, int]:
    """Run the trainer; return what it has written, and its exit code.

    Args:
        arguments: Arguments of the trainer.
        num_processes: Number of processes.
        display: Shows a line of the log; None to show nothing.

    Raises:
        ProgramError: The number of processes is not a positive whole number.
        KeyboardInterrupt: The call was interrupted, and the trainer has ended.
    """
    if not isinstance(num_processes, int) or num_processes < 1:
        raise ProgramError(
            f"num_processes must be a whole number of at least 1, not {num_processes!r}."
        )
    command = program_command("train", arguments)
    if num_processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(num_processes)]
        command = [*launcher, "-m", "llm.trainers.gpt", *arguments]
    lines: list[str] = []
    with ChildProcess(command, is_merged=True) as child:
        for line in child.lines():
            lines.append(line)
            if display is not None and not line.startswith("error: "):  # which is raised
                display(line)
        _, _, exit_code = child.finish()
    return "".join(lines), exit_code
