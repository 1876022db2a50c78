"""Saves that are killed, or that fail on one of several ranks."""

import itertools
import logging
import math
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from llm.checkpoint import save as saving  # the tests' own helper is called `save`
from llm.checkpoint import snapshot
from llm.checkpoint.format import list_checkpoint_folders
from llm.checkpoint.load import find_newest_checkpoint, list_checkpoints
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import NotFiniteError, Saver
from llm.errors import CheckpointError
from tests.support.checkpoints import (
    FailsAt,
    Part,
    die_at,
    filled,
    is_filled,
    join,
    load,
    save,
    saver_of,
    steps,
)
from tests.support.ranks import run_ranks, values


def kill_at_every_moment(folder: Path, step: int) -> tuple[int, list[str]]:
    """Saves `step` over and over, killed at each of its moments; how many, and what went wrong."""
    torch.set_num_threads(1)
    before = folder / "before"
    for number, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        save(before, number, eval_loss=loss)
    wrong = []
    for moment in itertools.count():
        run = folder / str(moment)
        shutil.copytree(before, run, symlinks=True)
        saver = saver_of(run, filled(9.0), async_checkpoint=True, keep_checkpoints=2, save_top_k=1)
        child = os.fork()
        if child == 0:
            die_at(moment)
            saver.save(step=step, eval_loss=4.0)
            saver.finish()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        survived = os.WIFEXITED(status)
        wrong += [f"moment {moment}: {what}" for what in check_after_kill(run, step, survived)]
        if survived:
            return moment, wrong


def check_after_kill(run: Path, step: int, survived: bool) -> list[str]:
    wrong = []
    for found in list_checkpoints(run):
        if found.find_problem(files_to_verify=found.files) is not None:
            wrong.append(f"{found.path.name} is partial and counts")
    newest = find_newest_checkpoint(run)
    if newest is None or newest.step < 3:
        wrong.append("an older checkpoint was lost")
    else:
        fills = {9.0} if survived else {float(newest.step), 9.0}
        if newest.step == 4:
            fills = {9.0}
        if not any(is_filled(load(newest), fill) for fill in fills):
            wrong.append("another state is loaded than was saved")
    if 2 not in steps(run):
        wrong.append("the best was lost")
    saver_of(run, filled(5.0), keep_checkpoints=2, save_top_k=1).save(step=5, eval_loss=0.5)
    if not is_filled(load(find_newest_checkpoint(run)), 5.0):
        wrong.append("the next save is not right")
    # Nothing hidden, and of what is named as a checkpoint nothing that is none.
    if list(run.glob(".*")) or len(steps(run)) != 2 or len(list_checkpoint_folders(run)) != 2:
        wrong.append(f"left over: {sorted(os.listdir(run))}")
    return wrong


@pytest.mark.parametrize("step", [4, pytest.param(3, marks=pytest.mark.extended)])
def test_a_kill_during_a_save_never_leaves_a_partial_or_lost_checkpoint(tmp_path, step):
    # Step 4 is a new one, upon which step 1 is removed; step 3 is saved a second time.
    [(moments, wrong)] = values(run_ranks(kill_at_every_moment, 1, tmp_path, step))
    assert wrong == []
    assert moments > 20


def fail_to_copy(copies: snapshot.HostCopies) -> None:
    raise RuntimeError("device lost")


def refuse_on_one_rank(folder: Path) -> list[str]:
    """What is said on this rank while the disk of rank 1 is full, then writable again."""
    rank, world_size = join()
    saving._MAX_FAILED_SAVES = 1
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("llm").addHandler(handler)
    logging.getLogger("llm").setLevel(logging.INFO)
    snapshot._MIN_SHARE_BYTES = 1000  # so that both ranks write
    part = Part({f"layer.{i}": torch.ones(500) for i in range(8)})
    saver = Saver(
        CheckpointOptions(),
        folder,
        parts={"part": part},
        metadata={},
        rank=rank,
        world_size=world_size,
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    saver.save(step=1, eval_loss=None)
    saver.finish()
    fsync = os.fsync
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    saver.save(step=2, eval_loss=None)
    saver.finish()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.fsync = FailsAt(0)
    saver.save(step=3, eval_loss=None)
    saver.finish()
    if rank == 1:
        os.fsync = FailsAt(*range(1000))
    saver.save(step=4, eval_loss=None)
    try:
        saver.save(step=5, eval_loss=None)
        saver.finish()
    except CheckpointError as error:
        said.append(f"raised: {error}")
    os.fsync = fsync
    if rank == 1:
        snapshot.HostCopies.wait_on_host = fail_to_copy
    try:
        saver.save(step=6, eval_loss=None)
        saver.finish()
    except CheckpointError as error:
        said.append(f"raised: {error}")
    snapshot.HostCopies.wait_on_host = lambda copies: None  # they are complete on a CPU
    # Ranks share the layers out in turn: this one is written by rank 1, and wrong there only.
    part.state["layer.7"][0] = math.nan if rank == 1 else 1.0
    try:
        saver.save(step=7, eval_loss=None)
        saver.finish()
    except NotFiniteError as error:
        said.append(f"raised: {error}")
    return said


def test_an_error_of_one_rank_is_reported_by_all_and_survived(tmp_path):
    both = values(run_ranks(refuse_on_one_rank, 2, tmp_path))

    for said in both:
        expected = [
            f"Saved {tmp_path}/step_00000001 ",
            "File too large; trying again in 0 seconds.",
            "File too large; trying again in 0 seconds.",
            "shard-00002-model-00001-of-00001.safetensors: File too large); earlier checkpoints ",
            "No space left on device; trying again in 0 seconds.",
            f"Saved {tmp_path}/step_00000003 ",
            "No space left on device; trying again in 0 seconds.",
            "No space left on device; trying again in 0 seconds.",
            "The checkpoint of step 4 could not be written to ",
            "No space left on device; trying again in 0 seconds.",
            "No space left on device; trying again in 0 seconds.",
            "raised: The checkpoint of step 5 could not be written to ",
            "raised: The checkpoint of step 6 could not be written to ",
            "raised: The state of step 7 is not saved because part/layer.7 is not finite",
        ]
        assert len(said) == len(expected)
        for line, part in zip(said, expected, strict=True):
            assert part in line
    assert steps(tmp_path) == [1, 3]
    assert find_newest_checkpoint(tmp_path).step == 3


def lose_a_rank(folder: Path) -> str:
    snapshot._MIN_SHARE_BYTES = 1  # so that both ranks write
    rank, world_size = join()
    saver = Saver(
        CheckpointOptions(),
        folder,
        parts={"part": filled(2.0)},
        metadata={},
        rank=rank,
        world_size=world_size,
    )
    if rank == 1:
        die_at(1)
    saver.save(step=2, eval_loss=None)
    saver.finish()
    return "saved"


def test_a_rank_that_dies_during_a_save_leaves_the_older_checkpoint(tmp_path):
    save(tmp_path, 1)

    outcomes = run_ranks(lose_a_rank, 2, tmp_path, timeout=60)

    assert outcomes[1].error == "ended with code -9"
    assert "PeerLostError" in outcomes[0].error
    assert steps(tmp_path) == [1]
    assert find_newest_checkpoint(tmp_path).step == 1
