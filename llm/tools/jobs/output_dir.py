"""Prints the folder of a run, for job scripts: `llm-trainers jobs output_dir TRAINER OPTIONS`."""

import sys
from collections.abc import Sequence

from llm.errors import ConfigError
from llm.trainers.gpt.main import parse_args


def print_output_dir(trainer_arguments: Sequence[str]) -> int:
    """Print the `output_dir` that the trainer reads from its arguments; return the exit code.

    Raises:
        ConfigError: They set none, or the trainer refuses them.
    """
    output_dir = parse_args(trainer_arguments).output_dir
    if output_dir is None:
        raise ConfigError("The job script needs an output_dir; add it to the trainer's options.")
    sys.stdout.write(f"{output_dir}\n")
    return 0
