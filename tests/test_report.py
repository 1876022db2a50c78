import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

from llm.report.__main__ import main
from llm.report.events import Event, LogFacts, read_log
from llm.report.panels import MAX_POINTS, make_panels
from llm.report.runs import read_runs
from tests.support.checkpoints import filled, saver_of

LOG = """\
2026-11-20 10:00:00 model: gpt2, 1,071,872 parameters (278,528 embedding, 793,344 other, 0 frozen)
2026-11-20 10:00:00 length: 1,200 steps, 9,600 samples, 3.3 epochs
2026-11-20 10:00:00 world: 4 ranks, cuda, mixed precision bf16, seed 42
2026-11-20 10:00:01 step       10/    1200 | consumed samples: 80 | lm loss: 7.6 | nan steps:   0
2026-11-20 10:00:02 Saved runs/a/checkpoints/step_00000020 (held up 0.01 s, written in 0.1 s).
2026-11-20 10:00:03 step 25 was skipped: its gradient is not finite (samples 192 to 199)
2026-11-20 10:00:04 Saved runs/a/checkpoints/step_00000040 (held up 0.01 s, written in 0.1 s).
2026-11-20 10:00:05 Stopped by SIGTERM after step 45, which is saved. The same command goes on.
2026-11-20 11:00:00 world: 8 ranks, cuda, mixed precision bf16, seed 42
2026-11-20 11:00:00 Resumed from runs/a/checkpoints/step_00000020 at step 20.
2026-11-20 11:00:09 Saved runs/a/checkpoints/step_00000040 (held up 0.01 s, written in 0.1 s).
"""


def report(step: int, **values: object) -> dict[str, object]:
    """A line of metrics.jsonl: 100 tokens and half a second a step."""
    return {
        "step": step,
        "loss": 8.0 - step / 100,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "loss_scale": 1.0,
        "skipped_steps": 0,
        "nan_steps": 0,
        "tokens_per_second": 200.0,
        "ms_per_step": 500.0,
        "data_wait": 0.25,
        "samples": step,
        "tokens": 100 * step,
        "seconds": step / 2,
        **values,
    }


def evaluation(loss: float) -> dict[str, float]:
    return {"eval_loss": loss, "eval_perplexity": 2.718**loss}


def write_run(folder, records, *, end="", log="", config="", **status):
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + end)
    (folder / "log.txt").write_text(log)
    (folder / "config.toml").write_text(config)
    if status:
        (folder / "status.json").write_text(json.dumps(status))
    return folder


@pytest.fixture
def run(tmp_path):
    """A run that has reported every 10 of its first 60 steps, and was evaluated thrice."""
    losses = {20: 7.5, 40: 7.1, 60: 7.2}
    records = [
        report(step, **(evaluation(losses[step]) if step in losses else {}))
        for step in range(10, 61, 10)
    ]
    config = 'model_name_or_path = "tiny"\nlearning_rate = 0.001\nbetas = [0.9, 0.95]\n'
    return write_run(tmp_path / "first", records, config=config, log=LOG, status="running")


class Reader(html.parser.HTMLParser):
    """Reads a page strictly: every element is closed; and collects what it refers to."""

    VOID = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(*words: object) -> str:
    assert main([str(word) for word in words]) == 0
    output = (
        words[words.index("--output") + 1] if "--output" in words else f"{words[0]}/report.html"
    )
    with open(str(output), encoding="utf-8") as file:
        return file.read()


def numbers_of(page: str) -> dict:
    """What the page's script reads."""
    return json.loads(re.search(r'id="numbers">(.*?)</script>', page)[1])


def panels_of(*folders):
    return {panel.name: panel for panel in make_panels(read_runs(folders))}


def test_the_page_is_written_into_the_run_and_named(run, capsys):
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "first: training report" in (run / "report.html").read_text()


def test_the_page_needs_nothing_but_itself(run):
    page = page_of(run)
    assert Reader(page).links == []
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page


def test_the_summary_says_how_the_run_stands(run):
    text = Reader(page_of(run)).text
    assert "Status running last sign 0 s ago" in text
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


def test_the_reason_of_a_failed_run_is_told(tmp_path):
    run = write_run(tmp_path / "a", [report(1)], status="failed", reason="DataError: <no> text")
    assert "a failed: DataError: <no> text" in Reader(page_of(run)).text


def test_a_run_that_has_been_silent_for_hours_may_be_dead(run):
    for file in ("metrics.jsonl", "log.txt", "status.json"):
        os.utime(run / file, (1_000_000_000, 1_000_000_000))
    assert "it may have been killed" in Reader(page_of(run)).text


def test_a_half_written_last_line_is_passed_over(run):
    whole = page_of(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "loss": 7')
    cut = page_of(run)
    assert numbers_of(cut) == numbers_of(whole)
    assert "could not be read" not in cut


def test_a_line_that_is_broken_in_the_middle_is_told(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = '{"step": 30, "lo'
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "1 lines of first/metrics.jsonl could not be read." in Reader(page_of(run)).text


def test_a_run_that_has_reported_nothing_yet_has_a_page(tmp_path):
    run = write_run(tmp_path / "a", [], config="seed = 1\n", status="running")
    (run / "metrics.jsonl").unlink()
    assert "No step has been reported yet." in Reader(page_of(run)).text


def test_a_run_of_one_report_has_a_page(tmp_path):
    text = Reader(page_of(write_run(tmp_path / "a", [report(1, **evaluation(8.0))]))).text
    assert "Gradient norm" in text


def test_curves_have_the_numbers_of_the_metrics_on_all_axes(run):
    curve = panels_of(run)["validation_loss"].curves[0]
    assert curve.xs == {
        "step": [20.0, 40.0, 60.0],
        "tokens": [2000.0, 4000.0, 6000.0],
        "seconds": [10.0, 20.0, 30.0],
    }
    assert curve.ys == [7.5, 7.1, 7.2]


def test_an_evaluation_between_two_reports_has_its_place_between_them(tmp_path):
    records = [report(10), {"step": 15, **evaluation(7.0)}, report(20)]
    curve = panels_of(write_run(tmp_path / "a", records))["validation_loss"].curves[0]
    assert curve.xs == {"step": [15.0], "tokens": [1500.0], "seconds": [7.5]}


def test_a_number_that_is_not_finite_breaks_the_curve(tmp_path):
    records = [report(1), report(2, loss=None), report(3)]
    run = write_run(tmp_path / "a", records)
    assert panels_of(run)["loss"].curves[0].ys == [7.99, None, 7.97]
    line = re.search(r'class="line" d="([^"]*)"', page_of(run))[1]
    assert line.count("M") == 2
    assert line.count("L") == 0


def test_shares_are_shown_in_percent_and_bytes_in_gib(tmp_path):
    run = write_run(tmp_path / "a", [report(1, mfu=0.4, peak_memory=3 * 2**30)])
    panels = panels_of(run)
    assert panels["data_wait"].curves[0].ys == [25.0]
    assert panels["mfu"].curves[0].ys == [40.0]
    assert panels["peak_memory"].curves[0].ys == [3.0]
    assert panels["peak_memory"].unit == "GiB"


def test_metrics_without_a_panel_of_their_own_are_shown_all_the_same(tmp_path):
    record = report(1, **{"eval_accuracy": 0.5, "eval_loss/books": 7.0, "weight_norm": 3.0})
    titles = [panel.title for panel in panels_of(write_run(tmp_path / "a", [record])).values()]
    assert "Validation accuracy" in titles
    assert "Validation loss, books" in titles
    assert titles[-1] == "weight norm"


def test_what_never_changes_has_no_panel(run, tmp_path):
    assert not {"loss_scale", "skipped_steps"} & panels_of(run).keys()
    records = [report(1, loss_scale=2.0, skipped_steps=1)]
    assert {"loss_scale", "skipped_steps"} <= panels_of(write_run(tmp_path / "a", records)).keys()


def test_the_second_half_of_the_loss_has_an_axis_of_its_own(tmp_path):
    run = write_run(tmp_path / "a", [report(step) for step in range(1, 101)])
    panels = panels_of(run)
    assert panels["loss"].y.high > 7.99
    assert 7.5 < panels["loss_second_half"].y.high < 7.6


def test_long_runs_are_thinned_to_means_with_the_range_beside_them(tmp_path):
    records = [report(step, loss=float(step % 2)) for step in range(1, 5001)]
    run = write_run(tmp_path / "a", records)
    curve = panels_of(run)["loss"].curves[0]
    assert len(curve.ys) == 1667 <= MAX_POINTS  # of 3 reports each
    assert curve.ys[:2] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert curve.xs["step"][:2] == [2.0, 5.0]
    assert set(curve.lows[:-1]) == {0.0}
    assert set(curve.highs[:-1]) == {1.0}
    page = page_of(run)
    assert "more than 2,000 reports, a point is the mean of several" in Reader(page).text
    assert 'class="band"' in page


def test_the_log_tells_what_happened_on_the_branch_that_was_kept(run):
    events, facts = read_log(run / "log.txt")
    assert [(event.kind, event.step) for event in events] == [
        ("save", 20),
        ("resume", 20),
        ("save", 40),
    ]
    assert events[2].time == "2026-11-20 11:00:09"
    assert facts == LogFacts(
        architecture="gpt2",
        num_parameters=1071872,
        total_steps=1200,
        num_ranks=8,
        device="cuda",
        precision="bf16",
    )


def test_skipped_steps_and_stops_are_events(tmp_path):
    (tmp_path / "log.txt").write_text(LOG.partition("2026-11-20 11")[0])
    events, _ = read_log(tmp_path / "log.txt")
    assert events[1] == Event(
        kind="skip",
        step=25,
        text="skipped: its gradient is not finite (samples 192 to 199)",
        time="2026-11-20 10:00:03",
    )
    assert events[3] == Event(
        kind="stop", step=45, text="stopped by SIGTERM", time="2026-11-20 10:00:05"
    )


def test_checkpoints_are_events_where_no_log_tells_of_them(run):
    (run / "log.txt").unlink()
    saver = saver_of(run / "checkpoints", filled(1.0), keep_newest=2)
    for step in (30, 50):
        saver.save(step=step, eval_loss=None)
    saver.finish()
    events = read_runs([run])[0].events
    assert [(event.kind, event.step) for event in events] == [
        ("save", 30),
        ("best", 40),
        ("save", 50),
    ]


def test_events_are_marked_on_the_page(run):
    page = page_of(run)
    marks = re.findall(r'<i class="mark (\w+)" style="([^"]*)" title="([^"]*)"', page)
    assert [(kind, title) for kind, _, title in marks] == [
        ("save", "step 20: saved; removed since"),
        ("save", "step 40: saved; removed since"),
        ("resume", "step 20: resumed"),
        ("best", "step 40: lowest validation loss, 7.1000"),
    ]
    # The axis ends 2 % after step 60.
    assert marks[0][1] == "--step:32.68%;--tokens:32.68%;--seconds:32.68%"
    assert page.count('class="crossing resume run-0"') == 3 * page.count("<figure")


def test_several_runs_are_overlaid_and_their_differences_listed(run, tmp_path):
    config = 'model_name_or_path = "tiny"\nlearning_rate = 0.002\nseed = 5\nbetas = [0.9, 0.95]\n'
    second = write_run(tmp_path / "second", [report(10), report(20)], config=config)

    page = page_of(run, second, "--output", tmp_path / "both.html")

    numbers = numbers_of(page)
    assert numbers["runs"] == ["first", "second"]
    assert [curve["run"] for curve in numbers["panels"][0]["curves"]] == [0, 1, 0]
    text = Reader(page).text
    different = text.partition("Differences in configuration")[2].partition("All ")[0]
    assert "learning_rate 0.001 0.002" in different
    assert "seed not set 5" in different
    assert "betas" not in different
    assert "model_name_or_path" not in different


def test_many_runs_have_a_row_each(tmp_path):
    folders = [write_run(tmp_path / f"run{number}", [report(number)]) for number in range(1, 11)]
    text = Reader(page_of(*folders, "--output", tmp_path / "all.html")).text
    assert "10 runs Training report" in text
    assert "run3 3 300 1.5 s" in text


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    folders = [write_run(tmp_path / name / "run", [report(1)]) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


def test_names_cannot_break_the_page(tmp_path):
    name = 'a<script>"&amp;'
    records = [report(1, **{"eval_loss/</script><b>": 7.0})]
    run = write_run(tmp_path / name, records, config="tokenizer_name = '<i>'\n")
    page = page_of(run)
    assert page.count("<script") == page.count("</script>") == 2
    assert name in Reader(page).text


def test_the_x_axis_that_is_asked_for_is_chosen(run):
    assert 'id="x-step" value="step" checked' in page_of(run)
    assert 'id="x-seconds" value="seconds" checked' in page_of(run, "--x", "time")


def test_images_are_png_files_of_every_panel(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([str(run), "--png", str(tmp_path / "png")]) == 0
    images = sorted((tmp_path / "png").iterdir())
    assert [image.stem for image in images] == sorted(panels_of(run))
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)
    assert str(images[0]) in capsys.readouterr().out


def test_a_missing_matplotlib_is_named_with_its_pip_line(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", ModuleType("matplotlib.figure"))
    assert main([str(run), "--png", str(tmp_path / "png")]) == 2
    assert "pip install 'llm-trainers[report]'" in capsys.readouterr().err
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No run is named"),
        (["{}/nowhere"], "is no folder"),
        (["{}/.."], "holds no run: none of config.toml, status.json, metrics.jsonl is in it."),
        (["{}", "{}/../first"], "is named twice"),
        (["{}", "--output", "{}"], "is a folder; name an HTML file."),
        (["{}", "--output", "{}/log.txt/a.html"], "cannot be used"),
        (["{}", "--png", "{}/log.txt"], "--png"),
        (["{}", "--x", "loss"], "--x"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(run, capsys, words, said):
    assert main([word.format(run) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err


def test_help_and_the_page_need_no_torch(run):
    code = (
        "import sys\n"
        "from llm.report.__main__ import main\n"
        f"assert main([{str(run)!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="needs the browser Chromium (apt install chromium)")
@pytest.mark.parametrize("width", [390, 1400])
def test_in_a_browser_no_page_scrolls_sideways_and_the_axis_can_be_chosen(run, tmp_path, width):
    page = page_of(run)
    check = """
    const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    const labels = (x) => getComputedStyle(document.querySelector(`.x-labels.for-${x}`)).display;
    const before = labels("step") + labels("seconds");
    document.getElementById("x-seconds").click();
    const after = labels("step") + labels("seconds");
    const plot = document.querySelector(".plot");
    const box = plot.getBoundingClientRect();
    plot.dispatchEvent(new PointerEvent("pointermove",
        {clientX: box.left + box.width * 20 / 30.6, clientY: box.top + 5}));
    const bubble = document.querySelector(".bubble").innerText.replace(/\\s+/g, " ");
    parent.document.title = [wide, before, after, bubble].join("|");
    """
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{check}</script></body>"))
    (tmp_path / "frame.html").write_text(
        f'<!doctype html><title></title><iframe src="page.html" width="{width}" height="800">'
        "</iframe>"
    )
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
            "--allow-file-access-from-files", "--virtual-time-budget=2000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom", (tmp_path / "frame.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", done.stdout)[1]
    assert title == "0|blocknone|noneblock|20 seconds of training 7.6 validation 7.1"
