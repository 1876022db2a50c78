"""The wall time of a run is divided into what trained and what took the rest."""

import json
from typing import Any

import pytest

from llm.metrics import wall_time
from llm.metrics.wall_time import WallTime, describe_goodput


class Clock:
    """A clock that a test moves: the age of the process, and the time of the day."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr("time.time", lambda: self.now)
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(wall_time, "_process_age", lambda: 10.0)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def losses_of(results: dict[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("lost_").removesuffix("_seconds"): seconds
        for name, seconds in results.items()
        if name.startswith("lost_") and seconds
    }


def begun(path: Any, *, seconds: float = 0.0, tokens: int = 0, num_devices: int = 1) -> WallTime:
    """A start that begins to train at once, 10 s after its process began."""
    account = WallTime()
    account.open(path, num_devices=num_devices)
    account.begin_training(seconds=seconds, tokens=tokens)
    return account


def test_each_second_counts_as_what_it_is_spent_on(clock, tmp_path):
    account = begun(tmp_path / "goodput.json", num_devices=4)
    clock.now += 70
    with account.spent_on("evaluation"):
        clock.now += 5
        with account.spent_on("saving"):
            clock.now += 3
        clock.now += 2
    clock.now += 10
    account.tokens = 1000

    results = account.results()
    assert losses_of(results) == {"start": 10, "evaluation": 7, "saving": 3}
    assert (results["training_seconds"], results["wall_seconds"]) == (80, 100)
    assert results["goodput"] == 0.8
    assert results["device_hours"] == 4 * 100 / 3600
    assert results["tokens_per_device_hour"] == pytest.approx(1000 / (400 / 3600))


def test_steps_after_the_checkpoint_of_a_killed_start_are_repeated(clock, tmp_path):
    path = tmp_path / "goodput.json"
    first = begun(path, num_devices=2)
    clock.now += 50  # a checkpoint is saved after 30 s of training
    first.write()
    clock.now += 7  # killed without another report
    clock.now += 600  # in the queue
    clock.now += 10
    second = begun(path, seconds=30, tokens=300, num_devices=4)
    clock.now += 40

    results = second.results()
    assert losses_of(results) == {"start": 20, "repeated": 20, "queue": 607}
    assert results["training_seconds"] == 70
    assert results["wall_seconds"] == 70 + 20 + 20 + 607
    assert results["starts"] == 2
    assert results["device_hours"] == (2 * 60 + 4 * 50) / 3600


def test_time_after_the_end_of_a_run_made_longer_does_not_count(clock, tmp_path):
    path = tmp_path / "goodput.json"
    first = begun(path)
    clock.now += 50
    first.write(is_finished=True)
    clock.now += 1_000_000
    second = begun(path, seconds=50)
    clock.now += 40
    results = second.results()
    assert losses_of(results) == {"start": 20}
    assert (results["training_seconds"], results["wall_seconds"]) == (90, 110)


def test_a_branch_does_not_count_the_training_of_its_parent(clock, tmp_path):
    path = tmp_path / "goodput.json"
    first = begun(path, seconds=500, tokens=5000)
    clock.now += 20
    first.write()
    clock.now += 10
    second = begun(path, seconds=515, tokens=5150)
    clock.now += 5
    second.tokens = 5200

    results = second.results()
    assert results["training_seconds"] == 20
    assert losses_of(results) == {"start": 20, "repeated": 5}
    assert results["tokens_per_device_hour"] == pytest.approx(200 / results["device_hours"])


def test_going_back_to_a_checkpoint_within_a_start_repeats_steps_too(clock, tmp_path):
    account = begun(tmp_path / "goodput.json")
    clock.now += 30
    account.switch("start")
    clock.now += 2
    account.begin_training(seconds=10, tokens=100)
    clock.now += 20
    results = account.results()
    assert losses_of(results) == {"start": 12, "repeated": 20}
    assert results["training_seconds"] == 30


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"began": 1, "seconds": {"bed": 1}}', "\0"])
def test_a_damaged_account_begins_anew(content, clock, tmp_path):
    path = tmp_path / "goodput.json"
    path.write_text(content)
    account = begun(path, seconds=7, tokens=70)
    clock.now += 30
    account.write()
    results = json.loads(path.read_text())["results"]
    assert (results["starts"], results["training_seconds"]) == (1, 30)


def test_the_losses_are_described_the_largest_first(clock, tmp_path):
    account = begun(tmp_path / "goodput.json")
    clock.now += 7160
    with account.spent_on("saving"):
        clock.now += 30
    assert describe_goodput(account.results()) == "99.4% of 2 h (saving 0.4%, start 0.1%)"


def test_the_age_of_this_process_is_known():
    assert 0.0 < wall_time._process_age() < 1e6
