import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llm.metrics.metrics_file import MetricsFile, truncate_metrics
from tests.support.checkpoints import FailsAt


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


class FullDisk:
    """A file whose next writes write half and fail."""

    def __init__(self, file: Any, *, failures: int) -> None:
        self.file, self.failures = file, failures

    def write(self, content: memoryview) -> int:
        if self.failures:
            self.failures -= 1
            self.file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_lines_that_cannot_be_written_are_written_later(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    file.append({"loss": 4.0}, step=1)
    file._file = FullDisk(file._file, failures=2)
    for step in (2, 3, 4):
        file.append({"loss": 3.0}, step=step)

    assert steps_in(path) == [1, 2, 3, 4]
    assert caplog.messages == [
        f"{path} cannot be written (No space left on device). Training continues, and its lines "
        "are kept in memory until they can be written."
    ]


def test_lines_are_in_the_file_at_once_and_on_the_disk_after_a_flush(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    synced: list[list[int]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(steps_in(path)))
    file.append({"loss": 4.0}, step=1)
    file.append({"loss": 3.0}, step=2)
    assert steps_in(path) == [1, 2]
    assert synced == []
    file.flush()
    file.flush()  # nothing is left
    assert synced == [[1, 2]]


def test_lines_that_the_disk_has_lost_are_written_again(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    file.append({"loss": 4.0}, step=1)
    file.flush()
    monkeypatch.setattr(os, "fsync", FailsAt(0))
    file.append({"loss": 3.0}, step=2)
    with pytest.raises(OSError, match="No space left on device"):
        file.flush()
    os.truncate(path, path.stat().st_size - 5)  # as a file system may after a failed sync
    file.append({"loss": 2.0}, step=3)
    file.flush()
    assert steps_in(path) == [1, 2, 3]


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


def test_metrics_that_cannot_be_read_are_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 5}\n\x00\xff\n{}\n{"step": "6"}\n[7]\nnull\n{"step": 10}\n{"st')

    assert truncate_metrics(path, step=10) == {"step"}
    assert steps_in(path) == [5, 10]
    assert caplog.messages == [f"{path}: 5 lines could not be read and are removed"]


def test_metrics_with_nothing_to_drop_are_not_written_again(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5, "loss": 0.1}\n')
    monkeypatch.setattr(os, "fsync", FailsAt(0))

    assert truncate_metrics(path, step=10) == set()
