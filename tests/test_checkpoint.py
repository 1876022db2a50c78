import json
from pathlib import Path

import pytest
import torch

from llm import checkpoint
from llm.errors import CheckpointError


class Part:
    """A part of a training state with tensors, nested values and numbers."""

    def __init__(self, fill: float) -> None:
        self.state = {
            "weight": torch.full((3, 2), fill),
            "optimizer": {"layer.weight": {"exp_avg": torch.full((2,), fill), "lr": 0.1 * fill}},
            "step": int(fill),
            "best": None,
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def save(folder: Path, step: int, *, fill: float = 1.0, eval_loss: float | None = None) -> Path:
    return checkpoint.save(
        folder,
        step=step,
        parts={"part": Part(fill)},
        facts={"eval_loss": eval_loss},
        rank=0,
        world_size=1,
        barrier=lambda: None,
    )


def steps(folder: Path) -> list[int]:
    return [found.step for found in checkpoint.found(folder)]


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    save(tmp_path, 7, fill=3.0)
    part = Part(0.0)

    found = checkpoint.newest_valid(tmp_path)
    checkpoint.load(found, {"part": part})

    assert found.step == 7
    assert torch.equal(part.state["weight"], torch.full((3, 2), 3.0))
    assert torch.equal(part.state["optimizer"]["layer.weight"]["exp_avg"], torch.full((2,), 3.0))
    assert part.state["optimizer"]["layer.weight"]["lr"] == 0.1 * 3.0
    assert part.state["step"] == 3
    assert part.state["best"] is None


def test_the_newest_valid_checkpoint_is_chosen(tmp_path):
    for step in (10, 9, 100):
        save(tmp_path, step)
    assert checkpoint.newest_valid(tmp_path).step == 100
    assert steps(tmp_path) == [9, 10, 100]


def test_half_written_checkpoint_is_never_chosen(tmp_path):
    save(tmp_path, 1)
    half = tmp_path / "step_00000002"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".step_00000003.tmp").mkdir()
    assert checkpoint.newest_valid(tmp_path).step == 1


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.newest_valid(tmp_path / "missing") is None


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "remove"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, harm, name):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = file.read_bytes()
    middle = len(content) // 2
    if harm == "flip" and name == "manifest.json":
        # A flipped bit of the manifest shows in a checksum or in the JSON.
        content = content.replace(b'"files"', b'"fules"')
        file.write_bytes(content)
    elif harm == "flip":
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif harm == "cut":
        file.write_bytes(content[:middle])
    elif harm == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    assert checkpoint.newest_valid(tmp_path).step == 1


def test_a_checkpoint_of_another_format_is_refused_by_name(tmp_path):
    manifest = save(tmp_path, 1) / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(CheckpointError, match="checkpoint format 99; this version reads 1"):
        checkpoint.read_manifest(manifest.parent)


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, fill=1.0)
    save(tmp_path, 5, fill=2.0)
    part = Part(0.0)
    checkpoint.load(checkpoint.newest_valid(tmp_path), {"part": part})
    assert part.state["weight"][0, 0] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_a_failed_save_is_one_sentence_and_leaves_the_others_alone(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_synced", full)
    with pytest.raises(CheckpointError, match=r"step 2 .* No space left .* untouched"):
        save(tmp_path, 2)
    assert checkpoint.newest_valid(tmp_path).step == 1


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(tmp_path):
    save(tmp_path, 1)
    other = Part(0.0)
    other.state["weight"] = torch.zeros(4, 2)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        checkpoint.load(checkpoint.newest_valid(tmp_path), {"part": other})


def test_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep_newest=2, keep_best=0)
    assert steps(tmp_path) == [4, 5]


def test_the_best_are_kept_besides_the_newest_and_linked(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0), (5, 5.0)):
        save(tmp_path, step, eval_loss=loss)
    checkpoint.prune(tmp_path, keep_newest=1, keep_best=2)
    assert steps(tmp_path) == [2, 3, 5]
    assert (tmp_path / "best").resolve().name == "step_00000002"


def test_everything_is_kept_unless_asked(tmp_path):
    for step in range(1, 4):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep_newest=None, keep_best=0)
    assert steps(tmp_path) == [1, 2, 3]
