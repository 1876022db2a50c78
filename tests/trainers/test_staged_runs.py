"""Runs that stage checkpoints on their nodes end with the same bits, also after kills."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.faults import Fault
from tests.support.recovery import check_same, kill_and_go_on
from tests.support.training import Bench, Run, assert_refused

OPTIONS = {"max_train_steps": 12, "checkpointing_steps": 4, "eval_steps": 5}
COPY = "llm.checkpoint.save:copy_staged_files"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def straight(bench) -> Run:
    return bench.train_well("straight", ranks=2, report_to="tensorboard", **OPTIONS)


@pytest.fixture
def nodes(tmp_path) -> list[Path]:
    """The local folders of two nodes with one rank each."""
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders


def staging(nodes: list[Path]) -> dict[str, object]:
    return {
        **OPTIONS,
        "report_to": "tensorboard",
        "stage_checkpoints": f"{nodes[0].parent}/node$LOCAL_RANK",
    }


def test_a_kill_during_the_copy_is_completed_by_the_resume(bench, straight, nodes):
    kill = Fault(at=COPY, what="SIGKILL", call=2, rank=1)
    run = kill_and_go_on(bench, "same", [kill], together=True, **staging(nodes))

    assert f"Completed {run.folder}/checkpoints/step_00000008 from its staged files" in run.output
    assert "at step 8" in run.output
    check_same(run, straight)
    assert [os.listdir(folder) for folder in nodes] == [[], []]
    assert sorted(os.listdir(run.folder / "checkpoints")) == [
        f"step_{step:08d}" for step in (4, 8, 12)
    ]


def test_a_lost_node_sends_the_resume_to_the_last_complete_copy(bench, straight, nodes):
    kill = Fault(at=COPY, what="SIGKILL", call=2, rank=1)
    started = bench.start("lost", ranks=2, faults=[kill], **staging(nodes))
    started.wait_for_death()
    started.kill()
    started.outcomes()
    shutil.rmtree(nodes[0])
    nodes[0].mkdir()

    run = bench.train_well("lost", ranks=2, resume_from_checkpoint=True, **staging(nodes))

    assert "The staged checkpoint of step 8 is not used: no node of this start has " in run.output
    assert "at step 4" in run.output
    check_same(run, straight)


def test_a_signal_ends_the_run_after_the_copy(bench, nodes):
    faults = [
        Fault(at="llm.trainers.gpt.loop:Trainer.train_step", what="SIGTERM", call=6),
        Fault(at=COPY, what="wait", call=2, amount=1.0),
    ]
    run = bench.train("signal", ranks=2, faults=faults, **staging(nodes))

    assert run.codes == [75, 75]
    [step] = {run.read_json("status.json")["step"]} & {*run.saved_steps}
    assert step < 12
    assert [os.listdir(folder) for folder in nodes] == [[], []]


@pytest.mark.extended
def test_a_resume_on_one_rank_completes_the_files_of_two(bench, tmp_path):
    options = {**OPTIONS, "stage_checkpoints": tmp_path, "global_batch_size": 8}
    kill = Fault(at=COPY, what="SIGKILL", call=1, rank=1)
    shards = {"data_parallel_shard_size": 2}  # so that both ranks write
    started = bench.start("fewer", ranks=2, faults=[kill], **options, **shards)
    started.wait_for_death()
    started.kill()
    started.outcomes()

    run = bench.train_well("fewer", resume_from_checkpoint=True, **options)

    assert f"Completed {run.folder}/checkpoints/step_00000004" in run.output
    assert "at step 4" in run.output


def test_a_node_without_the_folder_is_named_before_the_start(bench, tmp_path):
    assert_refused(
        bench,
        words=["--stage_checkpoints", "is not a folder on", "create it on every node"],
        stage_checkpoints=tmp_path / "missing",
        checkpointing_steps=2,
    )
