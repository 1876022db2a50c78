"""One command for every program: `llm-trainers train --config run.toml`, or `python -m llm`."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from llm import __version__
from llm.config.program import COMMAND, Program, program
from llm.errors import ConfigError

PROGRAMS = {
    "quickstart": Program("llm.tools.quickstart:main", "train a small GPT on the text that ships"),
    "train": Program("llm.trainers.gpt.main:main", "pretrain a model"),
    "tokenizer": Program("llm.prepare.train_tokenizer:main", "train a tokenizer on text"),
    "prepare": Program("llm.prepare.prepare:main", "turn text into token files"),
    "inspect": Program("llm.tools.inspect:main", "show and verify token files, or a step's text"),
    "fetch": Program("llm.tools.fetch:main", "download a run's inputs from the Hub into a folder"),
    "plan": Program("llm.tools.plan.plan:main", "predict memory, traffic and time of a run"),
    "jobs": Program("llm.tools.jobs.jobs:main", "write job scripts for Slurm and PBS"),
    "sweep": Program("llm.tools.sweep.sweep:main", "train runs that differ in some options"),
    "preflight": Program("llm.tools.preflight:run", "check every rank before a job begins"),
    "evidence": Program(
        "llm.tools.evidence.evidence:main", "check a machine, for one file to send"
    ),
    "checkpoints": Program("llm.tools.checkpoints:main", "list, verify, export, average them"),
    "generate": Program("llm.tools.generate:main", "generate text with a trained model"),
    "report": Program("llm.tools.report.report:main", "show runs as an HTML page of curves"),
}


@program
def main(argv: Sequence[str]) -> int:
    """Run the program that the first argument names; return the exit code."""
    program_name = argv[0] if argv else "--help"
    if program_name in ("-h", "--help"):
        sys.stdout.write(_help_text())
        return 0
    if program_name == "--version":
        sys.stdout.write(f"llm-trainers {__version__}\n")
        return 0
    if program_name not in PROGRAMS:
        close_names = difflib.get_close_matches(program_name, PROGRAMS, n=1, cutoff=0.5)
        hint = f"did you mean {close_names[0]}?" if close_names else f"{COMMAND} --help lists them."
        raise ConfigError(f"{COMMAND} has no program named '{program_name}'; {hint}")
    # The program reads its arguments itself, as if you had started it directly.
    sys.argv = [f"{COMMAND} {program_name}", *argv[1:]]
    module_name, _, function_name = PROGRAMS[program_name].target.partition(":")
    exit_code: int = getattr(importlib.import_module(module_name), function_name)()
    return exit_code


def _help_text() -> str:
    rows = [f"  {name:<13}{program.purpose}\n" for name, program in PROGRAMS.items()]
    return (
        f"usage: {COMMAND} PROGRAM [--OPTION VALUE ...]\n\n"
        f"programs:\n{''.join(rows)}\n"
        f"{COMMAND} PROGRAM --help shows the options of a program.\n"
        f"{COMMAND} --version shows the version.\n\n"
        "To train on several devices, start the trainer with torchrun:\n"
        "torchrun --nproc_per_node=auto --standalone -m llm.trainers.gpt --OPTION VALUE ...\n"
    )


if __name__ == "__main__":
    sys.exit(main())
