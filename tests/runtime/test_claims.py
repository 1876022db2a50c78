"""Claims: a living process is never replaced, and a process that was replaced changes nothing."""

import os
from pathlib import Path

import pytest

from llm.runtime import claims
from llm.runtime.claims import Claim, read_live_claim_age


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test turns forward; processes do not touch their claims by themselves."""

    class Clock:
        seconds = 0.0

    monkeypatch.setattr(claims.time, "monotonic", lambda: Clock.seconds)
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 3600.0)
    return Clock


def acquire(folder: Path) -> Claim:
    claim = Claim(folder, "run")
    assert claim.try_acquire()
    return claim


def take_over(folder: Path, clock) -> Claim:
    """The claim of another process, after a minute without a heartbeat."""
    claim = Claim(folder, "run")
    for _ in range(61):
        assert not claim.try_acquire()
        clock.seconds += 1
    assert claim.try_acquire()
    return claim


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_stopped_process_loses_its_claim_also_to_one_of_the_same_name(tmp_path, clock):
    stopped = acquire(tmp_path)
    second = take_over(tmp_path, clock)
    assert (stopped.is_held(), second.is_held()) == (False, True)
    second.release()
    third = acquire(tmp_path)
    assert names(tmp_path) == ["run-1"]  # the name that the first one had
    assert (stopped.is_held(), third.is_held()) == (False, True)


def test_a_process_that_was_replaced_releases_nothing(tmp_path, clock):
    stopped = acquire(tmp_path)
    second = take_over(tmp_path, clock)
    stopped.release()
    assert not Claim(tmp_path, "run").try_acquire()
    assert (names(tmp_path), second.is_held()) == (["run-1", "run-2"], True)
    second.release()
    assert names(tmp_path) == []


def test_a_file_system_that_hangs_does_not_count_as_silence(tmp_path, clock):
    owner = acquire(tmp_path)
    rival = Claim(tmp_path, "run")
    assert not rival.try_acquire()
    clock.seconds += 600  # neither process could read or write
    assert not rival.try_acquire()
    clock.seconds += 1
    os.utime(tmp_path / "run-1", (1, 1))  # the heartbeat arrives
    assert not rival.try_acquire()
    assert rival.has_rival
    assert owner.is_held()


def test_an_empty_claim_is_no_sign_of_a_loss(tmp_path, clock):
    owner = acquire(tmp_path)
    (tmp_path / "run-1").write_text("")
    assert owner.is_held()


def test_only_the_newest_claim_counts(tmp_path):
    for name in ("run-9", "run-10"):
        (tmp_path / name).write_text("1 another-boot pid:[1]")
    assert [path.name for path in read_live_claim_age(tmp_path, "run")] == ["run-10"]
