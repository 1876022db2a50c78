"""Ranks that verify a checkpoint together: what each reads, and that one verdict counts for all."""

import shutil
from pathlib import Path

import pytest
import torch

from llm.checkpoint import format as checkpoint_format
from llm.checkpoint import snapshot
from llm.checkpoint.format import read_manifest
from llm.checkpoint.load import find_newest_checkpoint, read_verified_checkpoint
from llm.errors import LLMError
from llm.runtime.files import checksum
from llm.runtime.world import world_from_environment
from tests.support.checkpoints import Part, save, saver_of
from tests.support.ranks import run_ranks, values


def newest_step(folder: Path) -> tuple[int | None, list[str]]:
    """The step of the newest valid checkpoint, and the files that this rank has hashed."""
    read = []

    def counted(path: Path) -> str:
        read.append(path.name)
        return checksum(path)

    checkpoint_format.checksum = counted
    found = find_newest_checkpoint(folder, is_collective=True)
    return found and found.step, read


def save_twelve_files(folder: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(snapshot, "_FILE_BYTES", 1)
    part = Part({f"layer.{i}": torch.full((2500,), float(i)) for i in range(12)})
    saver_of(folder, part, keep_checkpoints=9).save(step=step, eval_loss=None)
    return folder / f"step_{step:08d}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_hashes_an_equal_share_and_each_file_once(tmp_path, monkeypatch, ranks):
    files = read_manifest(save_twelve_files(tmp_path, 1, monkeypatch)).files
    total = sum(size for size, _ in files.values())

    found = values(run_ranks(newest_step, ranks, tmp_path))

    assert [step for step, _ in found] == [1] * ranks
    assert sorted(name for _, read in found for name in read) == sorted(files)
    for _, read in found:
        assert abs(sum(files[name][0] for name in read) - total / ranks) < 1000


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_a_file_that_one_rank_finds_damaged_is_refused_by_all(tmp_path, monkeypatch, ranks):
    save_twelve_files(tmp_path, 1, monkeypatch)
    newest = save_twelve_files(tmp_path, 2, monkeypatch)
    for path in sorted(newest.glob("*.safetensors"))[::5]:
        sound = path.read_bytes()
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))

        found = values(run_ranks(newest_step, ranks, tmp_path))

        path.write_bytes(sound)
        assert [step for step, _ in found] == [1] * ranks


def error_of_own_folder(folder: Path) -> str:
    """The error of ranks that are given a folder each."""
    try:
        find_newest_checkpoint(folder / str(world_from_environment().rank), is_collective=True)
    except LLMError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_ranks_that_see_different_folders_end_in_the_same_sentence(tmp_path):
    save(tmp_path / "0", 1)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    (tmp_path / "2").mkdir()

    errors = values(run_ranks(error_of_own_folder, 3, tmp_path))

    assert all(error.startswith("ParallelError: Rank 2 sees other checkpoints") for error in errors)


def error_of_named(folder: Path) -> str:
    try:
        read_verified_checkpoint(folder, is_collective=True)
    except LLMError as error:
        return str(error)
    return "none"


def test_a_named_damaged_checkpoint_gives_all_ranks_the_same_sentence(tmp_path):
    path = save(tmp_path, 1)
    name = next(path.glob("*.safetensors")).name
    (path / name).write_bytes((path / name).read_bytes()[:-1] + b"x")

    errors = values(run_ranks(error_of_named, 2, path))

    assert errors == [f"{path} is damaged: {name} does not match its checksum."] * 2
