"""What a rank opens and sends in a save and a resume does not grow with the number of ranks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llm.checkpoint import rank_writer, snapshot
from llm.checkpoint.format import Checkpoint, split_state
from llm.checkpoint.headers import read_headers
from llm.checkpoint.load import find_newest_checkpoint, load_state
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import Saver
from llm.errors import LLMError
from tests.support.checkpoints import Part, join
from tests.support.ranks import run_ranks, values


def layers(value: float) -> Part:
    return Part({f"layer.{i}": torch.full((500,), value + i) for i in range(8)})


def make_saver(folder: Path, part: Part, rank: int, world_size: int) -> Saver:
    return Saver(
        CheckpointOptions(keep_checkpoints=10),
        folder,
        parts={"part": part},
        metadata={},
        rank=rank,
        world_size=world_size,
    )


def save_files(folder: Path, min_share_bytes: int) -> None:
    snapshot._MIN_SHARE_BYTES = min_share_bytes
    saver = make_saver(folder, layers(1.0), *join())
    saver.save(step=1, eval_loss=None)
    saver.finish(is_final=True)


def opened_headers(folder: Path) -> tuple[list[str], list[str]]:
    """The files that this rank opens for the headers, and those of the checkpoint it looks up."""
    join()
    looked_up: list[str] = []
    find_damage = Checkpoint.find_damage

    def find(checkpoint: Checkpoint, names: Any, **options: Any) -> str | None:
        looked_up.extend(names)
        return find_damage(checkpoint, names, **options)

    Checkpoint.find_damage = find
    checkpoint = find_newest_checkpoint(folder, is_collective=True)
    opened: list[str] = []
    safe_open = safetensors.safe_open

    def counted(path: str, **options: Any) -> Any:
        opened.append(Path(path).name)
        return safe_open(path, **options)

    safetensors.safe_open = counted
    headers = read_headers(checkpoint)
    assert sorted(headers.state_dict_metadata) == [f"part/layer.{i}" for i in range(8)]
    return opened, looked_up


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.extended), 4])
def test_each_header_is_opened_and_each_file_looked_up_once(tmp_path, ranks):
    values(run_ranks(save_files, 4, tmp_path, 1))
    files = find_newest_checkpoint(tmp_path).files
    shards = sorted(name for name in files if name.startswith("shard-"))
    assert len(shards) == 4

    found = values(run_ranks(opened_headers, ranks, tmp_path))

    assert sorted(name for opened, _ in found for name in opened) == shards
    assert {len(opened) for opened, _ in found} == {4 // ranks}
    assert sorted(name for _, looked_up in found for name in looked_up) == sorted(files)


def load_unverified(checkpoint: Checkpoint) -> str:
    join()
    try:
        load_state(checkpoint, {"part": layers(0.0)})
    except LLMError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_header_that_one_rank_cannot_read_is_refused_by_all(tmp_path):
    values(run_ranks(save_files, 2, tmp_path, 1))
    checkpoint = find_newest_checkpoint(tmp_path)
    shard = checkpoint.path / "shard-00002-model-00001-of-00001.safetensors"
    shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:])

    errors = values(run_ranks(load_unverified, 2, checkpoint))

    assert errors[0] == errors[1]
    assert errors[0].startswith(f"CheckpointError: {checkpoint.path} cannot be read: ")


def plans_of_saves(folder: Path) -> list[int]:
    """How many plans this rank has received after each of four saves."""
    rank, world_size = join()
    calls: Counter[str] = Counter()
    scatter = dist.scatter_object_list

    def counted(*args: Any, **options: Any) -> None:
        calls["scatter"] += 1
        scatter(*args, **options)

    dist.scatter_object_list = counted
    part = layers(1.0)
    saver = make_saver(folder, part, rank, world_size)
    counts = []
    for step in range(1, 5):
        if step == 3:  # such as the moments of an optimizer that begins late
            part.state["late"] = torch.full((2,), 3.0)
        saver.save(step=step, eval_loss=None)
        saver.finish(is_final=True)
        counts.append(calls["scatter"])
    return counts


def test_ranks_agree_on_what_they_write_once_until_it_changes(tmp_path):
    assert values(run_ranks(plans_of_saves, 2, tmp_path)) == [[1, 1, 2, 2]] * 2

    loaded = Part({**layers(0.0).state, "late": torch.zeros(2)})
    load_state(find_newest_checkpoint(tmp_path), {"part": loaded})
    assert torch.equal(loaded.state["layer.7"], torch.full((500,), 8.0))
    assert torch.equal(loaded.state["late"], torch.full((2,), 3.0))


def refused_saves(folder: Path) -> list[str]:
    """What four saves say on this rank: rank 1 cannot plan the first, or holds too much in two."""
    rank, world_size = join()
    part = layers(1.0)
    saver = Saver(
        CheckpointOptions(keep_checkpoints=10),
        folder,
        parts={"part": part},
        metadata={},
        rank=rank,
        world_size=world_size,
        owner_ranks=lambda path: [0] if path == "part/late" else range(2),
    )
    make_plan = rank_writer.LocalPlan.of

    def refuse(snapshot: snapshot.Snapshot) -> rank_writer.LocalPlan:
        raise OSError("module not found")

    said = []
    for step in range(1, 6):
        if rank == 1:
            rank_writer.LocalPlan.of = refuse if step == 1 else make_plan
            part.state.pop("late", None)
            if step in (3, 4):
                part.state["late"] = torch.ones(2)  # rank 0 should write it, but does not hold it
        try:
            saver.save(step=step, eval_loss=None)
            saver.finish(is_final=True)
            said.append("saved")
        except LLMError as error:
            said.append(str(error).partition("(")[2].partition(")")[0])
    return said


def test_a_plan_that_fails_on_one_rank_leaves_the_former_to_all(tmp_path):
    for said in values(run_ranks(refused_saves, 2, tmp_path)):
        assert said == [
            "module not found",
            "saved",
            "no rank writes part/late",
            "no rank writes part/late",
            "saved",
        ]
    loaded = layers(0.0)
    load_state(find_newest_checkpoint(tmp_path), {"part": loaded})
    assert torch.equal(loaded.state["layer.7"], torch.full((500,), 8.0))


def shards_of_replicas(min_share_bytes: int) -> list[str]:
    """The shards that this rank writes; ranks 0 and 1 hold more tensors than their replicas."""
    rank, world_size = join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    snapshot._MIN_SHARE_BYTES = min_share_bytes
    state: dict[str, torch.Tensor] = {
        f"all.{i}": distribute_tensor(torch.ones(8), mesh, [Replicate(), Shard(0)])
        for i in range(4)
    }
    if rank < 2:
        shards = mesh["shard"]
        state["few"] = DTensor.from_local(torch.ones(4000), shards, [Shard(0)], run_check=False)
    local_tensors, _ = snapshot.assign_writers(
        state,
        rank=rank,
        world_size=world_size,
        owner_ranks=lambda path: range(2) if path == "few" else range(4),
    )
    return sorted(local_tensors)


def test_shards_that_few_ranks_hold_do_not_change_who_writes_the_others():
    all_paths = [f"all.{i}" for i in range(4)]
    assert values(run_ranks(shards_of_replicas, 4, 16000)) == [
        [*all_paths, "few"],
        [*all_paths, "few"],
        [],
        [],
    ]
    assert values(run_ranks(shards_of_replicas, 4, 30)) == [
        ["all.0", "all.2", "few"],
        ["all.0", "all.2", "few"],
        ["all.1", "all.3"],
        ["all.1", "all.3"],
    ]


def test_a_small_state_is_one_file_of_any_number_of_ranks(tmp_path):
    values(run_ranks(save_files, 4, tmp_path, 1 << 20))

    files = find_newest_checkpoint(tmp_path).files
    assert [name for name in files if name.startswith("shard-")] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]


def test_writers_are_as_many_as_the_bytes_need_and_lie_apart(monkeypatch):
    monkeypatch.setattr(snapshot, "_MIN_SHARE_BYTES", 4000)
    state, _ = split_state({"part": layers(1.0).state})  # 16,000 bytes

    writers = [
        rank
        for rank in range(100)
        if snapshot.assign_writers(
            state, rank=rank, world_size=100, owner_ranks=lambda path: range(100)
        )[0]
    ]

    assert writers == [0, 20, 40, 60, 80]
