"""The benchmark of experts trains every kind of balancing, and Hugging Face's Trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.experts import ExpertsBenchmarkOptions, balancings, report
from benchmarks.report import run_benchmark

ROOT = Path(__file__).parents[2]


@pytest.mark.benchmarks
def test_kinds_of_balancing_are_compared_at_toy_size():
    command = [
        *(sys.executable, "-m", "benchmarks.experts", "--steps", "40", "--seeds", "1"),
        *("--layers", "1", "--width", "32", "--experts", "4"),
        *("--block_size", "32", "--batch_size", "2"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = {cells[0].removeprefix("| "): cells[1:] for cells in lines if len(cells) == 6}
    loads_by_step = {name: rows.pop(name)[0] for name in ("step", "20", "40")}
    assert loads_by_step["step"] == next(iter(balancings(0.01)))
    assert all(1 <= float(loads_by_step[step].split()[0]) <= 2 for step in ("20", "40"))
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
    message = "error: --corpus missing.txt is not a file; give the path of a text."
    assert message in capsys.readouterr().err
