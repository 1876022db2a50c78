"""The benchmark of experts trains every kind of balancing, and Hugging Face's Trainer."""

import pytest

from benchmarks.experts import ExpertsBenchmarkOptions, balancings, report
from benchmarks.report import run_benchmark
from tests.test_benchmarks import benchmark, rows_of


@pytest.mark.benchmarks
def test_kinds_of_balancing_are_compared_at_toy_size():
    done = benchmark(
        *("experts", "--steps", "40", "--seeds", "1", "--layers", "1", "--width", "32"),
        *("--experts", "4", "--block_size", "32", "--batch_size", "2"),
    )
    rows = {row[0].removeprefix("| "): row[1:] for row in rows_of(done.stdout) if len(row) == 6}
    trainer = ("HF Trainer, none", "HF Trainer, its loss")
    assert rows.keys() == {"balancing", *balancings(0.01), *trainer}
    for name in rows.keys() - {"balancing"}:
        loss, load, idle, speed, memory = (float(cell.strip(" |")) for cell in rows[name])
        assert 6 < loss < 7.2  # of about a thousand tokens
        assert 1 <= load <= 2  # of 4 experts, two for each token
        assert 0 <= idle < 3
        assert speed > 0
        assert memory > 100


def test_a_corpus_that_does_not_exist_is_refused(capsys):
    words = ["--corpus", "missing.txt"]
    assert run_benchmark("experts", "", ExpertsBenchmarkOptions, report, words) == 2
    assert "error: --corpus missing.txt is no file; name a text." in capsys.readouterr().err
