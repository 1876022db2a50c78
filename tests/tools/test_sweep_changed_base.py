"""A sweep with finished members or trials whose base has changed since."""

import json
from pathlib import Path

import pytest

from llm.errors import ConfigError
from llm.tools.sweep.run_members import MemberRuns
from llm.tools.sweep.sweep import main
from llm.trainers.gpt.extensions import GPTConfig

BASE = """
model_name_or_path = "model"
train_file = "a.txt"
block_size = 32
per_device_train_batch_size = 4
max_train_steps = 2
seed = 1
"""
GRID = ["base.toml", "--grid", "learning_rate=1e-3"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with `base.toml` and a sweep of one finished member."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    finish(tmp_path, "global_batch_size = 8")
    return tmp_path


def finish(folder: Path, *lines: str, ranks: int = 2, batch: int | str = 8) -> None:
    """Write what a finished member with further options leaves in its folder."""
    member = folder / "sweeps/base/learning_rate=1e-3"
    member.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["learning_rate = 1e-3", BASE, *lines])
    (member / "config.toml").write_text(text)
    (member / "status.json").write_text('{"status": "finished"}')
    start = {"event": "start", "step": 0, "ranks": ranks, "global_batch_size": batch}
    (member / "events.jsonl").write_text(json.dumps({**start, "block_size": 32}) + "\n")


def change(folder: Path, *lines: str) -> None:
    """Add options to the base; one that it has is replaced."""
    names = {line.partition(" =")[0] for line in lines}
    rest = [line for line in BASE.splitlines() if line.partition(" =")[0] not in names]
    (folder / "base.toml").write_text("\n".join([*rest, *lines]))


@pytest.mark.parametrize(
    ("recorded", "lines", "clause"),
    [
        ("global_batch_size = 8", ["global_batch_size = 16"], "global_batch_size was 8 and is 16"),
        ("", ["per_device_train_batch_size = 8"], "global_batch_size was 8 and is 16"),
        ("", ["gradient_accumulation_steps = 2"], "global_batch_size was 8 and is 16"),
        ("", ["tensor_parallel_size = 2"], "global_batch_size was 8 and is 4"),
        ("", ['skip_samples = "4:8"'], "skip_samples was None and is '4:8'"),
        ("", ["max_epochs = [2]"], "max_epochs was [] and is [2.0]"),
        ("", ['on_loss_spike = "stop"'], "on_loss_spike was 'warn' and is 'stop'"),
        (
            'change_on_resume = ["weight_decay"]',
            ["weight_decay = 0.1", 'change_on_resume = ["weight_decay"]'],
            "weight_decay was 0.0 and is 0.1",
        ),
    ],
)
def test_a_finished_member_that_would_train_otherwise_is_refused(
    recorded, lines, clause, folder, capsys
):
    finish(folder, recorded)
    change(folder, *lines)
    assert main([*GRID, "--status"]) == 2
    assert capsys.readouterr().err == (
        "error: The member learning_rate=1e-3 cannot run: sweeps/base/learning_rate=1e-3 holds a "
        f"finished run with other options: {clause}. Give the sweep another --output_dir, or "
        "remove this folder.\n"
    )


def test_a_finished_member_of_another_number_of_ranks_is_refused(folder, capsys):
    finish(folder)
    change(folder)
    assert main([*GRID, "--nproc_per_node", "4"]) == 2
    assert "global_batch_size was 8 and is 16." in capsys.readouterr().err
    assert main([*GRID, "--nproc_per_node", "2"]) == 0
    assert main([*GRID, "--status"]) == 0  # with the ranks of the run


def test_a_member_that_ended_on_fewer_ranks_has_its_first_batch(folder):
    finish(folder, ranks=2)
    events = folder / "sweeps/base/learning_rate=1e-3/events.jsonl"
    first_start = events.read_text()
    events.write_text(first_start + first_start.replace('"ranks": 2', '"ranks": 1'))
    change(folder)
    assert main([*GRID, "--status"]) == 0
    assert main([*GRID, "--nproc_per_node", "2"]) == 0


def test_a_member_that_ended_on_more_ranks_may_have_another_layout(folder, capsys):
    finish(folder, "tensor_parallel_size = 4", ranks=2)
    events = folder / "sweeps/base/learning_rate=1e-3/events.jsonl"
    first_start = events.read_text()
    events.write_text(first_start + first_start.replace('"ranks": 2', '"ranks": 8'))
    change(folder, "tensor_parallel_size = 4")
    assert main([*GRID, "--status"]) == 0
    assert main([*GRID, "--nproc_per_node", "8"]) == 0
    assert main([*GRID, "--nproc_per_node", "16"]) == 2
    assert "global_batch_size was 8 and is 16." in capsys.readouterr().err


def test_a_batch_that_is_the_same_in_other_words_is_not_refused(folder):
    change(folder, "global_batch_size = 8", "per_device_train_batch_size = 2")
    assert main([*GRID, "--status"]) == 0
    change(folder, "gradient_accumulation_steps = 2", "per_device_train_batch_size = 2")
    assert main([*GRID, "--status"]) == 0
    schedule = 'global_batch_size = "8@0,16@1000"'
    finish(folder, schedule, batch="8@0,16@1024")
    change(folder, schedule)
    assert main([*GRID, "--status"]) == 0


def test_samples_that_a_rewound_run_has_skipped_itself_are_not_refused(folder, capsys):
    spikes = ['on_loss_spike = "rewind"', "checkpointing_steps = 1"]
    finish(folder, *spikes, 'skip_samples = "4:8,20:24"')
    change(folder, *spikes, 'skip_samples = "4:8"')
    assert main([*GRID, "--status"]) == 0
    change(folder, *spikes, 'skip_samples = "4:9"')
    assert main([*GRID, "--status"]) == 2


def test_an_interrupted_member_may_change_what_a_resume_allows(folder):
    change(
        folder,
        "global_batch_size = 16",
        "weight_decay = 0.1",
        'change_on_resume = ["weight_decay"]',
    )
    (folder / "sweeps/base/learning_rate=1e-3/status.json").write_text('{"status": "preempted"}')
    assert main([*GRID, "--status"]) == 75


def test_a_finished_member_with_other_rounding_or_evaluation_is_named(folder, capsys):
    change(folder, "max_eval_steps = 5")
    assert main([*GRID, "--status"]) == 0
    assert capsys.readouterr().err == (
        "Finished with other settings (max_eval_steps was None and is 5): learning_rate=1e-3.\n"
    )


def test_the_status_of_an_array_needs_none_of_its_ranks(folder):
    finish(folder, "tensor_parallel_size = 4", ranks=8)
    change(folder, "tensor_parallel_size = 4")
    assert main([*GRID, "--status"]) == 0


def test_a_study_of_another_base_is_refused(folder, capsys, monkeypatch):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    argv = ["base.toml", "--output_dir", "s", "--sampler", "optuna"]
    argv += ["--search", "num_train_epochs=1..3"]
    monkeypatch.setattr(MemberRuns, "run", lambda self: self._trials.next_member())
    lines = (folder / "base.toml").read_text().replace("max_train_steps = 2\n", "")
    (folder / "base.toml").write_text(lines)
    assert main(argv) == 75
    assert main(argv) == 75
    for line, clause in [
        ("weight_decay = 0.1", "weight_decay was 0.0 and is 0.1"),
        ("gradient_accumulation_steps = 2", "global_batch_size was 4 and is 8"),
    ]:
        (folder / "base.toml").write_text(lines + line)
        assert main(argv) == 2
        assert capsys.readouterr().err == (
            f"error: The trials of the study in s have other options: {clause}. Name another "
            "--output_dir for another study.\n"
        )
    assert main([*argv, "--status"]) == 75  # the number of ranks, and so the batch, is unknown


def test_of_two_commands_at_once_one_decides_the_options_of_a_study(tmp_path):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    from llm.tools.sweep.optuna_trials import Trials

    first, second = (
        Trials(
            tmp_path,
            ["learning_rate=1e-4..1e-2:log"],
            GPTConfig(weight_decay=weight_decay),
            num_ranks=1,
            num_trials=2,
        )
        for weight_decay in (0.0, 0.1)
    )
    assert first.members() == []  # as --status, which decides nothing
    assert second.next_member() is not None
    with pytest.raises(ConfigError, match=r"weight_decay was 0\.1 and is 0\.0"):
        first.next_member()
