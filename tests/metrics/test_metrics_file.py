import json
import os
from pathlib import Path

import pytest

from llm.metrics.metrics_file import MetricsFile, truncate_metrics
from tests.support.checkpoints import FailsAt


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_that_cannot_be_written_are_written_later(tmp_path, monkeypatch, caplog):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    file.append({"loss": 4.0}, step=1)
    monkeypatch.setattr(os, "fsync", FailsAt(0, 1))
    for step in (2, 3, 4):
        file.append({"loss": 3.0}, step=step)

    assert steps_in(path) == [1, 2, 3, 4]
    assert caplog.messages == [
        f"{path} cannot be written (No space left on device in fsync). Training continues, and its "
        "lines are kept in memory until they can be written."
    ]


def test_lines_that_are_never_written_fail_each_save_and_are_reported(
    tmp_path, monkeypatch, caplog
):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    monkeypatch.setattr(os, "fsync", FailsAt(0, 1, 2))
    file.append({"loss": 4.0}, step=1)

    with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl"):
        file.flush()
    file.close()
    assert caplog.messages[-1] == f"Lines are missing in {path} (No space left on device in fsync)."


def test_metrics_after_the_checkpoint_and_a_truncated_line_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f"{json.dumps({'step': step})}\n" for step in (5, 10, 15)) + '{"step": 20, "lo'
    )
    assert truncate_metrics(path, step=10) == {"step"}
    assert steps_in(path) == [5, 10]


def test_metrics_with_nothing_to_drop_are_not_written_again(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5, "loss": 0.1}\n')
    monkeypatch.setattr(os, "fsync", FailsAt(0))

    assert truncate_metrics(path, step=10) == set()
