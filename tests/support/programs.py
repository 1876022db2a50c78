"""The programs of the command `llm-trainers`, run in the process of a test."""

import importlib
from collections.abc import Sequence

from llm.__main__ import PROGRAMS


def run_program(words: Sequence[str]) -> int:
    """Run `llm-trainers WORDS ...`; return the exit code."""
    name, *arguments = words
    module = importlib.import_module(PROGRAMS[name].target.partition(":")[0])
    return module.main(arguments)
