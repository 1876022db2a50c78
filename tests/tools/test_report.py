import json
import math
import os
import re
import subprocess
import sys
import warnings

import pytest

from llm.tools.report.page import make_page
from llm.tools.report.panels import MAX_POINTS, make_panels
from llm.tools.report.report import main
from llm.tools.report.runs import read_runs
from tests.support.checkpoints import filled, save, saver_of
from tests.support.report_pages import (
    CHROMIUM,
    Reader,
    Undrawn,
    evaluation,
    report,
    write_run,
)

START = {"total_steps": 1200, "architecture": "gpt2", "parameters": 1071872, "device": "cuda"}
# The first start was stopped after step 45; the second goes on from the checkpoint of step 20.
EVENTS = [
    {"event": "start", "step": 0, "ranks": 4, "mixed_precision": "bf16", **START},
    {"event": "save", "step": 20},
    {"event": "skip", "step": 25, "first_sample": 192, "last_sample": 199},
    {"event": "save", "step": 40},
    {"event": "stop", "step": 45, "status": "preempted", "reason": "SIGTERM"},
    {"event": "start", "step": 20, "ranks": 8, "mixed_precision": "bf16", **START},
    {"event": "resume", "step": 20},
    {"event": "evaluation", "step": 40, "loss": 7.1},
    {"event": "save", "step": 40},
]


@pytest.fixture
def run(tmp_path):
    """A run that has reported every 10 of its first 60 steps, and was evaluated thrice."""
    losses = {20: 7.5, 40: 7.1, 60: 7.2}
    records = [
        report(step, **(evaluation(losses[step]) if step in losses else {}))
        for step in range(10, 61, 10)
    ]
    config = 'model_name_or_path = "tiny"\nlearning_rate = 0.001\nbetas = [0.9, 0.95]\n'
    return write_run(tmp_path / "first", records, config=config, events=EVENTS, status="running")


def runs_of(*folders):
    runs, problems = read_runs(folders)
    assert problems == []
    return runs


def text_of(*folders) -> str:
    """The words of a page without its charts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm.tools.report.page.Charts", Undrawn)
        return Reader(make_page(runs_of(*folders), None, x="step")).text


def page_of(*words: object) -> str:
    assert main([str(word) for word in words]) == 0
    output = (
        words[words.index("--output") + 1] if "--output" in words else f"{words[0]}/report.html"
    )
    with open(str(output), encoding="utf-8") as file:
        return file.read()


def points_of(run, panel):
    """The points of a panel's first curve, as lists."""
    points = panels_of(run)[panel].curves[0].points
    return {name: values.tolist() for name, values in points.items()}


def panels_of(*folders):
    return {panel.name: panel for panel in make_panels(runs_of(*folders))}


def test_the_page_replaces_an_earlier_page_and_no_other_file(run, capsys):
    assert main([str(run)]) == main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n" * 2
    assert "first: training report" in (run / "report.html").read_text()

    metrics = (run / "metrics.jsonl").read_bytes()
    assert main([str(run), "--output", str(run / "metrics.jsonl")]) == 2
    assert (
        "metrics.jsonl exists and was not written by llm-trainers report" in capsys.readouterr().err
    )
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_the_page_needs_nothing_but_itself(run):
    page = page_of(run)
    assert Reader(page).links == []
    assert "@import" not in page


def test_the_summary_says_how_the_run_stands(run):
    text = text_of(run)
    assert re.search(r"Status running last sign \d+ s ago", text)
    assert "Model tiny, gpt2" in text
    assert "Parameters 1.07M" in text
    assert "Devices 8 x cuda, bf16" in text
    assert "Steps 60 of 1,200" in text
    assert "Tokens 6,000" in text
    assert "Training time 30 s" in text
    assert "Tokens/s, mean 200" in text
    assert "Training loss, last 7.4000" in text
    assert "Validation loss, last 7.2000" in text
    assert "Validation loss, best 7.1000 step 40" in text


def test_the_summary_shows_the_active_parameters_and_experts_of_a_mixture(tmp_path):
    sizes = {"parameters": 30_500_000_000, "active_parameters": 3_300_000_000}
    experts = {"experts": "48 layers of 128, 8 per token"}
    start = {"event": "start", "step": 0, **START, **sizes, **experts}
    text = text_of(write_run(tmp_path / "mixture", [report(10)], events=[start]))
    assert "Parameters 30.5B 3.3B active Experts 48 layers of 128, 8 per token" in text


def test_the_summary_shows_why_a_run_failed_even_before_its_first_step(tmp_path):
    run = write_run(tmp_path / "a", [], status="failed", reason="DataError: <no> text")
    (run / "metrics.jsonl").unlink()
    text = text_of(run)
    assert "a failed: DataError: <no> text" in text
    assert "No step has been reported yet." in text


def test_a_run_that_has_been_silent_for_hours_may_be_dead(run):
    for file in ("metrics.jsonl", "status.json"):
        os.utime(run / file, (1_000_000_000, 1_000_000_000))
    assert "it may have been killed" in text_of(run)


def test_a_half_written_last_line_is_ignored(run):
    (whole,) = runs_of(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "loss": 7')
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-11-20T10')
    assert runs_of(run) == [whole]
    assert "could not be read" not in text_of(run)


def test_lines_of_a_step_are_read_together(run):
    (joined,) = runs_of(run)
    parts = []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        evaluated = {key: value for key, value in line.items() if key.startswith("eval_")}
        parts.append({key: value for key, value in line.items() if key not in evaluated})
        parts += [{"step": line["step"], **evaluated}] if evaluated else []
    assert len(parts) == len(joined.rows) + 3
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in parts))
    assert runs_of(run) == [joined]


def test_a_broken_line_in_the_middle_is_reported(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1:3] = ['{"step": null, "loss": 1.0}', '{"step": 30, "lo']
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "2 lines of first/metrics.jsonl could not be read." in text_of(run)


DEEP = '{"a": ' + "[" * 100_000
HUGE = 10**400
# Contents that no run writes, in the place of its files.
ODD_FILES = {
    "binary": b"\x00\xff\xfe" * 99,
    "nested deeply": DEEP.encode(),
    "nested, but readable": b"a = " + b"[" * 900 + b"]" * 900,
    "a number of 5,000 digits": b'{"step": ' + b"9" * 5000 + b"}",
    "a list": b"[1, 2]\n[3]\n",
}
ODD_VALUES = [None, True, "\ud800 $_$", -1, HUGE, 1e308, math.inf, [], {"a": [1]}]


@pytest.fixture
def strict_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("strict_warnings")
@pytest.mark.parametrize("content", [*ODD_FILES.values(), None], ids=[*ODD_FILES, "a folder"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.toml", "status.json"])
def test_a_run_is_shown_without_a_file_that_cannot_be_read(run, name, content):
    (run / name).unlink(missing_ok=True)
    if content is None:
        (run / name).mkdir()
    else:
        (run / name).write_bytes(content)

    assert "first" in text_of(run)


@pytest.mark.usefixtures("strict_warnings")
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: str(value)[:9])
def test_a_value_of_another_kind_than_a_run_writes_is_left_out(tmp_path, value):
    lines = [
        {**EVENTS[0], "block_size": 25, "global_batch_size": 4},
        {"event": "spike", "step": 20, "loss": 9.0, "first_sample": 1, "last_sample": 2},
        *EVENTS,
    ]
    events = [{**line, key: value} for line in lines for key in line]
    records = [report(1), *[{**report(2), key: value} for key in report(2)], report(3)]
    tables = [
        f"{key} = {json.dumps(value)}\n"
        for key in ("branch_from", "cooldown_tokens", "model_name_or_path", "data_stage")
        if value is not None
    ]
    runs = [
        write_run(
            tmp_path / f"run{number}",
            records,
            events=events,
            config=table,
            status=value,
            step=value,
        )
        for number, table in enumerate(tables or [""])
    ]

    assert "run0" in text_of(*runs)
    assert points_of(runs[0], "loss")["y"][0] == 7.99


@pytest.mark.usefixtures("strict_warnings")
def test_the_values_of_an_odd_run_are_drawn(tmp_path):
    records = [
        report(1),
        report(2, tokens=1e308, loss=-1e308, **{"$_$\ud800/é" * 9: 2.0}),
        report(3),
    ]
    odd = write_run(tmp_path / os.fsdecode(b"\xff $_$"), records, status="\ud800", reason="\ud800")

    assert main([str(odd), "--png", str(tmp_path / "png")]) == 0

    assert (tmp_path / "png/loss.png").is_file()
    Reader((odd / "report.html").read_text(encoding="utf-8"))


def test_runs_are_shown_without_a_folder_that_cannot_be_read(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (run / "config.toml").write_bytes(b"\xff")
    bad = [tmp_path / name for name in ("empty", "file", "loop")]

    assert main([*map(str, bad), str(run)]) == 1

    printed = capsys.readouterr()
    assert printed.out == f"{run / 'report.html'}\n"
    assert printed.err == (
        "left out: first/config.toml could not be read.\n"
        f"left out: {bad[0]} holds no run: none of config.toml, status.json, metrics.jsonl is in "
        "it.\n"
        f"left out: {bad[1]} is not a folder; name the folder of a run (its --output_dir).\n"
        f"left out: {bad[2]} is not a folder; name the folder of a run (its --output_dir).\n"
    )
    assert main([*map(str, bad)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "record",
    [{"run": 1, "steps": [1]}, {"run": "a", "steps": []}, {"run": "a", "steps": [HUGE]}, [1], 2],
    ids=str,
)
def test_the_record_of_a_mean_must_name_a_run_and_steps(tmp_path, capsys, record):
    (tmp_path / "mean.json").write_text(json.dumps(record))

    assert main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_curves_have_the_numbers_of_the_metrics_on_all_axes(run):
    assert points_of(run, "validation_loss") == {
        "step": [20.0, 40.0, 60.0],
        "tokens": [2000.0, 4000.0, 6000.0],
        "seconds": [10.0, 20.0, 30.0],
        "y": [7.5, 7.1, 7.2],
    }


@pytest.mark.parametrize(("step", "tokens", "seconds"), [(15, 1500.0, 7.5), (24, 2400.0, 12.0)])
def test_an_evaluation_alone_has_its_place_between_or_beyond_the_reports(
    tmp_path, step, tokens, seconds
):
    run = write_run(tmp_path / "a", [report(10), {"step": step, **evaluation(7.0)}, report(20)])
    points = points_of(run, "validation_loss")
    assert points == {"step": [step], "tokens": [tokens], "seconds": [seconds], "y": [7.0]}


def test_a_number_that_is_not_finite_breaks_the_curve(tmp_path):
    records = [report(1), report(2, loss=None), report(3)]
    losses = points_of(write_run(tmp_path / "a", records), "loss")["y"]
    assert [losses[0], losses[2]] == [7.99, 7.97]
    assert math.isnan(losses[1])


def test_fractions_are_shown_in_percent_and_bytes_in_gib(tmp_path):
    run = write_run(tmp_path / "a", [report(1, mfu=0.4, peak_memory=3 * 2**30)])
    panels = panels_of(run)
    assert panels["data_wait"].curves[0].points["y"] == [25.0]
    assert panels["mfu"].curves[0].points["y"] == [40.0]
    assert panels["peak_memory"].curves[0].points["y"] == [3.0]
    assert panels["peak_memory"].unit == "GiB"


def test_metrics_without_a_separate_panel_are_shown_all_the_same(tmp_path):
    record = report(1, **{"eval_accuracy": 0.5, "eval_loss/books": 7.0, "weight_norm": 3.0})
    titles = [panel.title for panel in panels_of(write_run(tmp_path / "a", [record])).values()]
    assert "Validation accuracy" in titles
    assert "Validation loss, books" in titles
    assert titles[-1] == "weight norm"


def test_tasks_have_a_separate_section(tmp_path):
    record = report(1, **{"task_shakespeare_cloze/acc": 0.4})
    panels = panels_of(write_run(tmp_path / "run", [record]))

    panel = panels["task_shakespeare_cloze_acc"]
    assert (panel.section, panel.title) == ("Tasks", "shakespeare_cloze: acc")


def test_a_set_of_tasks_has_one_number_in_the_summary_and_in_the_charts(tmp_path):
    record = {
        "task_core/centered_accuracy": 0.125,
        "task_core/arc_easy": 0.5,
        "task_arc_easy/acc": 1,
    }
    run = write_run(tmp_path / "run", [report(1, **record)])

    assert "core: centered accuracy 0.1250" in text_of(run)
    titles = [panel.title for panel in panels_of(run).values() if panel.section == "Tasks"]
    assert titles == ["core: centered accuracy", "arc_easy: acc"]


def test_a_constant_metric_has_no_panel(run, tmp_path):
    assert not {"loss_scale", "skipped_steps"} & panels_of(run).keys()
    records = [report(1, loss_scale=2.0, skipped_steps=1)]
    assert {"loss_scale", "skipped_steps"} <= panels_of(write_run(tmp_path / "a", records)).keys()


@pytest.mark.parametrize(("num_reports", "shown"), [(10, False), (100, True)])
def test_a_run_of_many_reports_shows_the_second_half_of_its_loss_apart(
    tmp_path, num_reports, shown
):
    run = write_run(tmp_path / "a", [report(step) for step in range(1, num_reports + 1)])
    assert ("loss_second_half" in panels_of(run)) == shown


def test_only_what_spans_a_wide_range_has_a_logarithmic_axis(tmp_path):
    flat = write_run(tmp_path / "flat", [report(1), report(2)])
    steep = write_run(tmp_path / "steep", [report(1), report(2, grad_norm=100.0)])
    assert not panels_of(flat)["grad_norm"].log
    assert panels_of(steep)["grad_norm"].log
    assert not panels_of(steep)["loss"].log


def test_long_runs_are_thinned_to_means_with_the_range_beside_them(tmp_path):
    records = [report(step, loss=float(step % 2)) for step in range(1, 5001)]
    records[3]["loss"] = None
    run = write_run(tmp_path / "a", records)
    points = points_of(run, "loss")
    assert len(points["y"]) == 1667 <= MAX_POINTS  # of 3 reports each
    assert points["y"][:3] == pytest.approx([2 / 3, 1 / 2, 2 / 3])
    assert points["step"][:2] == [2.0, 5.0]
    assert set(points["low"][:-1]) == {0.0}
    assert set(points["high"][:-1]) == {1.0}
    assert "more than 2,000 reports, a point is the mean of several" in text_of(run)


def test_events_undone_by_a_resume_are_listed_but_not_marked_on_the_curves(run):
    (read,) = runs_of(run)
    assert [(event.kind, event.step, event.is_current) for event in read.events] == [
        ("start", 0, True),
        ("save", 20, True),
        ("skip", 25, False),
        ("save", 40, False),
        ("stop", 45, False),
        ("start", 20, True),
        ("resume", 20, True),
        ("save", 40, True),
        ("best", 40, True),
    ]
    text = text_of(run)
    assert "9 events" in text
    assert (
        "25 skipped: its gradient is not finite (samples 192 to 199); taken back by a resume "
        "2026-11-20 10:00:00" in text
    )
    assert "45 preempted: SIGTERM" in text
    assert "40 saved; removed since 2026-11-20 10:00:00" in text
    assert "✕ step skipped" not in text


def test_a_finished_run_has_no_stop_mark_and_a_failed_one_needs_no_step(tmp_path):
    events = [
        {"event": "stop", "step": None, "status": "failed", "reason": "DataError: no text"},
        {"event": "stop", "step": 10, "status": "finished", "reason": None},
    ]
    run = write_run(tmp_path / "a", [report(10)], events=events)
    text = text_of(run)
    assert "10 finished: all steps are done" in text
    assert "- failed: DataError: no text" in text
    assert [event.kind for event in runs_of(run)[0].events] == ["stop", "finish"]


def test_checkpoints_are_events_in_runs_that_are_older_than_events_jsonl(run):
    (run / "events.jsonl").unlink()
    saver = saver_of(run / "checkpoints", filled(1.0), keep_checkpoints=2)
    for step in (30, 50):
        saver.save(step=step, eval_loss=None)
    saver.finish()
    events = runs_of(run)[0].events
    assert [(event.kind, event.step) for event in events] == [
        ("save", 30),
        ("save", 50),
        ("best", 40),
    ]
    assert "Steps 60 Tokens 6,000" in text_of(run)


def test_the_page_explains_the_marks_that_it_has(run):
    legend = text_of(run).partition(" Loss nats per token")[0]
    assert legend.endswith(
        "training validation | checkpoint saved ▶ resumed ★ lowest validation loss"
    )


def test_several_runs_are_overlaid_and_their_differences_listed(run, tmp_path):
    config = 'model_name_or_path = "tiny"\nlearning_rate = 0.002\nseed = 5\nbetas = [0.9, 0.95]\n'
    second = write_run(tmp_path / "second", [report(10), report(20)], config=config)

    page = page_of(run, second, "--output", tmp_path / "both.html")

    curves = panels_of(run, second)["loss"].curves
    assert [(curve.run, curve.key) for curve in curves] == [
        (0, "loss"),
        (1, "loss"),
        (0, "eval_loss"),
    ]
    text = Reader(page).text
    different = text.partition("Differences in configuration")[2].partition("All ")[0]
    assert "learning_rate 0.001 0.002" in different
    assert "seed not set 5" in different
    assert "betas" not in different
    assert "model_name_or_path" not in different


STAGES = """
global_batch_size = "4@0,8@1000"

[[data_stage]]
until = 3_000
data_path = ["data/web"]

[[data_stage]]
data_path = [0.5, "data/web", 0.5, "data/books"]
"""


def write_family(folder):
    """A run of 25 tokens a sample, its branch from step 20, and the mean of three checkpoints.

    Steps 1 to 10 take 4 samples, 100 tokens, the others 8; the second stage begins in step 20.
    """
    first = {"event": "start", "step": 0, "ranks": 1, "block_size": 25, **START}
    first |= {"global_batch_size": "4@0,8@1000"}
    records = [
        report(step, tokens=100 * step + 100 * max(0, step - 10), **{"eval_ema_loss": 7.0})
        for step in range(5, 41, 5)
    ]
    stable = write_run(folder / "stable", records, events=[first], config=STAGES)
    checkpoint = stable.resolve() / "checkpoints/step_00000020"
    config = f'branch_from = "{checkpoint}"\ncooldown_tokens = 2000\ncooldown_shape = "sqrt"\n'
    branch = {"event": "branch", "step": 20, "checkpoint": str(checkpoint)}
    cooled = write_run(
        folder / "cooled",
        [report(25, loss=6.0, tokens=4000), report(30, loss=5.5, tokens=5000)],
        events=[{**first, "step": 20}, branch],
        config=config + STAGES,
    )
    mean = folder / "mean"
    mean.mkdir()
    record = {"run": str(stable.resolve()), "steps": [30, 35, 40]}
    (mean / "mean.json").write_text(json.dumps(record))
    results = {"loss": 6.9, "perplexity": 992.0, "task_cloze/acc": 0.5}
    (mean / "eval_results.json").write_text(json.dumps(results))
    return stable, cooled, mean


def planned(run):
    kinds = ("stage", "batch", "branch", "cooldown", "mean")
    return [(event.kind, event.step) for event in run.events if event.kind in kinds]


def test_a_family_has_marks_where_stages_batches_and_cooldowns_begin(tmp_path):
    family = write_family(tmp_path)
    stable, cooled, mean = runs_of(*family)
    assert planned(stable) == [("batch", 10), ("stage", 20)]
    assert planned(cooled) == [("branch", 20), ("cooldown", 20)]
    assert planned(mean) == [("mean", 40)]
    text = text_of(*family)
    for words in (
        "20 data stage 2: 0.5 web 0.5 books",
        "10 the batch grows to 8 samples",
        "20 the cooldown begins, of 2,000 tokens",
        "40 the mean of the checkpoints of steps 30, 35, 40",
        "◧ next stage of the data ● larger batch ↳ branched off ↘ cooldown begins ◆ mean of",
    ):
        assert words in text


def test_the_summary_names_the_parents_of_a_branch_and_of_a_mean(tmp_path):
    text = text_of(*write_family(tmp_path))
    assert (
        "Made of - branch of stable step 20 , cooldown of 2k tokens (sqrt) "
        "mean of stable 3 checkpoints, steps 30 to 40" in text
    )
    assert "Moving average, last 7.0000 - -" in text


def test_a_branch_continues_where_it_left_its_parents_curve(tmp_path):
    stable, cooled, _ = write_family(tmp_path)
    curve = panels_of(stable, cooled)["loss"].curves[1]
    assert (curve.run, curve.key) == (1, "loss")
    assert curve.points["step"].tolist() == [20, 25, 30]
    assert curve.points["tokens"].tolist() == [3000, 4000, 5000]
    assert curve.points["y"].tolist() == [7.8, 6.0, 5.5]
    assert points_of(cooled, "loss")["step"] == [25, 30]  # alone
    speed = panels_of(stable, cooled)["throughput"].curves[1]
    assert speed.points["step"].tolist() == [25, 30]  # on devices of its own
    assert runs_of(stable, cooled)[1].position_at(20) == {"step": 20, "tokens": 3000, "seconds": 10}


def test_a_branch_of_a_cooled_branch_has_no_cooldown_of_its_own_to_mark(tmp_path):
    config = 'branch_from = "/runs/cooled/checkpoints/step_00000025"\ncooldown_tokens = 2000\n'
    run = write_run(tmp_path / "again", [report(30)], config=config)
    assert planned(runs_of(run)[0]) == [("cooldown", 25)]
    save(run / "checkpoints", 30, branch={"parent": "", "step": 25, "cooldown_from": 15})
    assert planned(runs_of(run)[0]) == []


def test_the_mean_of_checkpoints_is_a_point_at_the_last_of_them(tmp_path):
    stable, _, mean = write_family(tmp_path)
    (curve,) = (c for c in panels_of(stable, mean)["validation_loss"].curves if c.run == 1)
    points = {name: values.tolist() for name, values in curve.points.items()}
    assert points == {"step": [40], "tokens": [7000], "seconds": [20], "y": [6.9]}
    assert "task_cloze_acc" in panels_of(mean)
    alone = points_of(mean, "validation_loss")
    assert math.isnan(alone["tokens"][0])
    assert "Validation loss, last 6.9000" in text_of(mean)


def test_a_family_that_was_moved_together_is_still_one(tmp_path):
    stable, cooled, mean = write_family(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    folders = (stable, cooled, mean)
    moved = [folder.rename(tmp_path / "elsewhere" / folder.name) for folder in folders]
    assert len(panels_of(*moved)["loss"].curves[1].points["step"]) == 3


def test_the_moving_average_is_shown_beside_the_loss_of_the_weights(tmp_path):
    record = report(1, **evaluation(7.0), eval_ema_loss=6.5, eval_ema_perplexity=665.0)
    run = write_run(tmp_path / "a", [record | {"eval_loss/web": 7.1, "eval_ema_loss/web": 6.6}])
    panels = panels_of(run)
    keys = {name: [curve.key for curve in panel.curves] for name, panel in panels.items()}
    assert keys["loss"] == ["loss", "eval_loss", "eval_ema_loss"]
    assert keys["validation_loss"] == ["eval_loss", "eval_ema_loss"]
    assert keys["eval_loss_web"] == ["eval_loss/web", "eval_ema_loss/web"]
    assert "training validation validation, moving average" in text_of(run)


def test_many_runs_have_a_row_each(tmp_path):
    folders = [write_run(tmp_path / f"run{number}", [report(number)]) for number in range(1, 11)]
    text = text_of(*folders)
    assert "10 runs Training report" in text
    assert "run3 3 300 1.5 s" in text


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    folders = [write_run(tmp_path / name / "run", [report(1)]) for name in ("a", "b")]
    assert [run.name for run in runs_of(*folders)] == [str(folder) for folder in folders]


def test_names_cannot_break_the_page(tmp_path):
    name = 'a<script>"&amp;'
    records = [report(1, **{"eval_loss/</script><b>": 7.0})]
    run = write_run(tmp_path / name, records, config="tokenizer_name = '<i>'\n")
    page = page_of(run)
    assert page.count(f"<b>{name}") == page.count("<i>") == 0
    assert name in Reader(page).text


def test_the_x_axis_that_is_asked_for_is_chosen(run):
    assert 'id="x-step" value="step" checked' in page_of(run)
    assert 'id="x-seconds" value="seconds" checked' in page_of(run, "--x", "time")


def test_images_are_png_files_of_every_panel(run, tmp_path, capsys):
    assert main([str(run), "--png", str(tmp_path / "png")]) == 0
    images = sorted((tmp_path / "png").iterdir())
    assert [image.stem for image in images] == sorted(panels_of(run))
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)
    assert str(images[0]) in capsys.readouterr().out


def test_a_missing_package_is_named_with_its_pip_line(run, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "llm.tools.report.page", raising=False)
    monkeypatch.setitem(sys.modules, "bokeh.resources", None)
    assert main([str(run)]) == 2
    assert f"{sys.executable} -m pip install bokeh matplotlib" in capsys.readouterr().err
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No run is named"),
        (["{}/nowhere"], "is not a folder"),
        (["{}/empty"], "holds no run: none of config.toml, status.json, metrics.jsonl is in it."),
        (["{}", "{}/../first"], "is named twice"),
        (["{}", "--output", "{}"], "is a folder; name an HTML file."),
        (["{}", "--output", "{}/config.toml/a.html"], "cannot be used"),
        (["{}", "--png", "{}/config.toml"], "--png"),
        (["{}", "--x", "loss"], "--x"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(run, capsys, words, said):
    (run / "empty").mkdir()
    assert main([word.format(run) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err


def test_the_page_needs_no_torch_and_help_no_drawing_library(run):
    (run / "empty").mkdir()
    code = (
        "import sys\n"
        "from llm.tools.report.report import main\n"
        f"assert main(['{run}/empty']) == 2\n"
        "assert not {'bokeh', 'matplotlib', 'jinja2'} & sys.modules.keys()\n"
        f"assert main([{str(run)!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="needs the browser Chromium (apt install chromium)")
@pytest.mark.parametrize("width", [390, pytest.param(1400, marks=pytest.mark.slow)])
def test_in_a_browser_no_page_scrolls_sideways_and_the_axis_can_be_chosen(run, tmp_path, width):
    check = """
    const said = [];
    addEventListener("error", (event) => said.push(event.message));
    const look = setInterval(() => {
      const [page] = Bokeh.documents;
      if (!document.querySelector(".bk-Figure")?.shadowRoot || !page?.is_idle) return;
      clearInterval(look);
      const named = (name) => [...page._all_models.values()].find((model) => model.name == name);
      const chart = page.roots()[0];
      const axis = () => chart.below[0].axis_label + " to " + named("whole").end.toFixed(1);
      const {scrollWidth, clientWidth} = document.documentElement;
      said.push(scrollWidth - clientWidth, axis());
      document.getElementById("x-seconds").click();
      said.push(axis());
      chart.trigger_event({event_name: "mousemove", x: 20});
      said.push(document.querySelector(".bubble").innerText.replace(/\\s+/g, " ").trim());
      document.getElementById("run-0").click();
      said.push(chart.renderers.filter((drawn) => drawn.visible).length);
      said.push(performance.getEntriesByType("resource").length);
      parent.document.title = said.join("|");
    }, 50);
    """
    second = write_run(tmp_path / "second", [report(10), report(20)])
    page = page_of(run, second, "--output", tmp_path / "both.html")
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{check}</script></body>"))
    (tmp_path / "frame.html").write_text(
        f'<!doctype html><title></title><iframe src="page.html" width="{width}" height="800">'
        "</iframe>"
    )
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
            "--allow-file-access-from-files", "--virtual-time-budget=20000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom", (tmp_path / "frame.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", done.stdout)[1]
    assert title == (
        "0|steps to 61.2|seconds of training to 30.6|"
        "20 seconds of training first 7.6 first, validation 7.1|1|0"
    )
