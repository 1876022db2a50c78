import os
from pathlib import Path

import pytest

from llm.runtime.process_settings import limit_spin_wait


@pytest.fixture
def no_spin_count(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    yield
    os.environ.pop("GOMP_SPINCOUNT", None)


def test_the_spin_wait_is_limited_when_another_process_runs(no_spin_count, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self: "0.00 0.00 0.00 2/80 1234")

    limit_spin_wait()

    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_the_spin_wait_is_limited_when_ranks_share_the_machine(no_spin_count, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(Path, "read_text", lambda self: "0.00 0.00 0.00 1/80 1234")

    limit_spin_wait()

    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_the_spin_wait_is_unchanged_when_alone_on_the_machine(no_spin_count, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "1.90 1.00 0.50 1/80 1234")

    limit_spin_wait()

    assert "GOMP_SPINCOUNT" not in os.environ


def test_the_spin_wait_set_by_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")

    limit_spin_wait()

    assert os.environ["GOMP_SPINCOUNT"] == "7"
