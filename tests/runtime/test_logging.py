import json
import logging

import pytest

from llm.checkpoint.run_folder import RunFolder
from llm.metrics.tracker import cut_metrics
from llm.runtime.logging import EventHandler, append_event, event


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
    run.say("running")
    run.say("failed", reason="DataError: no text")
    cut_metrics(run.metrics, step=0)
    run.say("finished", step=60)
    assert events_in(tmp_path) == [
        {"event": "start", "step": 0},
        {"event": "stop", "step": None, "status": "failed", "reason": "DataError: no text"},
        {"event": "stop", "step": 60, "status": "finished", "reason": None},
    ]
