import json
import os
import socket

import pytest

from llm.errors import CheckpointError, ConfigError
from llm.run_folder import RunFolder, check_unchanged


def test_an_empty_or_missing_folder_is_free(tmp_path):
    RunFolder(tmp_path).check(resume=False, overwrite=False)
    RunFolder(tmp_path / "a" / "b").check(resume=False, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_another_run_is_refused_unless_resumed_or_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds a run already \(metrics.jsonl\)"):
        RunFolder(tmp_path).check(resume=False, overwrite=False)
    RunFolder(tmp_path).check(resume=True, overwrite=False)
    RunFolder(tmp_path).check(resume=False, overwrite=True)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        RunFolder(tmp_path / "file").check(resume=False, overwrite=False)


def test_overwriting_removes_the_run_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")

    RunFolder(tmp_path).open(overwrite=True, config="seed = 1\n")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "notes.txt"]


def test_two_processes_cannot_write_to_one_folder(tmp_path):
    first = RunFolder(tmp_path / "run")
    first.lock()
    owner = rf"in use by process {os.getpid()} on {socket.gethostname()} since 20\d\d-\d\d-\d\d "
    for _ in range(2):  # who is refused leaves the owner's words
        with pytest.raises(ConfigError, match=owner):
            RunFolder(tmp_path / "run").lock()
    first._lock.close()
    RunFolder(tmp_path / "run").lock()


def test_status_says_what_happened_and_why(tmp_path):
    run = RunFolder(tmp_path)
    run.say("preempted", reason="SIGTERM", step=12)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["reason"], status["step"]) == ("preempted", "SIGTERM", 12)


def test_metrics_are_cut_back_to_the_checkpoint_and_a_torn_line_is_dropped(tmp_path):
    run = RunFolder(tmp_path)
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (5, 10, 15)]
    run.metrics.write_text("\n".join(lines) + '\n{"step": 20, "lo')
    run.cut_metrics(step=10)
    kept = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert kept == [5, 10]


def test_every_changed_setting_is_listed_in_one_error():
    saved = {"seed": 1, "block_size": 64, "learning_rate": 0.1}
    with pytest.raises(CheckpointError) as caught:
        check_unchanged(saved, {"seed": 2, "block_size": 32, "learning_rate": 0.1}, allowed=())
    assert "seed was 1 and is 2; block_size was 64 and is 32" in str(caught.value)
    assert "--change_on_resume" in str(caught.value)


def test_a_change_that_is_allowed_is_no_error():
    check_unchanged({"seed": 1}, {"seed": 2}, allowed=("seed",))
