"""`llm-trainers quickstart` in a folder that is not a clone; the trainer's part is left out."""

import sys
import tomllib
from pathlib import Path

import pytest

from llm.tools import quickstart
from tests.support.package import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trainings(monkeypatch) -> list[list[str]]:
    """The arguments of each training."""
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["llm-trainers quickstart"])
    monkeypatch.setattr(quickstart.trainer, "main", lambda: started.append(sys.argv[1:]) or 0)
    return started


def test_the_quick_start_trains_on_a_copy_of_the_examples(folder, trainings, capsys):
    assert quickstart.main(["--seed", "3"]) == 0

    assert trainings == [["--config", "examples/quickstart.toml", "--seed", "3"]]
    assert capsys.readouterr().out == "Copied text, tokenizer and configuration to examples/.\n"
    assert [path.name for path in folder.iterdir()] == ["examples"]
    text = "examples/data/shakespeare.txt"
    assert (folder / text).read_bytes() == (ROOT / text).read_bytes()
    settings = tomllib.loads((folder / "examples/quickstart.toml").read_text())
    for key in ("model_name_or_path", "tokenizer_name", "train_file"):
        assert (folder / settings[key]).exists()


def test_a_second_quick_start_keeps_the_files_that_were_edited(folder, trainings, capsys):
    quickstart.main([])
    config = folder / "examples/quickstart.toml"
    config.write_text("max_train_steps = 3\n")
    (folder / "examples/data/shakespeare.txt").unlink()
    capsys.readouterr()

    assert quickstart.main([]) == 0

    assert len(trainings) == 2
    assert config.read_text() == "max_train_steps = 3\n"
    assert not (folder / "examples/data/shakespeare.txt").exists()
    assert capsys.readouterr().out == ""


def test_a_folder_named_examples_with_other_content_is_left_alone(folder, trainings, capsys):
    (folder / "examples").mkdir()
    (folder / "examples/mine.txt").write_text("mine")

    assert quickstart.main([]) == 2

    assert trainings == []
    assert capsys.readouterr().err == (
        "error: examples exists here without quickstart.toml, so nothing is written into it; "
        "start the quick start in another folder.\n"
    )
    assert [path.name for path in folder.rglob("*")] == ["examples", "mine.txt"]


def test_a_wrong_option_is_left_to_the_trainer_and_nothing_is_copied(folder, trainings):
    quickstart.main(["--learning_rat", "1"])

    [[_, config, *options]] = trainings
    assert Path(config) == quickstart.shipped_examples() / "quickstart.toml"
    assert options == ["--learning_rat", "1"]
    assert not list(folder.iterdir())


def test_a_copy_that_fails_leaves_nothing(folder, trainings, capsys, monkeypatch):
    def full(source, target, **_):
        raise OSError(28, "No space left on device", target)

    monkeypatch.setattr(quickstart.shutil, "copyfile", full)  # which copy2 calls

    assert quickstart.main([]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: examples cannot be written here: [Errno 28] No space left")
    assert not list(folder.iterdir())


def test_of_two_ranks_that_copy_at_once_the_first_wins(folder, monkeypatch, capsys):
    source = quickstart.shipped_examples()
    rename = Path.rename

    def rename_after_another_rank(self, target):
        monkeypatch.setattr(Path, "rename", rename)
        quickstart.copy_examples(source)
        (folder / "examples/quickstart.toml").write_text("# of the other rank\n")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_after_another_rank)
    monkeypatch.setattr(quickstart.os, "getpid", iter([1, 2]).__next__)

    quickstart.copy_examples(source)

    assert (folder / "examples/quickstart.toml").read_text() == "# of the other rank\n"
    assert [path.name for path in folder.iterdir()] == ["examples"]
