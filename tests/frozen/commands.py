"""The commands whose results are recorded, run in a folder that has `inputs/`."""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import run_ranks

FOLDER = Path(__file__).parent

PREPARED = {
    "megatron": "--input inputs/text.jsonl --output_prefix out/corpus",
    "shuffled": "--input inputs/text.jsonl inputs/text.txt --text_unit line --no_append_eos "
    "--shuffle documents --seed 5 --output_prefix out/corpus",
    "nanogpt": "--input inputs/text.txt --text_unit paragraph --format nanogpt "
    "--validation_split_percentage 20 --output_prefix out/corpus",
}
"""Preparations of token files, by name."""


@dataclass
class Done:
    """A program that has ended: its exit code and what it printed."""

    code: int
    output: str


def with_inputs(folder: Path) -> Path:
    """The folder, once it has `inputs/`."""
    with contextlib.suppress(FileExistsError):
        (folder / "inputs").symlink_to(FOLDER / "inputs")
    return folder


def run(folder: Path, program: str, *argv: str) -> Done:
    """Run a program's `main` in a separate process, in a folder that has `inputs/`."""
    with_inputs(folder)
    (outcome,) = run_ranks(_main, 1, folder, program, argv, timeout=240)
    assert outcome.error is None, f"{outcome.error}\n{outcome.output}"
    return Done(outcome.value, outcome.output)


def _main(folder: Path, program: str, argv: Sequence[str]) -> int:
    os.chdir(folder)
    return importlib.import_module(program).main(argv)


def refusals(commands: Sequence[str], folder: Path) -> dict[str, dict[str, object]]:
    """How the trainer refuses commands: each one's exit code and the options that it speaks of."""
    (outcome,) = run_ranks(_refusals, 1, with_inputs(folder), commands, timeout=240)
    assert outcome.error is None, f"{outcome.error}\n{outcome.output}"
    return outcome.value


def _refusals(folder: Path, commands: Sequence[str]) -> dict[str, dict[str, object]]:
    os.chdir(folder)
    found: dict[str, dict[str, object]] = {}
    for command in commands:
        with open("output", "w+", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            code = importlib.import_module("llm.trainers.gpt.main").main(command.split())
            sys.stdout.flush()
            output = Path("output").read_text(encoding="utf-8")
        assert "Traceback" not in output, output
        found[command] = {"code": code, "options": sorted(set(re.findall(r"--\w+", output)))}
    return found
