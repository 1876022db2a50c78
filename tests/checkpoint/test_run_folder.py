import errno
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from llm.checkpoint import run_folder
from llm.checkpoint.run_folder import RunFolder, check_options_unchanged
from llm.errors import CheckpointError, ConfigError, DataError
from llm.runtime import claims

FORK = multiprocessing.get_context("fork")


def test_an_empty_or_missing_folder_can_be_used(tmp_path):
    RunFolder(tmp_path).check_contents(resume=False, overwrite=False)
    RunFolder(tmp_path / "a" / "b").check_contents(resume=False, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_run_is_refused_without_resume_or_overwrite(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    RunFolder(tmp_path).write_status("running")
    with pytest.raises(ConfigError, match=r"holds a run already \(status.json, metrics.jsonl\)"):
        RunFolder(tmp_path).check_contents(resume=False, overwrite=False)
    RunFolder(tmp_path).check_contents(resume=True, overwrite=False)
    RunFolder(tmp_path).check_contents(resume=False, overwrite=True)


@pytest.mark.parametrize(
    "name",
    [
        "README.md", "config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "tokenizer.json", "additional_chat_templates", "config.toml", "log.txt",
        "checkpoints", "checkpoints/step_00000001",
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}])
def test_files_not_written_by_a_run_are_never_replaced(tmp_path, name, how):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path).check_contents(**{"resume": False, "overwrite": False, **how})
    assert f"holds no run, but files that this run would replace ({name})" in str(caught.value)


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}])
def test_a_run_can_start_in_a_folder_that_holds_only_the_stacks_of_a_hang(tmp_path, how):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank_00001.txt").write_text("rank 0 on host hangs")
    run = RunFolder(tmp_path)
    run.check_contents(**{"resume": False, "overwrite": False, **how})
    run.open(overwrite=False, config="seed = 1\n")
    assert (tmp_path / "config.toml").read_text() == "seed = 1\n"


def test_a_folder_with_the_users_own_files_can_be_used(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    names = ("notes.txt", "model-old.safetensors", "train.py", "checkpoints/mine.txt")
    for name in names:
        (tmp_path / name).write_text("mine")
    run = RunFolder(tmp_path)
    run.check_contents(resume=False, overwrite=False)
    run.open(overwrite=False, config="seed = 1\n")
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4


def test_a_folder_with_moved_checkpoints_counts_as_a_run(tmp_path):
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    RunFolder(tmp_path).check_contents(resume=True, overwrite=False)
    with pytest.raises(ConfigError, match=r"holds a run already \(checkpoints\)"):
        RunFolder(tmp_path).check_contents(resume=False, overwrite=False)


def test_a_default_folder_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is too long; give an --output_dir"):
        RunFolder(tmp_path / ("a" * 300)).check_contents(resume=False, overwrite=False)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=f"{tmp_path}/file is a file; name a folder"):
            RunFolder(path).check_contents(resume=False, overwrite=False)


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    for path in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(ConfigError, match="link is a link to nothing, which does not exist"):
            RunFolder(path).check_contents(resume=False, overwrite=False)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_file_system_that_takes_no_folders_is_refused_with_its_reason():
    run = RunFolder(Path("/proc/x"))
    with pytest.raises(DataError, match=r"^--output_dir: /proc/x cannot be used: \w"), run.lock():
        pass


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and allowed(path, mode))
    for path in (tmp_path, tmp_path / "new" / "run"):
        with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written to .*; name another"):
            RunFolder(path).check_contents(resume=False, overwrite=False)


@pytest.mark.parametrize("name", [".", "new/run"])
def test_a_check_writes_nothing_that_a_kill_could_leave_behind(tmp_path, name):
    os.utime(tmp_path, ns=(0, 0))
    RunFolder(tmp_path / name).check_contents(resume=False, overwrite=False)
    assert tmp_path.stat().st_mtime_ns == 0


def test_overwriting_removes_only_the_files_of_a_run(tmp_path):
    run = RunFolder(tmp_path)
    written = (
        "metrics.jsonl", ".metrics.jsonl.12.tmp", ".status.json.0fe1d2c3.tmp",
        "tensorboard/events.out.tfevents.1.host.2.0",
        "profile/rank0.trace.json.gz", "profile/profile.txt", "stacks/rank_00000.txt",
        "stacks/gloo_rank_0",
        "checkpoints/step_00000001/manifest.json", "checkpoints/.step_00000002.tmp/state.json",
        "checkpoints/step_00000003.superseded/manifest.json",
        "checkpoints/step_00000004.replaced.superseded/manifest.json",
    )  # fmt: skip
    mine = (
        "notes.txt", ".notes.tmp", "profile/mine/table", "tensorboard/.mine",
        "checkpoints/mine.txt", "checkpoints/.mine.tmp",
    )  # fmt: skip
    for name in (*written, *mine):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "checkpoints" / "best").symlink_to("step_00000001")
    run.write_status("finished")

    run.open(overwrite=True, config="seed = 1\n")

    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_dir()}
    assert left == {"config.toml", "status.json", *mine}
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "running"


def test_each_start_removes_what_a_killed_save_has_left(tmp_path):
    run = RunFolder(tmp_path)
    for name in (".step_00000004.tmp", ".step_00000002.removed.tmp", "step_00000002"):
        (run.checkpoints / name).mkdir(parents=True)

    run.open(overwrite=False, config="seed = 1\n")

    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000002"]


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def overwrite_until(run: RunFolder, moment: int) -> bool:
    """Overwrite a run in a process that is killed before one of its changes to the file system.

    Returns whether it was killed.
    """
    child = os.fork()
    if child == 0:
        count = itertools.count()

        def kill(event: str, args: tuple[object, ...]) -> None:
            creates = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
            if (event in CHANGES or creates) and next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        run.open(overwrite=True, config="seed = 2\n")
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_while_overwriting_leaves_the_whole_run_or_none(tmp_path):
    for moment in itertools.count():
        run = RunFolder(tmp_path / str(moment))
        for step in (1, 2, 3):
            (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
            (run.checkpoints / f"step_{step:08d}" / "manifest.json").write_text("{}")
        for name in ("checkpoints/mine.txt", "metrics.jsonl", "log.txt"):
            (run.path / name).write_text("text")
        run.open(overwrite=False, config="seed = 1\n")
        run.write_status("finished")

        killed = overwrite_until(run, moment)

        steps = sorted(path.name for path in run.checkpoints.glob("step_*"))
        if steps:
            assert len(steps) == 3
            assert run.metrics.read_text() == "text"
            assert (run.path / "config.toml").read_text() == "seed = 1\n"
            continue
        run.check_contents(resume=True, overwrite=False)
        run.check_not_finished()
        run.open(overwrite=False, config="seed = 2\n")
        assert {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()} == {
            "checkpoints/mine.txt",
            "config.toml",
            "status.json",
        }
        if not killed:
            break
    assert moment > 12


def test_overwriting_does_not_follow_links(tmp_path):
    run, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    (elsewhere / "step_00000001").mkdir(parents=True)
    run.path.mkdir()
    run.checkpoints.symlink_to(elsewhere)
    run.write_status("finished")
    run.check_contents(resume=True, overwrite=False)
    (tmp_path / "linked").symlink_to(run.path)
    for folder in (run, RunFolder(tmp_path / "linked")):
        with pytest.raises(ConfigError, match="checkpoints is a link, and --overwrite_output_dir"):
            folder.check_contents(resume=False, overwrite=True)


@pytest.fixture
def finished(tmp_path) -> RunFolder:
    """A finished run beside a text of its user's, and links both ways."""
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "step_00000001").mkdir(parents=True)
    run.write_status("finished")
    (tmp_path / "linked").symlink_to(run.path)
    (tmp_path / "model").mkdir()
    for name in ("text.txt", "run/model.safetensors", "run/text.txt", "run/checkpoints/text.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "model" / "model.safetensors").symlink_to(run.path / "model.safetensors")
    (tmp_path / "text-link.txt").symlink_to(run.checkpoints / "text.txt")
    run.log.symlink_to(tmp_path / "text.txt")
    return run


@pytest.mark.parametrize(
    "source",
    [
        "run", "linked", "run/checkpoints", "run/checkpoints/text.txt", "text-link.txt", "model",
        "linked/checkpoints/step_00000001", "run/../run/model.safetensors", "text.txt",
    ],
)  # fmt: skip
def test_an_input_that_the_run_would_overwrite_is_refused_also_by_link(finished, source):
    assert finished.would_overwrite(finished.path.parent / source)
    assert RunFolder(finished.path.parent / "linked").would_overwrite(finished.path.parent / source)


def test_inputs_next_to_the_files_of_a_run_are_accepted(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.write_status("finished")
    (run.path / "text.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(run.path / "text.txt")
    assert not any(run.would_overwrite(path) for path in (tmp_path, tmp_path / "link.txt"))


def test_an_input_with_a_link_to_itself_is_checked_like_any_other(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "loop").symlink_to("loop")
    assert not RunFolder(tmp_path / "run").would_overwrite(tmp_path / "data")


def test_a_folder_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()

    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    for look in (
        lambda: run.check_contents(resume=False, overwrite=True),
        lambda: run.would_overwrite(tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"checkpoints cannot be read \(Permission denied"):
            look()


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks; its processes show signs of life often."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_folder, "_CLAIM_POLL_SECONDS", 0.02)


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_two_processes_cannot_write_to_one_folder(tmp_path, request, locks):
    if locks == "no locks":
        request.getfixturevalue("no_locks")
    run = RunFolder(tmp_path / "run")
    owner = rf"in use by process {os.getpid()} on {socket.gethostname()} since 20\d\d-\d\d-\d\d "
    with run.lock():
        for _ in range(2):  # who is refused leaves the owner's words
            with pytest.raises(ConfigError, match=owner):
                RunFolder(tmp_path / "run").lock().__enter__()
    with RunFolder(tmp_path / "run").lock():
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_lock_that_cannot_be_closed_does_not_hide_the_error_of_a_run(tmp_path):
    with pytest.raises(DataError, match="no text"):
        fail_with_lock(tmp_path)


def fail_with_lock(folder: Path) -> None:
    with RunFolder(folder).lock():
        for link in Path("/proc/self/fd").iterdir():
            if os.path.realpath(link) == str(folder / ".lock"):
                os.close(int(link.name))
        raise DataError("no text")


def test_a_lock_leaves_nothing_behind_unless_the_folder_was_opened(tmp_path):
    run = RunFolder(tmp_path / "runs" / "wiki")
    with run.lock():
        assert run.path.is_dir()
    assert not list(tmp_path.iterdir())

    run.path.mkdir(parents=True)
    (run.path / "notes.txt").touch()
    with run.lock():
        assert (run.path / ".lock").exists()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]

    with run.lock():
        run.is_open = True
    assert (run.path / ".lock").exists()


def test_without_locks_a_folder_whose_owner_has_died_is_free_soon(
    tmp_path, no_locks, monkeypatch, caplog
):
    monkeypatch.setattr(claims, "HEARTBEAT_TIMEOUT_SECONDS", 0.3)
    (tmp_path / ".owner-1").touch()

    began = time.monotonic()
    with RunFolder(tmp_path).lock():
        waited = time.monotonic() - began
        assert sorted(path.name for path in tmp_path.glob(".owner*")) == [".owner-1", ".owner-2"]
    assert waited > 0.3
    assert caplog.text.count("waiting up to 60 seconds for a sign of life") == 1

    assert not list(tmp_path.glob(".owner*"))
    began = time.monotonic()
    with RunFolder(tmp_path).lock():
        assert time.monotonic() - began < 0.3


def test_without_locks_a_process_of_this_machine_is_known_to_be_dead(tmp_path, no_locks):
    killed = FORK.Process(target=die_with_lock, args=(tmp_path,))
    killed.start()
    killed.join(30)
    assert (killed.exitcode, [path.name for path in tmp_path.glob(".owner*")]) == (7, [".owner-1"])

    began = time.monotonic()
    with RunFolder(tmp_path).lock():
        assert time.monotonic() - began < 10  # not a minute
    assert not list(tmp_path.glob(".owner*"))


def die_with_lock(folder: Path) -> None:
    with RunFolder(folder).lock():
        os._exit(7)


def test_without_locks_a_process_that_was_replaced_ends(tmp_path, no_locks, monkeypatch, caplog):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with RunFolder(tmp_path).lock():
        assert not ended.wait(0.2)
        (tmp_path / ".owner-2").touch()
        assert ended.wait(10)
    assert f"error: Another run writes to {tmp_path}, because this process was" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_status_is_written_over_the_former_one(tmp_path, monkeypatch, number):
    run = RunFolder(tmp_path)
    run.write_status("running")

    def refuse(path, text):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(run_folder, "write_whole", refuse)
    run.write_status("failed", reason="CheckpointError: no space", step=7)
    run.write_status("failed", reason="no", step=7)

    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["reason"], status["step"]) == ("failed", "no", 7)


def test_the_status_file_records_the_state_and_its_reason(tmp_path):
    run = RunFolder(tmp_path)
    run.write_status("preempted", reason="SIGTERM", step=12)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["reason"], status["step"]) == ("preempted", "SIGTERM", 12)


def test_every_changed_setting_is_listed_in_one_error():
    saved = {"seed": 1, "block_size": 64, "learning_rate": 0.1}
    with pytest.raises(CheckpointError) as caught:
        check_options_unchanged(
            saved, {"seed": 2, "block_size": 32, "learning_rate": 0.1}, allowed_names=()
        )
    assert "seed was 1 and is 2; block_size was 64 and is 32" in str(caught.value)
    assert "--change_on_resume" in str(caught.value)


def test_a_branch_with_changed_settings_is_told_what_a_branch_can_do():
    parent = Path("runs/a/checkpoints/step_00000004")
    with pytest.raises(CheckpointError) as caught:
        check_options_unchanged({"seed": 1}, {"seed": 2}, allowed_names=(), branch_from=parent)
    assert str(caught.value) == (
        "A branch of runs/a/checkpoints/step_00000004 cannot change these settings: seed was 1 and "
        "is 2. Leave them out, or allow a change with --change_on_resume NAME."
    )


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/new", "tensorboard/a/b"])
def test_a_run_does_not_begin_within_the_files_of_another(tmp_path, name):
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    RunFolder(tmp_path / "other" / name).check_contents(resume=False, overwrite=False)
    other.write_status("finished")
    for resume in (False, True):
        with pytest.raises(ConfigError) as caught:
            RunFolder(tmp_path / "other" / name).check_contents(resume=resume, overwrite=False)
        assert str(caught.value) == (
            f"--output_dir {tmp_path / 'other' / name} is within the files of the run "
            f"{tmp_path / 'other'}; name a folder outside of them."
        )
    RunFolder(tmp_path / "other" / "beside").check_contents(resume=False, overwrite=False)


def test_an_allowed_change_of_a_setting_is_accepted():
    check_options_unchanged({"seed": 1}, {"seed": 2}, allowed_names=("seed",))
