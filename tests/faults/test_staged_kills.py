"""Kills by SIGKILL at each stage of staged saves, of two ranks on two nodes."""

import os
from pathlib import Path

import pytest

from tests.support.faults import Fault
from tests.support.recovery import (
    check_same,
    kill_and_go_on,
    last_counts,
    last_hash,
    without_times,
)
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

OPTIONS = {
    "max_train_steps": 12,
    "checkpointing_steps": 4,
    "keep_checkpoints": 1,
    "keep_every": 8,
    "save_top_k": 1,
    "eval_steps": 5,
    "lr_scheduler_type": "cosine",
    "report_to": "tensorboard",
}
SAVE, STAGING = "llm.checkpoint.save", "llm.checkpoint.staging"
PLACES = [
    (f"{SAVE}:Saver._write_tensors", 2, 1),
    (f"{SAVE}:sync_file", 2, 0),  # rank 0 writes all files of a small run
    (f"{STAGING}:StagingFolder.commit", 2, 0),
    (f"{STAGING}:StagingFolder.commit", 2, 1),
    (f"{STAGING}:commit_checkpoint", 2, 1),
    (f"{SAVE}:copy_staged_files", 2, 0),
    (f"{STAGING}:sync_file", 2, 0),
    (f"{SAVE}:commit_checkpoint", 2, 0),
    (f"{SAVE}:prune_checkpoints", 2, 0),
    (f"{STAGING}:StagingFolder.remove", 4, 1),
    (f"{STAGING}:StagingFolder.close", 1, 1),
    (f"{SAVE}:remove_staging_record", 1, 0),
]
AGAIN = [
    f"{STAGING}:_find_local_parts",
    f"{STAGING}:copy_staged_files",
    f"{STAGING}:commit_checkpoint",
    f"{STAGING}:_remove_abandoned",
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("staged"))


@pytest.fixture(scope="module")
def straight(bench) -> Run:
    return bench.train_well("straight", ranks=2, **OPTIONS)


@pytest.fixture
def staging(tmp_path) -> dict[str, object]:
    """The options of a run on two nodes with one rank each."""
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
    return {**OPTIONS, "stage_checkpoints": f"{tmp_path}/node$LOCAL_RANK"}


def check_same_and_cleared(run: Run, straight: Run, staging: dict[str, object]) -> None:
    """Assert that a run ended as an uninterrupted one, and left no staged files."""
    check_same(run, straight)
    kept = [sorted(os.listdir(each.folder / "checkpoints")) for each in (run, straight)]
    assert kept[0] == kept[1]
    for rank in range(2):
        folder = Path(str(staging["stage_checkpoints"]).replace("$LOCAL_RANK", str(rank)))
        assert os.listdir(folder) == []


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].split(':')[1]}-{place[2]}")
def test_a_killed_run_resumes_to_the_same_bits(bench, straight, staging, place):
    at, call, rank = place
    kill = Fault(at=at, what="SIGKILL", call=call, rank=rank)

    run = kill_and_go_on(bench, f"{at}-{rank}", [kill], together=True, **staging)

    check_same_and_cleared(run, straight, staging)


@pytest.mark.parametrize("at", AGAIN)
def test_a_kill_during_the_completion_is_completed_by_the_next_start(bench, straight, staging, at):
    first = Fault(at=f"{SAVE}:copy_staged_files", what="SIGKILL", call=2, rank=1)
    rank = 1 if at.endswith(("_find_local_parts", "_remove_abandoned")) else 0
    second = Fault(at=at, what="SIGKILL", rank=rank)

    run = kill_and_go_on(bench, f"again-{at}", [first, second], together=True, **staging)

    check_same_and_cleared(run, straight, staging)


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel_shard_size": 2, "optimizer": "muon"},
        {"data_parallel_shard_size": 2, "kfac": True},
        {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
        {"data_parallel": "gossip", "save_top_k": 0},
    ],
    ids=["FSDP2 and Muon", "FSDP2 and K-FAC", "PP2", "gossip"],
)
def test_a_layout_resumes_from_its_staged_files(bench, staging, layout):
    name = "-".join(layout)
    options = {**OPTIONS, **layout}
    straight = bench.train_well(f"straight-{name}", ranks=2, **options)
    kill = Fault(at=f"{SAVE}:copy_staged_files", what="SIGKILL", call=2, rank=1)

    run = kill_and_go_on(bench, name, [kill], together=True, **{**staging, **layout})

    assert "step_00000008 from its staged files" in run.output
    assert last_hash(run) == last_hash(straight)
    assert last_counts(run) == last_counts(straight)
    assert without_times(run) == without_times(straight)
