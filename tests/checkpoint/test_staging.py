"""Checkpoints in node-local folders first: the same files in the end, and none lost or mixed up."""

import errno
import functools
import itertools
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llm.checkpoint import save as saving
from llm.checkpoint import snapshot, staging
from llm.checkpoint.format import MANIFEST, STAGING_RECORD
from llm.checkpoint.load import find_newest_checkpoint
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.run_folder import RunFolder
from llm.checkpoint.save import Saver
from llm.checkpoint.staging import StagingFolder, complete_staged_checkpoint, staging_root
from llm.errors import CheckpointError, ConfigError
from tests.support.checkpoints import (
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


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(saving, "_RETRY_DELAYS", (0.0, 0.0))


@pytest.fixture
def node(tmp_path) -> Path:
    """The node-local folder."""
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    return folder


def staging_saver(run: RunFolder, node: Path, fill: float, **options: object) -> Saver:
    saver = saver_of(
        run.checkpoints, filled(fill), stage_checkpoints=str(node), copies={"a/b": b"b"}, **options
    )
    saver.open_staging()
    return saver


def contents(checkpoint: Path) -> dict[str, object]:
    """The files of a checkpoint without its manifest, which has the time; by name.

    safetensors writes the entries of a header in any order.
    """
    found: dict[str, object] = {}
    for path in checkpoint.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            content = path.read_bytes()
            found[str(path.relative_to(checkpoint))] = content
            if path.suffix == ".safetensors":
                end = 8 + int.from_bytes(content[:8], "little")
                found[path.name] = json.loads(content[8:end]), content[end:]
    return found


def staged_steps(node: Path) -> list[str]:
    return sorted(path.name for path in node.glob("llm-staged-*/*step_*"))


def break_copies(monkeypatch, error: int = errno.EIO) -> None:
    """Let the shared file system fail."""

    def fail(source, target):
        raise OSError(error, os.strerror(error), str(target))

    monkeypatch.setattr(shutil, "copyfile", fail)


def leave_staged(run: RunFolder, node: Path, monkeypatch, step: int = 2) -> Path:
    """Stage a checkpoint of a run that ends before the copy, and return the staged folder."""
    with monkeypatch.context() as patches:
        break_copies(patches)
        saver = staging_saver(run, node, float(step))
        saver.save(step=step, eval_loss=None)
        with pytest.raises(CheckpointError, match=f"step {step} could not be written"):
            saver.finish(is_final=True)
        saver._staging._run_file.close()  # as at the end of the process
    [path] = node.glob(f"llm-staged-*/step_{step:08d}")
    return path


@pytest.mark.parametrize("background", [True, False])
def test_a_staged_save_writes_the_same_files_and_cleans_up(tmp_path, run, node, background):
    direct = saver_of(tmp_path / "direct", filled(1.0), copies={"a/b": b"b"})
    direct.save(step=1, eval_loss=2.0)
    saver = staging_saver(run, node, 1.0, async_checkpoint=background)
    saver.save(step=1, eval_loss=2.0)
    saver.finish(is_final=True)

    saved = find_newest_checkpoint(run.checkpoints)
    assert contents(saved.path) == contents(tmp_path / "direct" / "step_00000001")
    assert saved.find_problem(files_to_verify=saved.files) is None
    assert os.listdir(run.checkpoints) == ["step_00000001"]
    assert os.listdir(node) == []


def save_on_ranks(folder: Path) -> None:
    rank, world_size = join()
    snapshot._MIN_SHARE_BYTES = 100  # so that both ranks write
    torch.manual_seed(0)
    part = Part({f"layer.{i}": torch.randn(50) for i in range(8)})
    for name in ("direct", "staged"):
        option = f"{folder}/node$RANK" if name == "staged" else None
        saver = Saver(
            CheckpointOptions(stage_checkpoints=option),
            folder / name / "checkpoints",
            parts={"part": part},
            metadata={},
            rank=rank,
            world_size=world_size,
        )
        saver.open_staging()
        for step in (1, 2):
            saver.save(step=step, eval_loss=None)
        saver.finish(is_final=True)


def test_ranks_on_two_nodes_write_the_same_files(tmp_path):
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()

    values(run_ranks(save_on_ranks, 2, tmp_path))

    for step in (1, 2):
        direct, staged = (
            tmp_path / name / "checkpoints" / f"step_{step:08d}" for name in ("direct", "staged")
        )
        assert len(contents(staged)) == 3  # a shard of each rank, and the state
        assert contents(staged) == contents(direct)
    assert [os.listdir(tmp_path / f"node{rank}") for rank in range(2)] == [[], []]


@pytest.mark.parametrize("background", [True, False])
def test_training_continues_during_the_copy_and_the_next_save_waits(
    run, node, caplog, monkeypatch, background
):
    caplog.set_level(logging.INFO, logger="llm")
    may_copy = threading.Event()
    copyfile = shutil.copyfile

    def wait_and_copy(source, target):
        assert may_copy.wait(60)
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", wait_and_copy)
    saver = staging_saver(run, node, 1.0, async_checkpoint=background)
    saver.save(step=1, eval_loss=None)
    assert steps(run.checkpoints) == []
    threading.Timer(0.3, may_copy.set).start()
    saver.save(step=2, eval_loss=None)

    assert steps(run.checkpoints)[0] == 1
    assert any("The save of step 2 waited 0." in message for message in caplog.messages)
    saver.finish(is_final=True)
    assert steps(run.checkpoints) == [1, 2]


def test_a_save_without_room_on_the_node_is_written_directly(run, node, caplog, monkeypatch):
    saver = staging_saver(run, node, 1.0)
    fsync = os.fsync

    def refuse_on_node(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(node)):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_on_node)
    saver.save(step=1, eval_loss=None)
    saver.finish()

    assert "The checkpoint of step 1 could not be staged (" in caplog.text
    assert f"No space left on device); it is written to {run.checkpoints} at once." in caplog.text
    assert is_filled(load(find_newest_checkpoint(run.checkpoints)), 1.0)
    assert staged_steps(node) == []


def save_with_one_full_node(folder: Path) -> list[str]:
    """Saves on two ranks, twice without room on the node of rank 1; what each rank has logged."""
    rank, world_size = join()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("llm").addHandler(handler)
    saver = Saver(
        CheckpointOptions(stage_checkpoints=f"{folder}/node$RANK"),
        folder / "run" / "checkpoints",
        parts={"part": Part({f"layer.{i}": torch.ones(50) for i in range(8)})},
        metadata={},
        rank=rank,
        world_size=world_size,
    )
    saver.open_staging()
    write_manifest, make_folder = staging.write_manifest, StagingFolder.make_temporary_folder

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        StagingFolder.make_temporary_folder = refuse  # before the ranks write
    saver.save(step=1, eval_loss=None)
    saver.finish()
    StagingFolder.make_temporary_folder = make_folder
    if rank == 1:
        staging.write_manifest = refuse  # when the other rank has a manifest
    saver.save(step=2, eval_loss=None)
    saver.finish()
    staging.write_manifest = write_manifest
    saver.save(step=3, eval_loss=None)
    saver.finish(is_final=True)
    return said


def test_a_full_node_lets_all_ranks_write_directly(tmp_path):
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()

    for said in values(run_ranks(save_with_one_full_node, 2, tmp_path)):
        staged = [line for line in said if "could not be staged (No space left" in line]
        assert [line[:24] for line in staged] == [
            "The checkpoint of step 1",
            "The checkpoint of step 2",
        ]
    assert steps(tmp_path / "run" / "checkpoints") == [1, 2, 3]
    assert [os.listdir(tmp_path / f"node{rank}") for rank in range(2)] == [[], []]


def test_a_staged_checkpoint_stays_while_the_shared_file_system_fails(
    run, node, caplog, monkeypatch
):
    saver = staging_saver(run, node, 1.0)
    with monkeypatch.context() as patches:
        break_copies(patches)
        for step in (1, 2):
            saver.save(step=step, eval_loss=None)
            saver.finish()
            assert staged_steps(node) == [f"step_{step:08d}"]
    assert "Input/output error; trying again in 0 seconds" in caplog.text
    assert f"It stays in {node}/llm-staged-" in caplog.text
    assert [path.name for path in run.checkpoints.iterdir()] == [STAGING_RECORD]

    saver.save(step=3, eval_loss=None)
    saver.finish(is_final=True)
    assert steps(run.checkpoints) == [3]
    assert os.listdir(node) == []


def test_a_resume_completes_what_the_last_start_has_staged(run, node, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="llm")
    save(run.checkpoints, 1)
    staged = leave_staged(run, node, monkeypatch)

    complete_staged_checkpoint(run, str(node))

    saved = find_newest_checkpoint(run.checkpoints)
    assert saved.step == 2
    assert is_filled(load(saved), 2.0)
    assert (saved.path / MANIFEST).read_bytes() == (staged / MANIFEST).read_bytes()
    assert f"Completed {saved.path} from its staged files" in caplog.text

    staging_saver(run, node, 3.0)
    assert not staged.exists()


def test_a_staged_checkpoint_is_completed_only_if_it_is_newer(run, node, caplog, monkeypatch):
    leave_staged(run, node, monkeypatch)
    save(run.checkpoints, 2, fill=5.0)

    complete_staged_checkpoint(run, str(node))

    assert is_filled(load(find_newest_checkpoint(run.checkpoints)), 5.0)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state.json").unlink(), "no node of this start has state.json"),
        (lambda path: (path / "a/b").write_bytes(b"c"), "a/b does not match its checksum"),
    ],
    ids=["missing", "damaged"],
)
def test_an_incomplete_or_damaged_staged_checkpoint_is_not_used(
    run, node, caplog, monkeypatch, damage, reason
):
    save(run.checkpoints, 1)
    damage(leave_staged(run, node, monkeypatch))

    complete_staged_checkpoint(run, str(node))

    assert steps(run.checkpoints) == [1]
    assert "The staged checkpoint of step 2 is not used: " in caplog.text
    assert reason in caplog.text
    assert caplog.records[-1].same_on_all_ranks


def test_a_staged_checkpoint_without_a_manifest_does_not_count(run, node, monkeypatch):
    (leave_staged(run, node, monkeypatch) / MANIFEST).unlink()

    complete_staged_checkpoint(run, str(node))

    assert steps(run.checkpoints) == []


def test_a_resume_on_another_node_says_where_checkpoints_were_staged(
    run, node, tmp_path, caplog, monkeypatch
):
    save(run.checkpoints, 1)
    monkeypatch.setattr("socket.gethostname", lambda: "node-a")
    leave_staged(run, node, monkeypatch)
    monkeypatch.setattr("socket.gethostname", lambda: "node-b")
    other_node = tmp_path / "other"
    other_node.mkdir()

    complete_staged_checkpoint(run, str(other_node))

    assert f"The last start staged its checkpoints in {node} on node-a, and did not" in caplog.text
    assert "no staged checkpoint is later than step 1" in caplog.text
    assert caplog.records[-1].same_on_all_ranks


def test_a_resume_without_the_option_says_that_nothing_staged_is_used(
    run, node, caplog, monkeypatch
):
    leave_staged(run, node, monkeypatch)
    complete_staged_checkpoint(run, None)
    assert steps(run.checkpoints) == []
    assert "Without --stage_checkpoints, this start takes none of them." in caplog.text
    assert caplog.records[-1].same_on_all_ranks


def test_a_full_shared_disk_refuses_the_resume_and_loses_nothing(run, node, monkeypatch):
    staged = leave_staged(run, node, monkeypatch)
    with monkeypatch.context() as patches:
        break_copies(patches, errno.ENOSPC)
        with pytest.raises(CheckpointError, match=r"step 2 cannot be copied .*No space left"):
            complete_staged_checkpoint(run, str(node))
    assert staged.exists()

    complete_staged_checkpoint(run, str(node))
    assert steps(run.checkpoints) == [2]
    assert not list(run.checkpoints.glob(".step_*"))


def kill_at_every_moment(folder: Path, leave: Callable, check: Callable) -> tuple[int, list[str]]:
    """Does something to a run over and over, killed at each of its moments.

    Args:
        folder: Where the runs are made.
        leave: Called in a process that is killed, with the run and its node-local folder; it calls
            what it gets third when the kills begin.
        check: Returns what is wrong afterwards.

    Returns:
        The number of moments, and what went wrong.
    """
    torch.set_num_threads(1)
    saving._RETRY_DELAYS = (0.0, 0.0)
    wrong: list[str] = []
    for moment in itertools.count():
        run, node = RunFolder(folder / f"{moment}" / "run"), folder / f"{moment}" / "node"
        node.mkdir(parents=True)
        save(run.checkpoints, 1)
        child = os.fork()
        if child == 0:
            leave(run, node, functools.partial(die_at, moment))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        wrong += [f"moment {moment}: {problem}" for problem in check(run, node)]
        if os.WIFEXITED(status):
            return moment, wrong


def save_staged(run: RunFolder, node: Path, begin: Callable[[], None]) -> None:
    saver = staging_saver(run, node, 2.0, async_checkpoint=True)
    begin()
    saver.save(step=2, eval_loss=None)
    saver.finish(is_final=True)


def complete_staged(run: RunFolder, node: Path, begin: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patches:
        leave_staged(run, node, patches)
    begin()
    complete_staged_checkpoint(run, str(node))


def find_problems(run: RunFolder, node: Path) -> list[str]:
    """What is wrong with a run after a kill, and with its next start."""
    problems = []
    is_staged = any(not name.startswith(".") for name in staged_steps(node))
    complete_staged_checkpoint(run, str(node))
    newest = find_newest_checkpoint(run.checkpoints)
    if newest.step != 2 and is_staged:
        problems.append("a staged checkpoint was lost")
    if not is_filled(load(newest), float(newest.step)):
        problems.append("another state is loaded than was saved")
    run.open(overwrite=False, config="")
    saver = staging_saver(run, node, 3.0)
    saver.save(step=3, eval_loss=None)
    saver.finish(is_final=True)
    names = sorted({"step_00000001", newest.path.name, "step_00000003"})
    if sorted(os.listdir(run.checkpoints)) != names or os.listdir(node):
        problems.append(f"left over: {os.listdir(run.checkpoints)}, {os.listdir(node)}")
    return problems


@pytest.mark.faults
@pytest.mark.parametrize("leave", [save_staged, complete_staged])
def test_a_kill_at_any_moment_loses_nothing_that_was_staged(tmp_path, leave):
    outcomes = run_ranks(kill_at_every_moment, 1, tmp_path, leave, find_problems)
    [(moments, wrong)] = values(outcomes)
    assert wrong == []
    assert moments > 15


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_an_earlier_start_has_staged_is_abandoned(run, node, monkeypatch, overwrite):
    staged = leave_staged(run, node, monkeypatch)

    run.open(overwrite=overwrite, config="")  # a start that does not take it
    complete_staged_checkpoint(run, str(node))

    assert steps(run.checkpoints) == []
    staging_saver(run, node, 3.0)
    assert not staged.exists()


def test_only_abandoned_folders_of_this_program_are_removed(tmp_path, run, node, monkeypatch):
    def make_run(name: str) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        folder.checkpoints.mkdir(parents=True)
        return folder

    abandoned, killed, living = make_run("abandoned"), make_run("killed"), make_run("living")
    leave_staged(abandoned, node, monkeypatch)
    (abandoned.checkpoints / STAGING_RECORD).unlink()
    kept = [leave_staged(killed, node, monkeypatch).parent]
    living_saver = staging_saver(living, node, 1.0)
    kept.append(living_saver._staging._path)
    (living.checkpoints / STAGING_RECORD).unlink()  # it looks abandoned, but its lock is held
    (node / "data").mkdir()
    (node / "llm-staged-file").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (node / "llm-staged-link").symlink_to(outside)
    (node / "llm-staged-new").mkdir()

    saver = staging_saver(run, node, 1.0)

    kept.append(saver._staging._path)
    names = {path.name for path in kept}
    names |= {"data", "llm-staged-file", "llm-staged-link", "llm-staged-new"}
    assert set(os.listdir(node)) == names
    assert outside.is_dir()


def test_a_folder_that_another_start_inspects_is_locked_a_moment_later(run, node, monkeypatch):
    try_lock = staging.try_lock

    def lock_after_another(descriptor, **options):
        other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try_lock(other)
        threading.Timer(0.2, os.close, [other]).start()
        return try_lock(descriptor, **options)

    monkeypatch.setattr(staging, "try_lock", lock_after_another)
    saver = staging_saver(run, node, 1.0)
    saver.save(step=1, eval_loss=None)
    saver.finish(is_final=True)
    assert steps(run.checkpoints) == [1]


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_node_refuses_the_start_and_names_the_file(run, node, monkeypatch):
    monkeypatch.setattr(staging, "try_lock", lambda *_, **options: full_disk())
    with pytest.raises(OSError, match=r"No space left on device: '.*/run\.json'"):
        staging_saver(run, node, 1.0)
    assert os.listdir(node) == []


def test_a_node_that_fails_after_the_last_copy_does_not_end_the_run(run, node):
    saver = staging_saver(run, node, 1.0)
    saver.save(step=1, eval_loss=None)
    saver.finish()
    saver._staging._run_file.close()
    saver._staging._run_file.close = full_disk
    saver.finish(is_final=True)
    assert steps(run.checkpoints) == [1]


def test_folders_of_other_users_are_never_read(run, node, monkeypatch):
    staged = leave_staged(run, node, monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    complete_staged_checkpoint(run, str(node))
    staging_saver(run, node, 1.0)
    assert steps(run.checkpoints) == []
    assert staged.exists()


def test_a_staged_checkpoint_of_a_running_training_is_left_alone(run, node, monkeypatch):
    leave_staged(run, node, monkeypatch)
    with RunFolder(run.path).lock(), pytest.raises(ConfigError, match="is in use by"):
        complete_staged_checkpoint(run, str(node))
    assert steps(run.checkpoints) == []


def test_going_back_abandons_what_was_staged(run, node, monkeypatch):
    with monkeypatch.context() as patches:
        break_copies(patches)
        saver = staging_saver(run, node, 1.0)
        saver.save(step=2, eval_loss=None)
        saver.finish()
    first_id = json.loads((run.checkpoints / STAGING_RECORD).read_text())["id"]
    saver.open_staging()
    assert staged_steps(node) == []
    assert json.loads((run.checkpoints / STAGING_RECORD).read_text())["id"] != first_id


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("/missing", "--stage_checkpoints /missing is not a folder on "),
        ("/dev/null", "is not a folder on "),
        ("/tmp/$NO_SUCH_VARIABLE", r"the environment variable \$NO_SUCH_VARIABLE is not set on "),
        ("/tmp/${NO_SUCH}", r"the environment variable \$\{NO_SUCH\} is not set on "),
    ],
)
def test_a_node_without_the_folder_is_refused(option, reason):
    with pytest.raises(ConfigError, match=reason):
        staging_root(option)


def test_a_folder_that_cannot_be_written_to_is_refused(node, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written to on "):
        staging_root(str(node))
