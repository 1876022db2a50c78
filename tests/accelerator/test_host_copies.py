"""The copies of a save, which a GPU makes beside the next step."""

from collections.abc import Container
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llm.checkpoint.format import checkpoint_name
from llm.checkpoint.save import Saver
from llm.checkpoint.snapshot import HostCopies
from tests.accelerator.late_copies import LateCopies
from tests.support.checkpoints import Part, saver_of
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench


@pytest.fixture
def late(monkeypatch):
    LateCopies(monkeypatch.setattr)


def save_twice(folder: Path, *, copied_first: Container[str] = ()) -> list[dict[str, int]]:
    """Save two states, each of which the next step changes; what the checkpoints hold."""
    part = Part({"weight": torch.ones(3), "buffer": torch.ones(3)})
    saver = saver_of(folder, part, async_checkpoint=True, copied_first=copied_first)
    for step in (1, 2):
        saver.save(step=step, eval_loss=None)
        part.state["buffer"] += 1  # in the forward pass
        saver.before_update()
        part.state["weight"] += 1
    saver.finish(is_final=True)
    return [held_by(folder, step=step) for step in (1, 2)]


def held_by(folder: Path, *, step: int) -> dict[str, int]:
    tensors = tensors_of(folder, step=step)
    return {path.removeprefix("part/"): int(tensor[0]) for path, tensor in tensors.items()}


def tensors_of(folder: Path, *, step: int) -> dict[str, torch.Tensor]:
    [file] = (folder / checkpoint_name(step)).glob("*.safetensors")
    return load_file(file)


def test_a_checkpoint_has_the_values_from_before_the_next_step(late, tmp_path):
    assert save_twice(tmp_path, copied_first={"part/buffer"}) == [
        {"weight": 1, "buffer": 1},
        {"weight": 2, "buffer": 2},
    ]


def test_what_the_gradient_changes_must_be_copied_first(late, tmp_path):
    assert save_twice(tmp_path) == [
        {"weight": 1, "buffer": 2},
        {"weight": 2, "buffer": 3},
    ]


def test_without_a_wait_on_the_device_it_has_those_of_the_next_step(late, tmp_path, monkeypatch):
    monkeypatch.setattr(HostCopies, "wait_on_device", lambda self: None)
    assert save_twice(tmp_path) == [
        {"weight": 2, "buffer": 2},
        {"weight": 3, "buffer": 3},
    ]


def test_without_a_wait_on_the_host_it_has_those_of_the_last_save(late, tmp_path, monkeypatch):
    part = Part({"weight": torch.ones(3)})
    saver = saver_of(tmp_path, part, async_checkpoint=True)
    saver.save(step=1, eval_loss=None)
    saver.finish()
    part.state["weight"] += 1
    monkeypatch.setattr(HostCopies, "wait_on_host", lambda self: None)
    saver.save(step=2, eval_loss=None)
    saver.finish(is_final=True)
    assert held_by(tmp_path, step=2) == {"weight": 1}


def train(argv: list[str], how: str) -> int:
    from llm.trainers.gpt.main import main

    if how != "at once":
        LateCopies(setattr)
    if how == "too late":
        Saver.before_update = lambda self: None
    return main(argv)


def saved_tensors(run: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors in the checkpoints of steps 2, 4 and 6."""
    return [tensors_of(run / "checkpoints", step=step) for step in (2, 4, 6)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_trainers_checkpoints_are_those_of_copies_at_once(tmp_path):
    bench = Bench(tmp_path)
    options = {"max_train_steps": 6, "checkpointing_steps": 2, "keep_checkpoints": 3}
    saved = []
    for how in ("at once", "late", "too late"):
        command = bench.command(how, **options)
        assert values(run_ranks(train, 1, command, how)) == [0]
        saved.append(saved_tensors(tmp_path / how))
    at_once, late, too_late = saved
    assert list(map(same, late, at_once)) == [True, True, True]
    # The step after a save is in it; there is none after the last one.
    assert list(map(same, too_late, at_once)) == [False, False, True]
