import errno
import itertools
import math
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

from llm.checkpoint import retention, snapshot
from llm.checkpoint import save as saving  # the tests' own helper is called `save`
from llm.checkpoint.format import split_state
from llm.checkpoint.load import find_newest_checkpoint, load_state, read_verified_checkpoint
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import NotFiniteError, Saver
from llm.errors import CheckpointError
from tests.support.checkpoints import (
    FailsAt,
    Part,
    filled,
    is_filled,
    join,
    load,
    save,
    saver_of,
    steps,
)
from tests.support.ranks import run_ranks, values


def every_kind(scale: int) -> Part:
    """A state of all that occurs in one: types, shapes, strides, nested plain values."""
    return Part(
        {
            "float32": scale * torch.linspace(-1, 1, 1000).reshape(10, 100),
            "transposed": scale * torch.arange(6.0).reshape(2, 3).t(),
            "float64": scale * torch.tensor([1e300, -0.0, math.pi], dtype=torch.float64),
            "bfloat16": (scale * torch.arange(5)).to(torch.bfloat16),
            "float16": (scale * torch.arange(5)).to(torch.float16),
            "int64": scale * torch.tensor([2**60 + 1, -(2**61)]),
            "int32": scale * torch.arange(4, dtype=torch.int32),
            "uint8": scale * torch.arange(4, dtype=torch.uint8),
            "bool": torch.tensor([True, False, True]) & bool(scale),
            "scalar": scale * torch.tensor(0.1),
            "scalar count": scale * torch.tensor(7),
            "empty": torch.empty(0),
            "empty rows": torch.empty(3, 0, dtype=torch.int64),
            "nested": {
                "h.0.attn.weight": {"exp_avg": scale * torch.ones(3, 3), "step": scale * 2},
                "plain": {
                    "tuple": ((1, "a"), [(2,)], ()),
                    "list": [1, None, 2.5, "caf\u00e9"],
                    "none": None,
                    "yes": True,
                },
                "nothing": {},
            },
            "large number": scale * 2**70,
            "small number": scale * 0.1,
        }
    )


def same(one: object, other: object) -> bool:
    """Whether two states are equal in every bit, type and shape."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write_on_ranks(folder: Path) -> dict[str, object]:
    """Saves on all ranks of a run; what each has held and written."""
    rank, world_size = join()
    snapshot._MIN_SHARE_BYTES = 100  # so that all ranks write
    part = every_kind(1)
    saver = Saver(
        CheckpointOptions(),
        folder,
        parts={"part": part},
        metadata={"a": 1},
        rank=rank,
        world_size=world_size,
    )
    saver.save(step=1, eval_loss=2.5)
    # Training goes on: what was saved is what was there when `save` returned.
    for tensor in split_state(part.state)[0].values():
        tensor.zero_()
    saver.finish()
    return {"copied": sum(buffer.nbytes for buffer in saver._buffers.values())}


def read_on_ranks(folders: list[Path]) -> list[bool]:
    join()
    return [same(read_every_kind(folder).state, every_kind(1).state) for folder in folders]


def read_every_kind(folder: Path) -> Part:
    part = every_kind(0)
    load_state(find_newest_checkpoint(folder), {"part": part})
    return part


def test_a_checkpoint_loads_bit_for_bit_under_another_world_size(tmp_path):
    total = sum(t.nbytes for t in split_state(every_kind(1).state)[0].values())
    largest = 4000  # bytes of the tensor that cannot be split
    folders = [tmp_path / str(ranks) for ranks in (1, 2, 4)]
    for folder, ranks in zip(folders, (1, 2, 4), strict=True):
        written = values(run_ranks(write_on_ranks, ranks, folder))

        found = find_newest_checkpoint(folder)
        assert found.world_size == ranks
        assert found.metadata == {"a": 1, "eval_loss": 2.5, "keep_every": None}
        assert sum(name.startswith("shard-") for name in found.files) == ranks
        copied = [rank["copied"] for rank in written]
        assert sum(copied) == total
        assert max(copied) <= max(largest, total / ranks + 100)
        assert same(read_every_kind(folder).state, every_kind(1).state)
    assert values(run_ranks(read_on_ranks, 2, folders)) == [[True] * 3] * 2


def test_large_tensors_are_spread_evenly_over_ranks_and_files(monkeypatch):
    monkeypatch.setattr(snapshot, "_FILE_BYTES", 4000)
    monkeypatch.setattr(snapshot, "_MIN_SHARE_BYTES", 4000)
    part = Part({f"layer.{i}": torch.full((1000 + i,), float(i)) for i in range(40)})
    state, _ = split_state({"part": part.state})
    shares = []
    for rank in range(4):
        own, file_of = snapshot.assign_writers(
            state, rank=rank, world_size=4, owner_ranks=lambda path: range(4)
        )
        assert file_of.keys() == state.keys()
        assert set(file_of.values()) == set(range(1, 11))
        shares.append(own)

    assert sorted(itertools.chain(*shares)) == sorted(state)
    loads = [sum(tensor.nbytes for tensor in own.values()) for own in shares]
    assert max(loads) - min(loads) <= 4 * 1040


def save_what_differs(folder: Path) -> str:
    """Saves a part of which each rank has other tensors, although all are to have the same."""
    rank, world_size = join()
    saver = Saver(
        CheckpointOptions(),
        folder,
        parts={"part": Part({f"layer.{rank}": torch.ones(3)})},
        metadata={},
        rank=rank,
        world_size=world_size,
    )
    saver.save(step=1, eval_loss=None)
    try:
        saver.finish(is_final=True)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_tensor_that_no_rank_writes_makes_the_save_fail(tmp_path):
    for said in values(run_ranks(save_what_differs, 2, tmp_path)):
        assert "could not be written" in said
        assert "(no rank writes part/layer.1)" in said
    assert not list(tmp_path.iterdir())


def test_the_files_of_a_rank_are_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_FILE_BYTES", 10)
    part = every_kind(1)
    saver_of(tmp_path, part).save(step=1, eval_loss=None)

    assert len(list((tmp_path / "step_00000001").glob("*.safetensors"))) > 3
    assert same(read_every_kind(tmp_path).state, part.state)


class Held:
    """Keeps the background thread from writing until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        check = Saver._check_finite

        def wait_and_check(saver: Saver, snapshot: saving.Snapshot) -> None:
            assert self.may_write.wait(20)
            check(saver, snapshot)

        monkeypatch.setattr(Saver, "_check_finite", wait_and_check)


def test_training_may_change_tensors_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    part = filled(1.0)
    saver = saver_of(tmp_path, part, async_checkpoint=True)

    saver.save(step=1, eval_loss=None)
    part.state["weight"].fill_(2.0)
    part.state["optimizer"]["layer.weight"]["exp_avg"].mul_(5)
    part.state["step"] = 2
    assert steps(tmp_path) == []
    held.may_write.set()
    saver.finish()

    assert is_filled(load(find_newest_checkpoint(tmp_path)), 1.0)


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    part = filled(1.0)
    saver = saver_of(tmp_path, part, async_checkpoint=True)
    saver.save(step=1, eval_loss=None)
    part.load_state_dict(filled(2.0).state)
    threading.Timer(0.3, held.may_write.set).start()

    saver.save(step=2, eval_loss=None)

    # Its copy is made in the memory of the first one's, which is on the disk by now.
    assert steps(tmp_path)[0] == 1
    assert saver.blocked_seconds > 0.2
    saver.finish()
    assert is_filled(load(read_verified_checkpoint(tmp_path / "step_00000001")), 1.0)
    assert is_filled(load(read_verified_checkpoint(tmp_path / "step_00000002")), 2.0)


def test_the_copy_in_host_memory_is_made_once(tmp_path):
    saver = saver_of(tmp_path, filled(1.0))
    saver.save(step=1, eval_loss=None)
    first = {name: buffer.data_ptr() for name, buffer in saver._buffers.items()}
    saver.save(step=2, eval_loss=None)
    assert {name: buffer.data_ptr() for name, buffer in saver._buffers.items()} == first


def test_copies_share_few_blocks_of_host_memory(monkeypatch):
    monkeypatch.setattr(snapshot, "_SLAB_BYTES", 1 << 16)
    # As of a small model: 12 layers of four matrices and biases, an embedding, a few scalars.
    state = {"wte": torch.arange(33_000.0)}
    for layer in range(12):
        for number, size in enumerate((2304, 768, 3072, 3072)):
            state[f"{layer}.{number}.weight"] = torch.full((size, 3), float(layer))
            state[f"{layer}.{number}.bias"] = torch.full((size // 4 + 1,), layer).to(torch.bfloat16)
            state[f"{layer}.{number}.step"] = torch.tensor(7 * layer)
    blocks: list[int] = []
    empty = torch.empty

    def pinned_block(size: int, **kwargs: object) -> torch.Tensor:
        blocks.append(1 << (size - 1).bit_length())  # as torch rounds up pinned memory
        return empty(size, **kwargs)

    monkeypatch.setattr(torch, "empty", pinned_block)
    buffers: dict[str, torch.Tensor] = {}
    copies = snapshot.copy_to_host(state, buffers).tensors
    snapshot.copy_to_host(state, buffers)

    one_each = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in state.values())
    held = sum(tensor.nbytes for tensor in state.values())
    assert one_each > 1.3 * held
    assert sum(blocks) < 1.1 * held
    assert len(blocks) < 0.2 * len(state)
    assert same(copies, state)
    starts = sorted((copy.data_ptr(), copy.nbytes) for copy in copies.values())
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(starts))
    # Else the writer copies each tensor once more.
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copies.values())


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(saving, "_RETRY_DELAYS", (0.0, 0.0))


@pytest.mark.parametrize("call", range(4))  # twice the tensors, state.json, the manifest
def test_a_failed_save_is_retried(tmp_path, monkeypatch, caplog, no_pauses, call):
    monkeypatch.setattr(os, "fsync", FailsAt(call))
    saver_of(tmp_path, filled(1.0)).save(step=1, eval_loss=None)

    assert is_filled(load(find_newest_checkpoint(tmp_path)), 1.0)
    assert re.search(r"No space left on device( in fsync)?; trying again in 0 sec", caplog.text)
    assert os.listdir(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_is_reported_and_training_continues(
    tmp_path, monkeypatch, caplog, no_pauses, background
):
    save(tmp_path, 1)
    saver = saver_of(tmp_path, filled(2.0), async_checkpoint=background)
    monkeypatch.setattr(os, "fsync", FailsAt(*range(100)))
    saver.save(step=2, eval_loss=None)
    saver.finish()

    said = caplog.records[-1].getMessage()
    assert said.startswith("The checkpoint of step 2 could not be written to")
    assert "No space left on device); earlier checkpoints are untouched." in said
    assert said.endswith("Training continues.")
    assert find_newest_checkpoint(tmp_path).step == 1
    assert os.listdir(tmp_path) == ["step_00000001"]  # nothing takes up the disk's last space

    monkeypatch.setattr(os, "fsync", FailsAt())
    saver.save(step=3, eval_loss=None)
    saver.finish()
    assert steps(tmp_path) == [1, 3]
    assert not list(tmp_path.glob(".*"))


def test_training_stops_after_too_many_failures_in_a_row(tmp_path, monkeypatch, no_pauses):
    saver = saver_of(tmp_path, filled(1.0))
    full = FailsAt(*range(1000))
    monkeypatch.setattr(os, "fsync", full)
    for step in (1, 2, 3):
        saver.save(step=step, eval_loss=None)
    full.calls = set()
    saver.save(step=4, eval_loss=None)  # so that they are no longer in a row
    full.calls = set(range(1000))
    for step in (5, 6, 7):
        saver.save(step=step, eval_loss=None)
    with pytest.raises(CheckpointError, match="step 8 could not be written"):
        saver.save(step=8, eval_loss=None)
    assert steps(tmp_path) == [4]


def test_the_last_save_of_a_run_may_not_fail(tmp_path, monkeypatch, no_pauses):
    monkeypatch.setattr(os, "fsync", FailsAt(*range(100)))
    saver = saver_of(tmp_path, filled(1.0), async_checkpoint=True)
    saver.save(step=1, eval_loss=None)
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        saver.finish(is_final=True)


def test_a_removal_that_fails_is_a_warning_and_no_failed_save(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1)

    def refuse(path):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(retention, "remove_checkpoint", refuse)
    saver_of(tmp_path, filled(2.0), keep_checkpoints=1).save(step=2, eval_loss=None)

    assert steps(tmp_path) == [1, 2]
    assert "Old checkpoints in" in caplog.text
    assert "trying again" not in caplog.text
    assert "could not be written" not in caplog.text


def test_saving_continues_beside_a_checkpoint_that_cannot_be_deleted(tmp_path, monkeypatch, caplog):
    """As on NFS, while a process of the same machine reads a file of it."""
    rmtree = shutil.rmtree

    def refuse_the_first(path):
        if "step_00000001" in path.name:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse_the_first)
    saver = saver_of(tmp_path, filled(2.0), keep_checkpoints=1)
    for step in (1, 2, 3):
        saver.save(step=step, eval_loss=None)

    assert steps(tmp_path) == [3]
    assert "could not be removed (Directory not empty); the next save tries again." in caplog.text
    monkeypatch.undo()
    saver.save(step=4, eval_loss=None)
    assert os.listdir(tmp_path) == ["step_00000004"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_state_that_is_not_finite_is_never_written(tmp_path, bad, dtype):
    save(tmp_path, 1)
    part = Part({"weight": torch.zeros(5, dtype=dtype), "empty": torch.empty(0)})
    part.state["weight"][3] = bad

    with pytest.raises(NotFiniteError, match="step 2 is not saved because part/weight is not fin"):
        saver_of(tmp_path, part).save(step=2, eval_loss=None)
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_a_state_that_json_does_not_hold_is_refused_with_its_part(tmp_path):
    circular_list = []
    circular_list.append(circular_list)
    for value, reason in (({1, 2}, "Object of type set"), (circular_list, "maximum recursion")):
        with pytest.raises(
            CheckpointError, match=rf"^The state of part cannot be saved \({reason}"
        ):
            saver_of(tmp_path, Part({"numbers": value})).save(step=1, eval_loss=None)

    assert steps(tmp_path) == []


def test_old_checkpoints_are_removed_only_after_the_new_one_is_valid(tmp_path, monkeypatch):
    save(tmp_path, 1)
    there = []
    rmtree = shutil.rmtree

    def note_and_remove(path):
        there.append(find_newest_checkpoint(tmp_path).step)
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", note_and_remove)
    saver = saver_of(tmp_path, filled(2.0), keep_checkpoints=1)
    saver.save(step=2, eval_loss=None)
    saver.save(step=3, eval_loss=None)

    assert there == [2, 3]
    assert steps(tmp_path) == [3]


def test_a_save_removes_leftovers_of_other_saves_but_no_files_of_the_user(tmp_path):
    for name in (".step_00000001.tmp", ".mine.tmp", "mine"):
        (tmp_path / name).mkdir()
    save(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".mine.tmp", "mine", "step_00000002"]


def test_the_best_is_kept_and_its_link_is_replaced_atomically(tmp_path, monkeypatch):
    targets = []
    replace = Path.replace

    def note_and_replace(path, target):
        targets.append((os.path.lexists(target), os.readlink(path)))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", note_and_replace)
    saver = saver_of(tmp_path, filled(1.0), keep_checkpoints=1, save_top_k=1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        saver.save(step=step, eval_loss=loss)

    assert steps(tmp_path) == [2, 4]
    assert os.readlink(tmp_path / "best") == "step_00000002"
    # Never away in between: the new target was put in the old one's place.
    assert targets == [(False, "step_00000001"), (True, "step_00000002")]


def test_files_are_synced_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    synced = []
    fsync, rename = os.fsync, Path.rename

    def note_and_sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check_and_rename(path, target):
        named.append(target.name)
        assert {file.stat().st_ino for file in (path, *path.iterdir())} <= set(synced)
        synced.clear()
        return rename(path, target)

    named: list[str] = []
    monkeypatch.setattr(os, "fsync", note_and_sync)
    monkeypatch.setattr(Path, "rename", check_and_rename)
    monkeypatch.setattr(snapshot, "_FILE_BYTES", 8)
    save(tmp_path / "run" / "checkpoints", 1)

    assert named == ["step_00000001"]
    assert synced == [(tmp_path / "run" / "checkpoints").stat().st_ino]


def test_a_copy_may_lie_in_a_folder_of_a_folder(tmp_path):
    copies = {"tokenizer/templates/tool.jinja": b"tool", "tokenizer/tokenizer.json": b"{}"}
    saver_of(tmp_path, filled(1.0), copies=copies).save(step=1, eval_loss=None)

    found = find_newest_checkpoint(tmp_path)
    assert {name: (found.path / name).read_bytes() for name in copies} == copies
