import copy
import json
import math

import pytest
import torch

from llm.metrics.meter import Meter
from llm.metrics.tracker import Tracker

CPU = torch.device("cpu")


def add(
    meter: Meter, loss_sum: float, num_tokens: int, *, norm: float = 1.0, step: int = 0
) -> None:
    meter.add(
        step,
        torch.tensor(loss_sum),
        num_tokens,
        grad_norm=torch.tensor(norm),
        skipped=torch.tensor(0.0 if math.isfinite(norm) else 1.0),
    )


def alone(values: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks where there is one."""
    return values


def test_the_intervals_loss_is_the_sum_of_losses_over_the_number_of_tokens():
    meter = Meter(CPU, rank=0)
    add(meter, 10.0, 4)
    add(meter, 2.0, 2, norm=3.0)
    values = meter.read()
    assert values["loss"] == 2.0
    assert values["grad_norm"] == 3.0


def test_a_skipped_step_is_counted_and_takes_no_part_in_the_loss():
    meter = Meter(CPU, rank=0)
    add(meter, 8.0, 4)
    add(meter, math.nan, 4, norm=math.nan)
    add(meter, 100.0, 4, norm=math.inf)
    meter.all_reduce(alone)
    values = meter.read()
    assert values["loss"] == 2.0
    assert (values["skipped_steps"], values["nan_steps"]) == (2, 1)


def test_every_step_is_told_once_with_whether_it_was_skipped():
    meter = Meter(CPU, rank=0)
    for step, norm in enumerate([1.0, math.inf, 1.0, math.nan]):
        add(meter, 1.0, 1, norm=norm, step=step)

    meter.all_reduce(alone)
    assert meter.pop_steps() == [(0, False), (1, True), (2, False), (3, True)]
    add(meter, 1.0, 1, norm=math.inf, step=4)
    meter.all_reduce(alone)
    assert meter.pop_steps() == [(4, True)]
    assert meter.pop_steps() == []


def test_reading_starts_a_new_interval_and_keeps_the_counts_of_the_run():
    meter = Meter(CPU, rank=0)
    add(meter, 8.0, 4, norm=math.inf)
    meter.all_reduce(alone)
    meter.read()
    add(meter, 6.0, 2)
    meter.all_reduce(alone)
    values = meter.read()
    assert (values["loss"], values["skipped_steps"]) == (3.0, 1)


def fold_together(*meters: Meter) -> None:
    """Fold the meters of several ranks, as an all-reduce does."""
    given: list[torch.Tensor] = []
    for meter in meters:
        copy.deepcopy(meter).all_reduce(lambda values: given.append(values) or values)
    for meter in meters:
        meter.all_reduce(lambda values: torch.stack(given).sum(dim=0))


def test_folding_puts_the_sum_of_all_ranks_on_the_first():
    first, second = Meter(CPU, rank=0), Meter(CPU, rank=1)
    add(first, 3.0, 4)
    add(second, 5.0, 4)
    fold_together(first, second)
    assert (float(first.loss_sum), float(second.loss_sum)) == (8.0, 0.0)
    assert first.read()["loss"] == 2.0


def test_a_step_that_one_rank_skipped_loses_that_ranks_part_and_counts_as_skipped_on_all():
    first, second = Meter(CPU, rank=0), Meter(CPU, rank=1)
    for meter, norm in ((first, 1.0), (second, math.inf)):
        add(meter, 6.0, 4, norm=2.0)
        add(meter, 3.0, 4, norm=norm, step=1)
    add(first, 6.0, 4, norm=2.0, step=2)
    add(second, 6.0, 4, norm=4.0, step=2)
    fold_together(first, second)
    fold_together(first, second)  # as where a step is both logged and saved
    assert first.pop_steps() == second.pop_steps() == [(0, False), (1, True), (2, False)]
    values = first.read()
    assert values["loss"] == (6 + 6 + 3 + 6 + 6) / (4 + 2 + 4)
    assert values["grad_norm"] == 3.0
    assert values["skipped_steps"] == 1


def test_an_open_interval_goes_on_after_a_resume():
    before, after = Meter(CPU, rank=0), Meter(CPU, rank=0)
    add(before, 0.1, 3)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for meter in (before, after):
        add(meter, 0.2, 3)
    assert before.read() == after.read()


def test_only_the_first_rank_takes_over_the_saved_loss():
    saved = Meter(CPU, rank=0)
    add(saved, 3.0, 4)
    second = Meter(CPU, rank=1)
    second.load_state_dict(saved.state_dict())
    assert float(second.loss_sum) == 0.0
    assert float(second.num_tokens) == 4.0


def make_tracker(path, seen, *, peak_flops=1e15):
    return Tracker(
        metrics_path=path,
        log_to_trackers=lambda values, step: seen.append((step, values)),
        total_steps=10,
        flops_per_token=1e6,
        find_peak_flops=lambda: peak_flops,
        memory_in_use=lambda: 3 * 2**20,
    )


def log(tracker: Tracker, step: int) -> None:
    tracker.log_training(
        {"loss": math.nan, "grad_norm": 1.0, "skipped_steps": 0.0, "nan_steps": 0.0},
        step=step,
        samples=8 * step,
        tokens=1000 * step,
        learning_rate=0.1,
        loss_scale=1.0,
        global_batch_size=8,
    )


def test_a_step_has_one_line_whatever_was_reported_of_it(tmp_path):
    seen = []
    tracker = make_tracker(tmp_path / "metrics.jsonl", seen)
    tracker.start(step=0, tokens=0, seconds=5.0)
    log(tracker, 5)
    tracker.log_evaluation({"loss": 2.0, "perplexity": math.inf}, step=5)
    tracker.commit(5)
    tracker.commit(6)  # nothing was reported of this step
    tracker.close()

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["step"] == 5
    assert record["eval_loss"] == 2.0
    assert record["loss"] is None, "NaN is no JSON"
    assert record["eval_perplexity"] is None
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * 1e6 / 1e15)
    assert record["memory"] == 3 * 2**20
    assert record["seconds"] > 5.0
    assert [set(values) & {"train/loss", "eval/loss"} for _, values in seen] == [
        {"train/loss"},
        {"eval/loss"},
    ]


def test_what_happens_while_paused_is_no_training_time(tmp_path, monkeypatch):
    # Begun; paused; paused once more, to find the peak; reported.
    clock = iter([0.0, 10.0, 110.0, 115.0, 135.0, 140.0])
    monkeypatch.setattr("llm.metrics.tracker.time.perf_counter", lambda: next(clock))
    tracker = make_tracker(tmp_path / "metrics.jsonl", [])
    tracker.start(step=0, tokens=0, seconds=5.0)
    with tracker.paused():
        pass
    log(tracker, 2)
    tracker.commit(2)
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["tokens_per_second"] == 2000 / 20
    assert record["ms_per_step"] == 10_000


def test_a_step_that_is_faster_than_the_peak_raises_it(tmp_path, monkeypatch):
    # Begun; the peak looked for; reported after 2 s, 1 s and 4 s, each 1000 tokens a step later.
    clock = iter([0.0, 0.0, 0.0, 2.0, 3.0, 7.0])
    monkeypatch.setattr("llm.metrics.tracker.time.perf_counter", lambda: next(clock))
    tracker = make_tracker(tmp_path / "metrics.jsonl", [], peak_flops=0.8e9)
    tracker.start(step=0, tokens=0, seconds=0.0)
    for step in (1, 2, 3):
        log(tracker, step)
        tracker.commit(step)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    # 0.5, 1 and 0.25 GFLOP/s; the second is the new peak.
    assert [json.loads(line)["mfu"] for line in lines] == [0.5 / 0.8, 1.0, 0.25]


def test_another_rank_writes_nothing(tmp_path):
    tracker = make_tracker(None, [])
    tracker.start(step=0, tokens=0, seconds=5.0)
    log(tracker, 1)
    tracker.commit(1)
    assert list(tmp_path.iterdir()) == []


LINES = (
    '{"step": 2, "loss": 2.0}\n{"step": 3, "loss": null, "kfac_condition": 9.0, "eval_loss": 7.0}\n'
)


def test_an_evaluation_that_is_made_up_for_joins_the_line_of_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINES)
    seen = []
    tracker = make_tracker(path, seen)

    tracker.resume(3, evaluates=True)
    tracker.log_evaluation({"loss": 1.5}, step=3)
    tracker.commit(3)
    tracker.log_evaluation({"loss": 1.25}, step=4)
    tracker.commit(4)
    tracker.close()

    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": None, "kfac_condition": 9.0, "eval_loss": 1.5},
        {"step": 4, "eval_loss": 1.25},
    ]
    told = [(step, name) for step, values in seen for name in values]
    assert told == [
        (3, "train/loss"), (3, "kfac/condition"), (3, "eval/loss"), (4, "eval/loss"),
    ]  # fmt: skip


def test_what_was_reported_of_the_step_to_go_on_from_is_told_again_and_written_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINES)
    seen = []
    tracker = make_tracker(path, seen)

    tracker.resume(3, evaluates=False)
    tracker.commit(3)
    tracker.close()

    assert path.read_text() == LINES
    told = {name: value for _, values in seen for name, value in values.items()}
    assert math.isnan(told.pop("train/loss"))
    assert told == {"kfac/condition": 9.0, "eval/loss": 7.0}


def test_a_step_of_which_nothing_was_reported_is_not_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINES)
    seen = []
    tracker = make_tracker(path, seen)
    tracker.resume(4, evaluates=False)
    tracker.close()
    assert seen == []
