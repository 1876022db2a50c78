"""The programs of `llm-trainers` and docs/generate.py, run in the process of a test."""

import importlib
import runpy
from collections.abc import Sequence

from llm.__main__ import PROGRAMS
from tests.support.package import ROOT

GENERATOR = runpy.run_path(str(ROOT / "docs/generate.py"))
option_list = GENERATOR["option_list"]


def run_program(words: Sequence[str]) -> int:
    """Run `llm-trainers WORDS ...`; return the exit code."""
    name, *arguments = words
    module = importlib.import_module(PROGRAMS[name].target.partition(":")[0])
    return module.main(arguments)
