import errno
import io
import json
import logging
import math
import re
import sys
import threading
from collections.abc import Sequence

import pytest
import torch
from tqdm import tqdm

from llm.errors import ConfigError
from llm.metrics.meter import Meter
from llm.metrics.reporter import MetricsReporter, format_step_line
from tests.support.meters import all_reduce

CPU = torch.device("cpu")


def add(
    meter: Meter, loss_sum: float, num_tokens: int, *, norm: float = 1.0, step: int = 0
) -> None:
    meter.add(
        step,
        torch.tensor([loss_sum]),
        num_tokens,
        grad_norm=torch.tensor(norm),
        skipped=torch.tensor(0.0 if math.isfinite(norm) else 1.0),
    )


def alone(values: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks where there is one."""
    return values


def test_the_loss_of_an_interval_is_its_mean_per_token():
    meter = Meter(CPU, rank=0)
    add(meter, 10.0, 4)
    add(meter, 2.0, 2, norm=3.0)
    values = meter.read()
    assert values["loss"] == 2.0
    assert values["grad_norm"] == 3.0


def test_a_skipped_step_is_counted_and_excluded_from_the_loss():
    meter = Meter(CPU, rank=0)
    add(meter, 8.0, 4)
    add(meter, math.nan, 4, norm=math.nan)
    add(meter, 100.0, 4, norm=math.inf)
    meter.all_reduce(alone)
    values = meter.read()
    assert values["loss"] == 2.0
    assert (values["skipped_steps"], values["nan_steps"]) == (2, 1)


def test_every_step_is_returned_once_with_its_loss_and_if_it_was_skipped():
    meter = Meter(CPU, rank=0)
    for step, norm in enumerate([1.0, math.inf, 1.0, math.nan]):
        add(meter, 8.0 + step, 4, norm=norm, step=step)
    meter.all_reduce(alone)
    add(meter, 1.0, 4, step=4)  # no part of it yet

    steps = [(0, False, 2.0), (1, True, 2.25), (2, False, 2.5), (3, True, 2.75)]
    assert meter.pop_steps() == steps
    meter.all_reduce(alone)
    assert meter.pop_steps() == [(4, False, 0.25)]
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


def test_all_reduce_puts_the_sum_of_all_ranks_on_rank_0():
    first, second = Meter(CPU, rank=0), Meter(CPU, rank=1)
    add(first, 3.0, 4)
    add(second, 5.0, 4)
    all_reduce(first, second)
    assert (float(first.sums[0]), float(second.sums[0])) == (8.0, 0.0)
    assert first.read()["loss"] == 2.0


def test_a_step_skipped_by_one_rank_leaves_out_its_loss_and_counts_once():
    first, second = Meter(CPU, rank=0), Meter(CPU, rank=1)
    for meter, norm in ((first, 1.0), (second, math.inf)):
        add(meter, 6.0, 4, norm=2.0)
        add(meter, 3.0, 4, norm=norm, step=1)
    add(first, 6.0, 4, norm=2.0, step=2)
    add(second, 6.0, 4, norm=4.0, step=2)
    all_reduce(first, second)
    all_reduce(first, second)  # as where a step is both logged and saved
    steps = first.pop_steps()
    assert steps == second.pop_steps()
    assert [skipped for _, skipped, _ in steps] == [False, True, False]
    assert [loss for *_, loss in steps] == [(6 + 6) / 4, (3 + 3) / 4, (6 + 6) / 4]
    values = first.read()
    assert values["loss"] == (6 + 6 + 3 + 6 + 6) / (4 + 2 + 4)
    assert values["grad_norm"] == 3.0
    assert values["skipped_steps"] == 1


def test_an_open_interval_continues_after_a_resume():
    before, after = Meter(CPU, rank=0), Meter(CPU, rank=0)
    add(before, 0.1, 3)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for meter in (before, after):
        add(meter, 0.2, 3)
    assert before.read() == after.read()


def test_only_rank_0_loads_the_saved_loss():
    saved = Meter(CPU, rank=0)
    add(saved, 3.0, 4)
    second = Meter(CPU, rank=1)
    second.load_state_dict(saved.state_dict())
    assert not second.sums.any()
    assert float(second.num_tokens) == 4.0


def make_reporter(path, seen, *, peak_flops=1e15):
    return MetricsReporter(
        metrics_path=path,
        log_to_trackers=lambda values, step: seen.append((step, values)),
        device=CPU,
        total_steps=10,
        flops_per_token=1e6,
        find_peak_flops=lambda: peak_flops,
    )


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("not logged in")]
)
def test_trackers_that_cannot_write_are_left_out_and_metrics_continue(tmp_path, caplog, error):
    def fail(values, step):
        raise error

    reporter = make_reporter(tmp_path / "metrics.jsonl", [])
    reporter._log_to_trackers = fail
    reporter.start(step=0, tokens=0, seconds=0)
    for step in (1, 2):
        reporter.write({"loss": 1.0}, step=step)
    reporter.close()

    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert caplog.text.count("The trackers get no more points") == 1


class Terminal(io.StringIO):
    """A terminal that a user closes during the training."""

    is_open = True

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self.is_open:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return super().write(text)


def test_a_progress_bar_that_cannot_be_drawn_is_given_up(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    reporter = make_reporter(tmp_path / "metrics.jsonl", [])
    reporter.start(step=0, tokens=0, seconds=0)
    terminal.is_open = False

    reporter.advance_bar(10)
    log(reporter, 10)
    reporter.close()

    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [10]
    saving = threading.Thread(target=tqdm.write, args=("Saved.", io.StringIO()), daemon=True)
    saving.start()  # another thread can still log
    saving.join(10)
    assert not saving.is_alive()


def log(
    reporter: MetricsReporter,
    step: int,
    extension_values: Sequence[dict[str, float]] = (),
    **optimizer: torch.Tensor,
) -> None:
    reporter.log_training(
        {"loss": math.nan, "grad_norm": 1.0, "skipped_steps": 0.0, "nan_steps": 0.0},
        extension_values=extension_values,
        step=step,
        samples=8 * step,
        tokens=1000 * step,
        learning_rate=0.1,
        loss_scale=1.0,
        global_batch_size=8,
        optimizer=optimizer,
    )


@pytest.mark.parametrize("name", ["loss", "step", "samples", "memory", "mfu", "kfac_damping"])
def test_a_value_with_the_name_of_another_value_is_refused(name, tmp_path):
    reporter = make_reporter(tmp_path / "metrics.jsonl", [])
    reporter.start(step=0, tokens=0, seconds=0)
    with pytest.raises(ConfigError, match=rf"^An extension returns the value {name}, which"):
        log(reporter, 10, [{name: 0.5}], kfac_damping=torch.ones(()))
    with pytest.raises(ConfigError, match=r"^An extension returns the value penalty, which"):
        log(reporter, 10, [{"penalty": 0.5}, {"penalty": 0.5}])
    reporter.close()
    assert lines_of(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    ("value", "type_name"), [(torch.ones(()), "Tensor"), ("text", "str"), (None, "NoneType")]
)
def test_a_value_of_an_extension_that_is_not_a_number_is_refused(value, type_name, tmp_path):
    reporter = make_reporter(tmp_path / "metrics.jsonl", [])
    reporter.start(step=0, tokens=0, seconds=0)
    message = rf"^An extension returns a value penalty of the type {type_name}; let it return a num"
    with pytest.raises(ConfigError, match=message):
        log(reporter, 10, [{"penalty": value}])
    with pytest.raises(ConfigError, match=message):
        reporter.write_extension_values({"penalty": value}, step=10)
    reporter.close()
    assert lines_of(tmp_path / "metrics.jsonl") == []


def test_no_value_of_an_interval_is_written_by_other_work(tmp_path):
    reporter = make_reporter(tmp_path / "metrics.jsonl", [])
    reporter.start(step=0, tokens=0, seconds=0)
    log(reporter, 10)
    reporter.write_extension_values({"penalty": 0.5}, step=10)
    interval, work = lines_of(tmp_path / "metrics.jsonl")
    assert work == {"step": 10, "penalty": 0.5}
    for name in interval:
        with pytest.raises(ConfigError, match=f"the value {name}, which"):
            reporter.write_extension_values({name: 0.5}, step=10)
    reporter.close()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_and_evaluation_of_a_step_have_a_line_each(tmp_path):
    seen = []
    reporter = make_reporter(tmp_path / "metrics.jsonl", seen)
    reporter.start(step=0, tokens=0, seconds=5.0)
    log(reporter, 5, kfac_condition=torch.tensor(9.0))
    (training,) = lines_of(tmp_path / "metrics.jsonl")  # before it is known of an evaluation
    reporter.log_evaluation({"loss": 2.0, "perplexity": math.inf, "loss/wiki": 3.0}, step=5)
    reporter.close()

    assert lines_of(tmp_path / "metrics.jsonl") == [
        training,
        {"step": 5, "eval_loss": 2.0, "eval_perplexity": None, "eval_loss/wiki": 3.0},
    ]
    assert training["step"] == 5
    assert training["loss"] is None, "NaN is no JSON"
    assert training["kfac_condition"] == 9.0
    assert training["mfu"] == pytest.approx(training["tokens_per_second"] * 1e6 / 1e15)
    assert training["memory"] > 0
    assert training["seconds"] > 5.0
    (first, trained), second = seen[0], seen[1]
    assert (first, trained["train/learning_rate"], trained["kfac/condition"]) == (5, 0.1, 9.0)
    assert second == (5, {"eval/loss": 2.0, "eval/perplexity": math.inf, "eval/loss/wiki": 3.0})


def test_paused_time_is_not_training_time(tmp_path, monkeypatch):
    # Started; paused; paused to find the peak; reported at 140; paused for 10 s to write that.
    clock = iter([0.0, 10.0, 110.0, 115.0, 135.0, 140.0, 140.0, 150.0])
    monkeypatch.setattr("llm.metrics.reporter.time.perf_counter", lambda: next(clock, 170.0))
    reporter = make_reporter(tmp_path / "metrics.jsonl", [])
    reporter.start(step=0, tokens=0, seconds=5.0)
    with reporter.paused():
        pass
    log(reporter, 2)
    log(reporter, 3)
    first, second = lines_of(tmp_path / "metrics.jsonl")
    assert first["tokens_per_second"] == 2000 / 20
    assert first["ms_per_step"] == 10_000
    assert second["ms_per_step"] == 20_000


def test_a_step_that_is_faster_than_the_peak_has_no_mfu(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="llm")
    # Started; the peak looked for; reported after 2 s, 1 s and 4 s, each 1000 tokens a step later.
    clock = iter([0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 7.0])
    monkeypatch.setattr("llm.metrics.reporter.time.perf_counter", lambda: next(clock, 7.0))
    reporter = make_reporter(tmp_path / "metrics.jsonl", [], peak_flops=0.8e9)
    reporter.start(step=0, tokens=0, seconds=0.0)
    for step in (1, 2, 3):
        log(reporter, step)
    # 0.5, 1 and 0.25 GFLOP/s
    mfu = [line.get("mfu") for line in lines_of(tmp_path / "metrics.jsonl")]
    assert mfu == [0.5 / 0.8, None, 0.25 / 0.8]
    assert re.findall(r"MFU: [\d.%n/a]+", caplog.text) == ["MFU: 62.5%", "MFU: n/a", "MFU: 31.2%"]
    assert caplog.text.count("MFU is n/a where steps exceed the peak of 0.0008 TFLOP/s") == 1


RECORD = {
    "loss": 7.1709,
    "learning_rate": 7.2e-4,
    "tokens_per_second": 16_234.0,
    "mfu": 0.523,
    "ms_per_step": 61.9,
    "skipped_steps": 0,
}


def test_the_line_of_a_step_on_a_terminal_is_short():
    assert format_step_line(RECORD, step=25, total_steps=800) == (
        "step  25/800  loss 7.171  lr 7.2e-4  16.2k tok/s  MFU 52%  eta 0:48"
    )
    assert format_step_line(RECORD, step=25, total_steps=800, columns=["load 1.3x"]) == (
        "step  25/800  loss 7.171  lr 7.2e-4  16.2k tok/s  MFU 52%  load 1.3x  eta 0:48"
    )
    warm_up = {**RECORD, "learning_rate": 0.0, "tokens_per_second": 478.4, "skipped_steps": 2}
    del warm_up["mfu"]
    assert format_step_line(warm_up, step=12, total_steps=800) == (
        "step  12/800, 2 skipped  loss 7.171  lr 0  478 tok/s  eta 0:49"
    )


def test_the_line_of_the_longest_runs_has_at_most_100_columns():
    long = {**RECORD, "loss": 123.45678, "tokens_per_second": 1.234e8, "ms_per_step": 99_999.0}
    line = format_step_line({**long, "skipped_steps": 99}, step=100, total_steps=10_000_000)
    assert line == (
        "step      100/10000000, 99 skipped  loss 123.457  lr 7.2e-4  123.4M tok/s  MFU 52%  "
        "eta 11573d 20:13"
    )
    assert len(line) <= 100


def test_a_rate_never_shows_a_thousand_of_a_unit():
    rates = (999.4, 999.6, 16_234.0, 999_949.0, 999_951.0)
    lines = [
        format_step_line({**RECORD, "tokens_per_second": rate}, step=1, total_steps=2)
        for rate in rates
    ]
    words = [line.partition(" tok/s")[0].rpartition(" ")[2] for line in lines]
    assert words == ["999", "1.00k", "16.2k", "999.9k", "1.00M"]


def test_a_duration_is_in_minutes_hours_or_days():
    lines = [
        format_step_line({**RECORD, "ms_per_step": 1000.0}, step=0, total_steps=steps)
        for steps in (9, 600, 3723, 273_900)
    ]
    assert [line.rpartition("eta ")[2] for line in lines] == [
        "0:09",
        "10:00",
        "1:02:03",
        "3d 04:05",
    ]


def test_other_ranks_write_no_metrics(tmp_path):
    reporter = make_reporter(None, [])
    reporter.start(step=0, tokens=0, seconds=5.0)
    log(reporter, 1)
    assert list(tmp_path.iterdir()) == []


OLDER = [{"step": 2, "loss": 2.0}, {"step": 3, "loss": None, "kfac_condition": 9.0}]
EVALUATION = {"step": 3, "eval_loss": 7.0}
LATER = [{"step": 4, "loss": 1.5}, {"step": 4, "eval_loss": 6.0}]


@pytest.mark.parametrize(
    "reported",
    [OLDER, [*OLDER, EVALUATION]],
    ids=["not yet", "in a line"],
)
def test_an_evaluation_is_reported_once_however_often_it_is_made(tmp_path, reported):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in reported + LATER))
    seen = []
    reporter = make_reporter(path, seen)

    reporter.start(step=3, tokens=0, seconds=0.0)
    reporter.log_evaluation({"loss": 7.0}, step=3)
    reporter.log_evaluation({"loss": 1.25}, step=4)
    reporter.close()

    new = {"step": 4, "eval_loss": 1.25}
    assert lines_of(path) == [*(reported if reported != OLDER else [*OLDER, EVALUATION]), new]
    assert seen == [(3, {"eval/loss": 7.0}), (4, {"eval/loss": 1.25})][reported != OLDER :]


def test_values_are_written_once_beside_the_evaluation_of_their_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*OLDER, EVALUATION]))
    seen, values = [], {"task_cloze/acc": 0.5, "task_plays/bits": 2.0}
    for _ in range(2):  # the first start was killed before its checkpoint
        reporter = make_reporter(path, seen)
        reporter.start(step=3, tokens=0, seconds=0.0)
        reporter.write(values, step=3)
        reporter.close()

    assert lines_of(path) == [*OLDER, EVALUATION, {"step": 3} | values]
    assert seen == [(3, {"task/cloze/acc": 0.5, "task/plays/bits": 2.0})]
