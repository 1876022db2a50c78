"""The files with code that runs for one batch, measured, and what the architecture page says."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import llm
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench

PACKAGE = Path(llm.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def train_and_note_files(argv: list[str]) -> tuple[int, set[str], set[str]]:
    """Train; return the exit code, and the files that read a batch and that train on it."""
    from llm.data.loader import TrainLoader
    from llm.trainers.gpt import main
    from llm.trainers.gpt.loop import Trainer

    def note_files(cls: type, name: str) -> set[str]:
        """Return the files of the functions that a method calls, to be filled while it runs."""
        files: set[str] = set()
        method = getattr(cls, name)

        def note_file(frame: FrameType, event: str, _: Any) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(PACKAGE):
                files.add(path.relative_to(PACKAGE).as_posix())

        def profiled(self: Any, *args: Any) -> Any:
            sys.setprofile(note_file)
            try:
                return method(self, *args)
            finally:
                sys.setprofile(None)

        setattr(cls, name, profiled)
        return files

    reading, training = note_files(TrainLoader, "_read_step"), note_files(Trainer, "train_step")
    return main.main(argv), reading, training


def test_the_page_says_how_many_files_have_code_for_a_batch(tmp_path):
    argv = Bench(tmp_path, lines=60).command("run", max_train_steps=2)
    code, reading, training = values(run_ranks(train_and_note_files, 1, argv))[0]
    assert code == 0

    section = PAGE.read_text(encoding="utf-8").split("\nWith the defaults, one batch runs code in ")
    numbers = re.match(r"(\d+) files: (\d+) read it, and (\d+) train on it\.", section[1])
    assert numbers is not None
    measured = (len(reading | training), len(reading), len(training))
    assert tuple(map(int, numbers.groups())) == measured, sorted(reading | training)
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", section[1], re.MULTILINE)
    assert len(listed) == 7
    assert {*listed} <= reading | training
