"""Where the wall time of a run went, over a start that is killed and the one that resumes it."""

import itertools
import json
import re
import time

import pytest

from llm.metrics.wall_time import describe_goodput
from tests.support.faults import Fault
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench, Run

TRAIN_STEP = "llm.trainers.gpt.loop:Trainer.train_step"
OPTIONS = {
    "max_train_steps": 10,
    "checkpointing_steps": 4,
    "async_checkpoint": False,
    "eval_steps": 5,
    "max_eval_steps": 2,
    "resume_from_checkpoint": True,
}
PARTS = ("start", "evaluation", "saving", "output", "repeated", "queue")


def check_sum(results: dict[str, float]) -> None:
    """Expect that training and losses, each measured apart, are the time of the day's clock."""
    losses = [results[f"lost_{part}_seconds"] for part in PARTS]
    total = results["training_seconds"] + sum(losses)
    assert total == pytest.approx(results["wall_seconds"], rel=0.01)
    assert results["goodput"] == results["training_seconds"] / results["wall_seconds"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> tuple[Run, float]:
    """A run that was killed in its eighth step and resumed from the fourth, and its seconds."""
    bench = Bench(tmp_path_factory.mktemp("bench"))
    started = time.time()
    slow = Fault(at=TRAIN_STEP, what="wait", call=0, amount=0.05)
    killed = bench.train(faults=[slow, Fault(at=TRAIN_STEP, what="SIGKILL", call=8)], **OPTIONS)
    assert killed.codes == [None]
    account = json.loads((killed.folder / "goodput.json").read_text(encoding="utf-8"))
    check_sum(account["results"])
    time.sleep(0.3)  # in the queue
    run = bench.train_well(faults=[slow], **OPTIONS)
    return run, time.time() - started


def test_the_parts_of_goodput_add_up_to_the_wall_time(resumed):
    run, elapsed_seconds = resumed
    results = run.read_json("all_results.json")
    check_sum(results)
    assert 0.3 < results["wall_seconds"] <= elapsed_seconds
    assert results["starts"] == 2
    assert results["lost_queue_seconds"] >= 0.3
    # Steps 5 to 7 were reported before the kill and trained again; each of them sleeps.
    assert results["lost_repeated_seconds"] >= 3 * 0.05
    assert results["training_seconds"] >= 10 * 0.05
    # The checkpoint has the same training time by its own clock.
    assert results["training_seconds"] == pytest.approx(results["seconds"], rel=0.05)
    assert results["lost_evaluation_seconds"] > 0 < results["lost_saving_seconds"]
    device_hours = (results["wall_seconds"] - results["lost_queue_seconds"]) / 3600
    assert results["device_hours"] == pytest.approx(device_hours, rel=0.01)
    tokens_per_hour = results["tokens"] / results["device_hours"]
    assert results["tokens_per_device_hour"] == pytest.approx(tokens_per_hour)


def test_the_card_and_the_report_say_the_same(resumed):
    from llm.tools.report.page import make_summary_rows
    from llm.tools.report.runs import read_runs

    run, _ = resumed
    words = describe_goodput(run.read_json("all_results.json"))
    card = (run.folder / "README.md").read_text(encoding="utf-8")
    assert f"| goodput | {words} |" in card
    assert "| device hours |" in card
    assert "lost" not in card

    [read], _ = read_runs([run.folder])
    rows = dict(make_summary_rows([read]))
    assert re.match(r'[\d.]+% <span class="details">of [\d.]+ s \(', rows["Goodput"][0])
    assert float(rows["Device hours"][0]) > 0


@pytest.mark.extended
def test_a_run_without_an_account_is_counted_from_its_resume(tmp_path):
    bench = Bench(tmp_path)
    stop = Fault(at=TRAIN_STEP, what="SIGTERM", call=4)
    run = bench.train(faults=[stop], **OPTIONS)
    assert run.codes == [75]
    (run.folder / "goodput.json").unlink()
    run = bench.train_well(**OPTIONS)
    results = run.read_json("all_results.json")
    check_sum(results)
    assert results["starts"] == 1
    assert results["training_seconds"] < results["seconds"]


def train_with_joules(argv: list[str]) -> int:
    """Train on a device that uses 10 joules from one reading of its counter to the next."""
    from llm.metrics.energy import EnergyCounter
    from llm.trainers.gpt import main

    readings = itertools.count(step=10.0)
    EnergyCounter.total_joules = lambda self: next(readings)
    return main.main(argv)


def test_results_card_and_report_show_the_energy(tmp_path):
    from llm.tools.report.page import make_summary_rows
    from llm.tools.report.runs import read_runs

    argv = Bench(tmp_path, lines=60).command("run", max_train_steps=4, logging_steps=2)
    assert values(run_ranks(train_with_joules, 1, argv)) == [0]

    folder = tmp_path / "run"
    results = json.loads((folder / "all_results.json").read_text())
    # Read at the start, after two intervals and the last save, and with the exported weights.
    assert results["energy_joules"] == 40.0
    assert results["tokens_per_joule"] == results["tokens"] / 40
    assert "| energy joules | 40 |" in (folder / "README.md").read_text()
    [run], _ = read_runs([folder])
    assert dict(make_summary_rows([run]))["Energy, joules"] == ["40"]
