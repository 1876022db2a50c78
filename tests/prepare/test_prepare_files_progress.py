import logging
import re

import pytest

from llm.prepare import preparation_log
from llm.prepare.tokenize_shards import Totals


@pytest.fixture(autouse=True)
def all_levels(caplog):
    caplog.set_level(logging.INFO, "llm.data")


def logged(monkeypatch, caplog, totals, seconds):
    monkeypatch.setattr(preparation_log.time, "monotonic", lambda: 100.0)
    report = preparation_log.make_progress_logger(10.0)
    monkeypatch.setattr(preparation_log.time, "monotonic", lambda: 100.0 + seconds)
    report(totals)
    return caplog.messages


def test_a_progress_line_shows_speed_percentage_and_time_left(monkeypatch, caplog):
    totals = Totals(
        texts=40_000,
        tokens=50_000_000,
        text_bytes=200_000_000,
        consumed=250_000_000,
        num_bytes=1_000_000_000,
    )

    assert logged(monkeypatch, caplog, totals, 20.0) == [
        "40,000 documents | 200.0 MB | 2,000 documents/s | 10.0 MB/s | 2,500,000 tokens/s | "
        "25.0% done | 0:01:00 left"
    ]


def test_progress_counts_shards_if_the_size_is_unknown(monkeypatch, caplog):
    totals = Totals(texts=10, tokens=20, text_bytes=30, shards_done=3, num_shards=1000)

    (line,) = logged(monkeypatch, caplog, totals, 10.0)

    assert line.endswith("2 tokens/s | 3 of 1,000 shards done")


def test_progress_starts_at_0_and_is_logged_at_most_once_per_interval(monkeypatch, caplog):
    assert logged(monkeypatch, caplog, Totals(num_bytes=100), 9.0) == []
    (line,) = logged(monkeypatch, caplog, Totals(num_bytes=100), 10.0)
    assert re.search(r"0 tokens/s \| 0\.0% done$", line)


def test_progress_never_exceeds_100_percent(monkeypatch, caplog):
    totals = Totals(texts=1, tokens=1, text_bytes=1, consumed=120, num_bytes=100)

    assert logged(monkeypatch, caplog, totals, 7200.0)[0].endswith("100.0% done | 0:00:00 left")
