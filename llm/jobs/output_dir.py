"""Prints the folder of a run, for job scripts: `python -m llm.jobs.output_dir TRAINER OPTIONS`."""

import sys
from collections.abc import Sequence

from llm.config.program import program
from llm.errors import ConfigError
from llm.trainers.gpt.main import parse_args


@program
def main(argv: Sequence[str]) -> int:
    """Print the `output_dir` that the trainer reads from these arguments; return the exit code."""
    output_dir = parse_args(argv).output_dir
    if output_dir is None:
        raise ConfigError("The job script needs an output_dir; add it to the trainer's options.")
    sys.stdout.write(f"{output_dir}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
