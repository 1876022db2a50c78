"""The ranks that keep the others waiting are named, and no others."""

import logging
import random

import pytest
import torch

from llm.metrics.rank_times import COMPUTE, DATA, SAVE, ComputeClock, RankTimes, SlowRanks

HOSTS = ["node1", "node1", "node2", "node2"]


def test_a_rank_is_named_once_when_it_is_slow_for_three_intervals():
    slow = SlowRanks(COMPUTE, 4)
    times = [0.100, 0.101, 0.125, 0.099]
    assert [slow.count_interval(times) for _ in range(5)] == [[], [], [2], [], []]


def test_a_rank_that_recovers_and_becomes_slow_again_is_named_again():
    slow = SlowRanks(COMPUTE, 2)
    intervals = [[0.3, 0.1]] * 3 + [[0.1, 0.1]] + [[0.3, 0.1]] * 3
    assert [slow.count_interval(times) for times in intervals] == [[], [], [0], [], [], [], [0]]


def test_a_rank_below_a_fifth_above_the_median_is_not_slow():
    slow = SlowRanks(COMPUTE, 4)
    assert [slow.count_interval([1.0, 1.0, 1.19, 1.0]) for _ in range(4)] == [[]] * 4


@pytest.mark.parametrize(("activity", "excess"), [(DATA, 0.009), (COMPUTE, 0.009), (SAVE, 0.9)])
def test_a_short_time_names_nobody_however_often_it_is_the_median(activity, excess):
    slow = SlowRanks(activity, 4)
    assert [slow.count_interval([0.001, 0.001 + excess, 0.001, 0.002]) for _ in range(9)] == [
        []
    ] * 9


def test_an_excess_that_hardly_lengthens_a_step_names_nobody():
    slow, times = SlowRanks(COMPUTE, 4), [0.1, 0.1, 0.14, 0.1]
    assert [slow.count_interval(times, min_excess=0.05) for _ in range(4)] == [[]] * 4
    assert [slow.count_interval(times, min_excess=0.03) for _ in range(3)] == [[], [], [2]]


def test_two_slow_ranks_are_named_the_slowest_first():
    slow = SlowRanks(DATA, 4)
    assert [slow.count_interval([0.0, 0.2, 0.0, 0.3]) for _ in range(3)] == [[], [], [3, 1]]


def test_another_rank_that_is_slow_in_each_interval_names_nobody():
    slow, draw = SlowRanks(COMPUTE, 4), random.Random(1)
    for interval in range(1000):
        times = [0.05 + draw.random() * 0.004 for _ in range(4)]
        times[interval % 4] += 0.2
        assert slow.count_interval(times) == []


def test_the_line_names_host_and_times_and_the_event_the_ranks(caplog):
    times = RankTimes(rank=0, hosts=HOSTS, compute_clock=None)
    with caplog.at_level(logging.INFO, logger="llm"):
        metrics = times.compare_saves([[1.0, 1.5, 12.0, 1.0]] * 3, step=7)
    [record] = caplog.records
    assert record.message == (
        "Writing a part of a checkpoint takes longer on rank 2 on node2 (12.0 s per save) than on "
        "the median rank (1000 ms per save), in 3 saves in a row."
    )
    values = {"kind": "slow", "step": 7, "activity": "save", "ranks": ["rank 2 on node2"]}
    assert record.event == values
    assert metrics == {"save_ms_median": 1000, "save_ms_slowest": 12000, "save_slowest_rank": 2}


def test_a_line_names_four_ranks_and_counts_the_others(caplog):
    hosts = [f"node{rank}" for rank in range(20)]
    times = RankTimes(rank=0, hosts=hosts, compute_clock=None)
    with caplog.at_level(logging.INFO, logger="llm"):
        times.compare_saves([[9.0] * 6 + [1.0] * 14] * 3, step=1)
    assert "rank 3 on node3 (9000 ms per save) and 2 other ranks than" in caplog.text
    assert "rank 4" not in caplog.text


def test_a_rank_that_writes_nothing_makes_no_other_rank_slow(caplog):
    times = RankTimes(rank=0, hosts=HOSTS, compute_clock=None)
    with caplog.at_level(logging.INFO, logger="llm"):
        metrics = times.compare_saves([[3.0, 0.0, 0.0, 0.0]] * 3, step=7)
    assert caplog.records == []
    assert metrics["save_ms_median"] == 3000


def test_other_ranks_than_0_report_nothing(caplog):
    times = RankTimes(rank=1, hosts=HOSTS, compute_clock=None)
    assert times.compare_saves([[1.0, 1.0, 9.0, 1.0]] * 3, step=1) == {}
    assert caplog.records == []


def test_the_clock_times_each_step_and_begins_again(monkeypatch):
    readings = iter([10.0, 10.5, 20.0, 20.25, 30.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    clock = ComputeClock(torch.device("cpu"))
    for steps in ([0.5, 0.25], [1.0], []):
        for _ in steps:
            clock.start()
            clock.stop()
        assert clock.pop_seconds() == steps
