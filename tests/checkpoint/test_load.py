import json
import logging
import math
import os
import pickle
import random
import shutil

import pytest
import torch

from llm.checkpoint import snapshot
from llm.checkpoint.format import MANIFEST, REPLACED_SUFFIX, add_checksum, read_manifest
from llm.checkpoint.load import (
    find_newest_checkpoint,
    list_checkpoints,
    load_state,
    read_verified_checkpoint,
)
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.retention import mark_superseded, prune_checkpoints
from llm.errors import CheckpointError
from llm.runtime.files import checksum
from tests.support.checkpoints import Part, filled, is_filled, load, save, saver_of, steps

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def test_the_newest_valid_checkpoint_is_chosen(tmp_path):
    for step in (10, 9, 100):
        save(tmp_path, step)

    assert find_newest_checkpoint(tmp_path).step == 100
    assert steps(tmp_path) == [9, 10, 100]


def test_steps_are_ordered_as_numbers_also_beyond_eight_digits(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, fill=1.0)

    assert find_newest_checkpoint(tmp_path).step == 100_000_000


def test_a_half_written_checkpoint_is_never_chosen(tmp_path):
    save(tmp_path, 1)
    half = save(tmp_path, 2)
    (half / MANIFEST).unlink()
    shutil.copytree(tmp_path / "step_00000001", tmp_path / ".step_00000003.tmp")

    assert find_newest_checkpoint(tmp_path).step == 1


def test_an_empty_folder_has_no_newest_checkpoint(tmp_path):
    assert find_newest_checkpoint(tmp_path / "missing") is None


def harmed(content: bytes, harm: str, draw: random.Random, other: bytes) -> bytes | None:
    """What a file holds after some damage; None if it is gone."""
    if harm == "flip":
        place = draw.randrange(len(content))
        flipped = content[place] ^ 1 << draw.randrange(8)
        return content[:place] + bytes([flipped]) + content[place + 1 :]
    if harm == "cut":
        return content[: draw.randrange(1, len(content))]
    return {"empty": b"", "remove": None, "swap": other}[harm]


def test_200_kinds_of_damage_are_detected_before_a_tensor_is_read(tmp_path, monkeypatch, caplog):
    # A file for each tensor.
    monkeypatch.setattr(snapshot, "_FILE_BYTES", 8)
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    files = sorted(path.name for path in bad.iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) == 2
    monkeypatch.setattr("safetensors.safe_open", None)
    caplog.set_level(logging.INFO, "llm")
    draw = random.Random(1)
    cases = [(name, harm) for name in files for harm in ("cut", "empty", "remove", "swap")]
    # Most of what happens to a disk is small.
    cases += [(draw.choice(files), "flip") for _ in range(200 - len(cases))]
    silent = []
    for name, harm in cases:
        content = (bad / name).read_bytes()
        after = harmed(content, harm, draw, (good / name).read_bytes())
        assert after != content
        if after is None:
            (bad / name).unlink()
        else:
            (bad / name).write_bytes(after)
        caplog.clear()
        found = find_newest_checkpoint(tmp_path)
        if found is None or found.step != 1 or f"Skipping a checkpoint: {bad}" not in caplog.text:
            silent.append((name, harm))
        (bad / name).write_bytes(content)

    assert len(cases) == 200
    assert silent == []
    assert find_newest_checkpoint(tmp_path).step == 2


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_detected(tmp_path):
    path = save(tmp_path, 1, eval_loss=2.5) / MANIFEST
    content = path.read_bytes()
    silent = []
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            read_manifest(path.parent)
        except CheckpointError:
            continue
        silent.append(place)

    assert silent == []


def test_a_valid_checkpoint_named_after_another_step_is_skipped(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "step_00000003")

    assert find_newest_checkpoint(tmp_path).step == 1
    with pytest.raises(CheckpointError, match="its manifest belongs to step 2"):
        read_verified_checkpoint(tmp_path / "step_00000003")


def test_a_checkpoint_copied_to_any_other_name_can_be_loaded(tmp_path):
    shutil.copytree(save(tmp_path, 2), tmp_path / "before_the_spike")

    assert read_verified_checkpoint(tmp_path / "before_the_spike").step == 2


def test_an_extra_tensor_file_makes_a_checkpoint_invalid(tmp_path):
    path = save(tmp_path, 1)
    shutil.copy(path / SHARD, path / "shard-00002-model-00001-of-00001.safetensors")

    with pytest.raises(CheckpointError, match=r"shard-00002.* does not belong to it"):
        read_verified_checkpoint(path)


def test_an_unreadable_file_makes_a_checkpoint_invalid(tmp_path, monkeypatch):
    save(tmp_path, 1)
    path = save(tmp_path, 2)

    def fail(file):
        if file.parent == path:
            raise OSError(5, "Input/output error")
        return checksum(file)

    monkeypatch.setattr("llm.checkpoint.format.checksum", fail)

    assert find_newest_checkpoint(tmp_path).step == 1
    with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\)"):
        read_verified_checkpoint(path)


def test_a_checkpoint_of_another_format_is_refused_by_name(tmp_path):
    manifest = save(tmp_path, 1) / MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(add_checksum(json.dumps({**content, "format": 99}, indent=1)))

    with pytest.raises(CheckpointError, match="checkpoint format 99; this version reads 2"):
        read_manifest(manifest.parent)


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(tmp_path):
    save(tmp_path, 1)
    other = filled(0.0)
    other.state["weight"] = torch.zeros(4, 2)

    with pytest.raises(CheckpointError, match="does not fit this model or optimizer") as caught:
        load_state(find_newest_checkpoint(tmp_path), {"part": other})
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    save(tmp_path, 1)
    larger = filled(0.0)
    larger.state["optimizer"]["layer.bias"] = {"exp_avg": torch.zeros(2)}

    with pytest.raises(CheckpointError, match=r"does not fit .*layer\.bias"):
        load_state(find_newest_checkpoint(tmp_path), {"part": larger})


def test_a_checkpoint_with_tensors_that_the_model_lacks_is_refused(tmp_path):
    save(tmp_path, 1)
    smaller = filled(0.0)
    smaller.state["optimizer"] = {}

    with pytest.raises(CheckpointError, match=r"which has no part/optimizer/layer\.weight/exp_avg"):
        load_state(find_newest_checkpoint(tmp_path), {"part": smaller})


def test_a_component_may_load_a_subset_of_its_state(tmp_path):
    save(tmp_path, 4)
    part = Part({"optimizer": {"layer.weight": {"exp_avg": torch.zeros(2)}}})

    load_state(find_newest_checkpoint(tmp_path), {"part": part})

    moments = part.state["optimizer"]["layer.weight"]
    assert torch.equal(moments["exp_avg"], torch.full((2,), 4.0))


def test_a_component_that_the_checkpoint_lacks_is_named(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="holds no meter"):
        load_state(find_newest_checkpoint(tmp_path), {"meter": filled(0.0)})


def test_checkpoints_hold_no_pickle_and_loading_never_unpickles(tmp_path, monkeypatch):
    path = save(tmp_path, 3)

    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)

    assert is_filled(load(find_newest_checkpoint(tmp_path)), 3.0)
    for file in path.iterdir():
        content = file.read_bytes()
        if file.suffix == ".safetensors":
            # Eight bytes of length, then that much JSON, then numbers.
            content = content[8 : 8 + int.from_bytes(content[:8], "little")]
        assert isinstance(json.loads(content), dict)


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, fill=1.0)
    save(tmp_path, 5, fill=2.0)

    assert is_filled(load(find_newest_checkpoint(tmp_path)), 2.0)
    assert os.listdir(tmp_path) == ["step_00000005"]


def test_the_old_checkpoint_stays_valid_until_the_new_one_is_renamed(tmp_path):
    # What a kill leaves behind between the two renames.
    save(tmp_path, 5, fill=1.0).rename(tmp_path / f"step_00000005{REPLACED_SUFFIX}")
    assert is_filled(load(find_newest_checkpoint(tmp_path)), 1.0)

    # And what one leaves behind after both of them.
    shutil.copytree(tmp_path / f"step_00000005{REPLACED_SUFFIX}", tmp_path / "kept")
    save(tmp_path, 5, fill=2.0)
    (tmp_path / "kept").rename(tmp_path / f"step_00000005{REPLACED_SUFFIX}")
    assert is_filled(load(find_newest_checkpoint(tmp_path)), 2.0)

    save(tmp_path, 6)
    assert sorted(os.listdir(tmp_path)) == ["step_00000005", "step_00000006"]


@pytest.mark.parametrize(
    ("losses", "newest", "best", "every", "kept", "link"),
    [
        ([None] * 5, 2, 0, None, [4, 5], None),
        ([3.0, 1.0, 2.0, 4.0, 5.0], 1, 2, None, [2, 3, 5], "step_00000002"),
        # Zero is a loss, NaN is none.
        ([math.nan, 0.0, 1.0, None], 1, 1, None, [2, 4], "step_00000002"),
        ([1.0, 2.0, 3.0], None, 1, None, [1, 3], "step_00000001"),  # the newest too
        ([None] * 3, None, 0, None, [1, 2, 3], None),
        ([None] * 8, 2, 0, 3, [3, 6, 7, 8], None),
        ([5.0, 1.0, 4.0, 3.0, 2.0, 9.0, 9.0], 1, 2, 3, [2, 3, 5, 6, 7], "step_00000002"),
        ([3.0, 1.0, 2.0, 4.0, 5.0], None, 1, 1, [1, 2, 3, 4, 5], "step_00000002"),
    ],
)
def test_newest_best_and_permanent_checkpoints_are_kept(
    tmp_path, losses, newest, best, every, kept, link
):
    for step, loss in enumerate(losses, start=1):
        save(tmp_path, step, eval_loss=loss)
    options = CheckpointOptions(keep_checkpoints=newest, save_top_k=best, keep_every=every)
    prune_checkpoints(tmp_path, options, saved_step=len(losses))
    assert steps(tmp_path) == kept
    assert link is None or os.readlink(tmp_path / "best") == link


def test_a_checkpoint_stays_permanent_under_another_interval(tmp_path):
    for keep_every, saved_steps in ((4, range(1, 7)), (None, range(7, 10)), (5, range(10, 18))):
        saver = saver_of(tmp_path, filled(1.0), keep_checkpoints=1, keep_every=keep_every)
        for step in saved_steps:
            saver.save(step=step, eval_loss=None)

    assert steps(tmp_path) == [4, 10, 15, 17]


def test_only_a_checkpoint_that_becomes_the_best_is_announced(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="llm")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(tmp_path, step, eval_loss=loss)
        prune_checkpoints(
            tmp_path, CheckpointOptions(keep_checkpoints=1, save_top_k=1), saved_step=step
        )
    best = [message for message in caplog.messages if message.startswith("new best checkpoint")]
    assert best == [
        f"new best checkpoint: {tmp_path}/step_00000001, validation loss 3.0000",
        f"new best checkpoint: {tmp_path}/step_00000002, validation loss 1.0000",
    ]


def test_a_new_checkpoint_is_kept_next_to_a_damaged_later_one(tmp_path):
    save(tmp_path, 3)
    shard = save(tmp_path, 10) / SHARD
    content = shard.read_bytes()
    # Of the right size, so that only reading shows it: training went on from step 3.
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    saver_of(tmp_path, filled(5.0), keep_checkpoints=1).save(step=5, eval_loss=None)

    assert steps(tmp_path) == [5, 10]
    assert find_newest_checkpoint(tmp_path).step == 5


def test_checkpoints_after_the_resumed_step_are_marked_superseded(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)

    mark_superseded(tmp_path, step=2)

    assert find_newest_checkpoint(tmp_path).step == 2
    assert [c.step for c in list_checkpoints(tmp_path)] == [2]
    assert sorted(path.name for path in tmp_path.glob("*.superseded")) == [
        "step_00000004.superseded",
        "step_00000006.superseded",
    ]


def test_memory_without_room_for_a_checkpoint_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("unable to mmap 305904 bytes from file <x>: Cannot allocate memory (12)")

    checkpoint = read_verified_checkpoint(save(tmp_path, 1))
    monkeypatch.setattr("safetensors.safe_open", refuse)

    with pytest.raises(CheckpointError) as caught:
        load_state(checkpoint, {"part": filled(0.0)})

    assert str(caught.value) == (
        f"{checkpoint.path} cannot be used: Cannot allocate memory; free some memory, or raise the "
        "limit on it (ulimit -v)."
    )


def test_torch_shows_no_stack_of_a_checkpoint_that_cannot_be_read(tmp_path, caplog):
    checkpoint = read_verified_checkpoint(save(tmp_path, 1))
    (checkpoint.path / SHARD).write_bytes(b"")

    with pytest.raises(CheckpointError):
        load_state(checkpoint, {"part": filled(0.0)})

    assert "Global metadata is not found" not in caplog.text
