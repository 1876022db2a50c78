import errno
import io
import json
import logging
import subprocess
import sys
import threading

import pytest

from llm.checkpoint.run_folder import RunFolder
from llm.metrics.metrics_file import truncate_metrics
from llm.runtime.files import read_json_lines
from llm.runtime.logging import (
    SAME_ON_ALL_RANKS,
    EventHandler,
    append_event,
    event,
    log_to_file,
    set_up_logging,
    short_form,
)


@pytest.fixture
def log(tmp_path):
    logger = logging.Logger("a run's log")
    logger.addHandler(EventHandler(tmp_path / "events.jsonl"))
    return logger


def events_in(folder):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "time"} for line in lines
    ]


def test_marked_lines_of_the_log_become_events_and_the_others_do_not(tmp_path, log):
    log.info("step 20 | loss 7.5")
    log.info("Saved step_20.", extra=event("save", step=20, checkpoint="step_20"))
    assert events_in(tmp_path) == [{"event": "save", "step": 20, "checkpoint": "step_20"}]


def test_a_loss_that_is_not_finite_is_null(tmp_path, log):
    log.info("validation", extra=event("evaluation", step=20, loss=float("nan")))
    assert events_in(tmp_path) == [{"event": "evaluation", "step": 20, "loss": None}]


def test_an_event_that_cannot_be_written_does_not_stop_training(tmp_path, log, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    (tmp_path / "events.jsonl").mkdir()
    log.info("Saved.", extra=event("save", step=20))
    (tmp_path / "events.jsonl").rmdir()
    log.info("Saved.", extra=event("save", step=40))
    assert events_in(tmp_path) == [{"event": "save", "step": 40}]


def test_every_end_of_a_run_is_an_event_that_a_resume_keeps(tmp_path):
    run = RunFolder(tmp_path)
    append_event(run.events, "start", step=0)
    run.write_status("running")
    run.write_status("failed", reason="DataError: no text")
    truncate_metrics(run.metrics, step=0)
    run.write_status("finished", step=60)
    assert events_in(tmp_path) == [
        {"event": "start", "step": 0},
        {"event": "stop", "step": None, "status": "failed", "reason": "DataError: no text"},
        {"event": "stop", "step": 60, "status": "finished", "reason": None},
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown"), [(Terminal(), "step 9/9"), (io.StringIO(), "step 9/9 | lm loss: 7.5")]
)
def test_a_terminal_gets_the_short_form_and_a_file_the_line(tmp_path, monkeypatch, stream, shown):
    logger = logging.getLogger("llm")
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(sys, "stdout", stream)
    set_up_logging(rank=0)
    log_to_file(tmp_path / "log.txt")

    logger.info("step 9/9 | lm loss: 7.5", extra=short_form("step 9/9"))
    logger.info("saved")

    assert stream.getvalue() == f"{shown}\nsaved\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["step 9/9 | lm loss: 7.5", "saved"]


def test_the_log_continues_in_its_file_when_the_console_is_gone(tmp_path):
    code = (
        "import logging, sys; from pathlib import Path\n"
        "from llm.runtime.logging import log_to_file, set_up_logging\n"
        "set_up_logging(rank=0); log_to_file(Path(sys.argv[1]))\n"
        "logger = logging.getLogger('llm')\n"
        "logger.info('first'); sys.stdin.read(); logger.info('second'); logger.info('third')"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "log.txt")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        _, errors = process.communicate()

    assert (process.returncode, errors) == (0, "")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["first", "second", "third"]


class ClosedStream(io.StringIO):
    """A console that fails in a way that no console should."""

    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize(
    "console", [ClosedStream(), io.TextIOWrapper(io.BytesIO(), encoding="ascii"), None]
)
def test_no_console_ends_a_training(tmp_path, monkeypatch, console):
    monkeypatch.setattr(sys, "stdout", console)
    set_up_logging(rank=0)
    log_to_file(tmp_path / "log.txt")

    logging.getLogger("llm").info("a sample: caf\u00e9")

    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith(" a sample: caf\u00e9\n")


def test_rank_0_alone_shows_a_warning_that_all_ranks_log(capsys):
    for rank in (0, 1):
        set_up_logging(rank=rank)
        logging.getLogger("llm").warning("too many epochs", extra=SAME_ON_ALL_RANKS)
        logging.getLogger("llm").warning("a full disk")

    lines = capsys.readouterr().out.splitlines()
    assert lines == ["too many epochs", "a full disk", "[rank 1] a full disk"]


def test_control_characters_are_escaped_in_the_log(tmp_path, capsys):
    set_up_logging(rank=0)
    log_to_file(tmp_path / "log.txt")

    logging.getLogger("llm").info("a sample:\n\x1b[2J \ud800")

    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith(" a sample:")
    assert lines[1:] == [r"\x1b[2J \ud800"]
    assert "\x1b" not in capsys.readouterr().out


def test_a_line_that_was_cut_short_does_not_swallow_the_next_one(tmp_path):
    set_up_logging(rank=0)
    for name in ("events.jsonl", "log.txt"):
        (tmp_path / name).write_text('{"time": "2026-')

    append_event(tmp_path / "events.jsonl", "resume", step=4)
    append_event(tmp_path / "events.jsonl", "stop", step=8)
    log_to_file(tmp_path / "log.txt")
    logging.getLogger("llm").info("resumed")

    cut, resumed, stopped = read_json_lines(tmp_path / "events.jsonl")
    assert cut is None
    assert (resumed["event"], stopped["event"]) == ("resume", "stop")
    assert (tmp_path / "log.txt").read_text().splitlines()[0] == '{"time": "2026-'
    assert (tmp_path / "log.txt").read_text().endswith(" resumed\n")


def test_an_event_that_json_cannot_hold_does_not_stop_training(tmp_path, caplog):
    logger = logging.getLogger("llm")
    handler = EventHandler(tmp_path / "events.jsonl")
    handler.handle(
        logger.makeRecord("llm", 20, "", 0, "", (), None, extra=event("save", step=object()))
    )
    assert f"An event cannot be written to {tmp_path}/events.jsonl (" in caplog.text


def test_a_thread_that_cannot_write_to_the_disk_ends_in_one_line(capsys):
    set_up_logging(rank=0)

    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()

    output = capsys.readouterr()
    assert output.err == ""
    assert output.out == (
        "A background thread failed (OSError: [Errno 28] No space left on device).\n"
    )
