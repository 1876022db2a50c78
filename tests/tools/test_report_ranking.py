import json
import re
import shutil
import subprocess
import sys

import pytest

from llm.tools.report.comparison import compare_runs
from llm.tools.report.page import make_page
from llm.tools.report.ranking import make_ranking_table, rank_runs
from llm.tools.report.report import main
from llm.tools.report.runs import find_run_folders, read_runs
from tests.support.report_pages import CHROMIUM, Reader, Undrawn, evaluation, report, write_run

BASE = {"learning_rate": 1e-3, "seed": 1, "keep_checkpoints": 2}


def write_member(folder, loss, *, status="finished", steps=20, parameters=1000, **options):
    """A run that was evaluated after its last step; `loss` None is not finite."""
    last = {"eval_loss": None} if loss is None else evaluation(loss)
    records = [report(steps // 2, **evaluation(9.0)), report(steps, **last)]
    config = BASE | {"output_dir": str(folder)} | options
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items())
    start = {"event": "start", "step": 0, "parameters": parameters, "total_steps": steps}
    return write_run(folder, records, config=lines, events=[start], status=status)


def read(folder):
    runs, problems = read_runs(find_run_folders(folder))
    assert problems == []
    return runs


def rows_of(folder):
    """The table: rank, label, problem, and the cells of the columns."""
    columns, rows = make_ranking_table(rank_runs(read(folder)))
    table = [
        (row.rank, row.label, row.problem, *(row.cells.get(column, "") for column in columns))
        for row in rows
    ]
    return columns, table


@pytest.fixture
def sweep(tmp_path):
    """Two rates with two seeds each, and a member that failed."""
    folder = tmp_path / "sweep"
    losses = {(1e-3, 1): 3.2, (1e-3, 2): 3.3, (3e-3, 1): 3.0, (3e-3, 2): 3.1}
    for (rate, seed), loss in losses.items():
        name = f"learning_rate={rate},seed={seed}"
        write_member(folder / name, loss, learning_rate=rate, seed=seed, keep_checkpoints=seed)
    write_member(folder / "failed", 5.0, status="failed", learning_rate=1e-2, steps=10)
    (folder / "notes.txt").touch()
    (folder / "empty").mkdir()
    return folder


def test_members_that_differ_in_the_seed_are_ranked_as_a_group(sweep):
    columns, rows = rows_of(sweep)
    assert columns == ["Validation loss", "Step", "Tokens", "learning_rate", "seed"]
    assert rows == [
        ("1", "mean of 2 runs", "", "3.0500 ± 0.0707", "20", "2,000", "0.003", "1, 2"),
        ("", "learning_rate=0.003,seed=1", "", "3.0000", "20", "2,000", "", "1"),
        ("", "learning_rate=0.003,seed=2", "", "3.1000", "20", "2,000", "", "2"),
        ("2", "mean of 2 runs", "", "3.2500 ± 0.0707", "20", "2,000", "0.001", "1, 2"),
        ("", "learning_rate=0.001,seed=1", "", "3.2000", "20", "2,000", "", "1"),
        ("", "learning_rate=0.001,seed=2", "", "3.3000", "20", "2,000", "", "2"),
        ("", "failed", "failed", "5.0000", "10", "1,000", "0.01", "1"),
    ]


def test_the_report_of_a_folder_of_runs_is_written_into_it(sweep, capsys):
    assert main([str(sweep)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert re.split("  +", printed[1])[1:4] == ["mean of 2 runs", "3.0500 +- 0.0707", "20"]
    assert printed[-2].startswith("-     failed (failed)")
    assert printed[-1] == str(sweep / "report.html")
    text = Reader((sweep / "report.html").read_text()).text
    assert "Rank Validation loss Run Step Tokens learning_rate seed 1 3.0500 ±" in text
    assert "Final validation loss against each option learning_rate" in text


def test_a_member_is_not_ranked_by_a_loss_before_it_diverged(tmp_path):
    write_member(tmp_path / "good", 3.0)
    write_member(tmp_path / "bad", None, learning_rate=1.0)
    write_member(tmp_path / "killed", 2.0, status="running", learning_rate=0.1)
    _, rows = rows_of(tmp_path)
    assert [row[:4] for row in rows] == [
        ("1", "good", "", "3.0000"),
        ("", "bad", "loss not finite", "-"),
        ("", "killed", "running", "2.0000"),
    ]


def test_a_seed_that_failed_is_missing_from_its_group(sweep):
    status = sweep / "learning_rate=0.003,seed=2" / "status.json"
    status.write_text('{"status": "failed"}')
    _, rows = rows_of(sweep)
    assert rows[0][1:4] == ("1 of 2 runs", "", "3.0000")
    assert rows[-1][1:3] == ("learning_rate=0.003,seed=2", "failed")


def test_models_of_two_sizes_with_equal_options_are_two_groups(tmp_path):
    """Such as a config.json or a tokenizer that has changed under its name."""
    for name, parameters, seed in (("a", 1000, 1), ("b", 1000, 2), ("c", 2000, 1), ("d", 2000, 2)):
        write_member(tmp_path / name, 3.0 + seed, parameters=parameters, seed=seed)
    columns, rows = rows_of(tmp_path)
    assert columns[-2:] == ["Parameters", "seed"]
    assert [(row[0], row[1], row[-2]) for row in rows if row[0]] == [
        ("1", "mean of 2 runs", "1,000"),
        ("2", "mean of 2 runs", "2,000"),
    ]


def test_a_seed_of_unknown_size_belongs_to_the_only_size(tmp_path):
    for name, parameters, seed in (("a", 1000, 1), ("b", 1000, 2), ("c", None, 3)):
        write_member(tmp_path / name, 3.0 + seed, parameters=parameters, seed=seed)
    (tmp_path / "c" / "status.json").write_text('{"status": "failed"}')
    _, rows = rows_of(tmp_path)
    assert [row[1] for row in rows] == ["2 of 3 runs", "a", "b", "c"]


def test_branches_from_two_checkpoints_are_not_the_seeds_of_a_group(tmp_path):
    for step in (10, 20):
        checkpoint = f"/runs/stable/checkpoints/step_{step:08}"
        write_member(tmp_path / f"branch{step}", 3.0 + step, branch_from=checkpoint)
    columns, rows = rows_of(tmp_path)
    assert columns[-1] == "branch_from"
    assert [row[-1] for row in rows] == ["step_00000010", "step_00000020"]


def test_a_run_with_cooldowns_in_its_branches_is_not_ranked(tmp_path):
    write_member(tmp_path / "trunk", 2.0, steps=40)
    for step in (10, 20):
        checkpoint = str(tmp_path / f"trunk/checkpoints/step_{step:08}")
        write_member(
            tmp_path / f"branch{step}", 30 / step, branch_from=checkpoint, cooldown_tokens=500
        )
    _, rows = rows_of(tmp_path)
    assert [row[:3] for row in rows] == [
        ("1", "branch20", ""),
        ("2", "branch10", ""),
        ("", "trunk", "cooldowns in branches"),
    ]


def test_a_run_of_another_sweep_with_the_name_of_a_trunk_is_ranked(tmp_path):
    write_member(tmp_path / "a/seed=1", 2.0, steps=40)
    write_member(tmp_path / "b/seed=1", 2.5, steps=40)
    checkpoint = str(tmp_path / "a/seed=1/checkpoints/step_00000010")
    write_member(tmp_path / "a/branch", 3.0, branch_from=checkpoint, cooldown_tokens=500)
    runs, _ = read_runs([*find_run_folders(tmp_path / "a"), *find_run_folders(tmp_path / "b")])
    ranking = rank_runs(runs)
    assert [runs[member.run].path for member in ranking.unranked] == [tmp_path / "a/seed=1"]


@pytest.mark.parametrize("option", ["validation_file", "data_path", "train_file", "prepend_bos"])
def test_runs_on_different_validation_data_get_a_remark(tmp_path, option):
    for name in ("a", "b"):
        write_member(tmp_path / name, 3.0, **{option: f"{name}.txt"})
    remark = rank_runs(read(tmp_path)).remark
    assert remark.startswith(f"The runs differ in {option}, so their validation losses may be")


def test_runs_on_other_data_with_one_validation_file_are_comparable(tmp_path):
    for name in ("a", "b"):
        write_member(tmp_path / name, 3.0, train_file=f"{name}.txt", validation_file="valid.txt")
    assert rank_runs(read(tmp_path)).remark == ""


def test_one_run_or_only_unfinished_runs_have_no_ranking(tmp_path):
    write_member(tmp_path / "a", 3.0)
    assert compare_runs(read(tmp_path)) is None
    shutil.rmtree(tmp_path / "a")
    for name in ("a", "b"):
        write_member(tmp_path / name, 3.0, status="running", learning_rate=ord(name) / 1e5)
    assert compare_runs(read(tmp_path)) is None


def panels_of(folder):
    return {panel.title: panel for panel in compare_runs(read(folder)).loss_panels}


def test_rates_and_sizes_have_a_logarithmic_axis_and_words_have_names(tmp_path):
    options = {
        "learning_rate": (1e-4, 1e-3, 1e-2),
        "global_batch_size": (8, 16, 32),
        "model_size": ("60M", "124M", "355M"),
        "max_duration": ("10 steps", "20 steps", "1K steps"),
        "optimizer": ("adamw", "muon", "soap"),
        "weight_decay": (0.0, 0.1, 0.2),
    }
    for number in range(3):
        values = {name: values[number] for name, values in options.items()}
        write_member(tmp_path / f"run{number}", 3.0 + number, **values)
    panels = panels_of(tmp_path)
    assert panels.keys() == options.keys()
    logarithmic = [name for name, panel in panels.items() if panel.log]
    assert logarithmic == ["learning_rate", "global_batch_size", "model_size", "max_duration"]
    assert panels["learning_rate"].ticks == {1e-4: "0.0001", 1e-3: "0.001", 1e-2: "0.01"}
    assert panels["model_size"].ticks == {60e6: "60M", 124e6: "124M", 355e6: "355M"}
    assert panels["max_duration"].unit == "steps"
    assert panels["optimizer"].ticks == {0: "adamw", 1: "muon", 2: "soap"}
    assert panels["learning_rate"].points[1] == (1e-3, 4.0)


def test_lines_join_the_means_of_groups_that_differ_in_one_option(tmp_path):
    losses = {(1e-3, 4): (3.0, 3.2), (1e-2, 4): (3.4, 3.6), (1e-3, 8): (2.0,), (1e-2, 8): (2.5,)}
    for (rate, batch), seed_losses in losses.items():
        for seed, loss in enumerate(seed_losses):
            options = {"learning_rate": rate, "min_learning_rate": rate / 10, "seed": seed}
            name = f"run{rate},{batch},{seed}"
            write_member(tmp_path / name, loss, global_batch_size=batch, **options)
    lines = panels_of(tmp_path)["learning_rate"].lines
    assert [(label, [*map(tuple, points)]) for label, points in lines] == [
        ("8", [(1e-3, pytest.approx(2.0)), (1e-2, pytest.approx(2.5))]),
        ("4", [(1e-3, pytest.approx(3.1)), (1e-2, pytest.approx(3.5))]),
    ]


def write_ladder(folder, *, ratios=(10, 20, 40), size_factor=40):
    """Three sizes with two learning rates each; the larger rate is better for the smallest size."""
    for size in (100_000, 200_000, 400_000):
        for ratio in ratios:
            # A step has 100 tokens.
            steps = size * ratio // 100
            loss = 1.8 + size_factor / size**0.4 + 60 / (100 * steps) ** 0.3
            for rate in (1e-3, 2e-3):
                is_best = (size == 100_000) == (rate == 2e-3)
                name = f"{size},{ratio},{rate}"
                options = {"hidden_size": size // 1000, "learning_rate": rate, "parameters": size}
                duration = f"{steps} steps"
                loss_of_rate = loss if is_best else loss + 0.1
                write_member(
                    folder / name, loss_of_rate, steps=steps, max_duration=duration, **options
                )


def test_a_ladder_is_fitted_by_the_best_runs_of_each_size_and_length(tmp_path, monkeypatch):
    monkeypatch.setattr("llm.tools.report.scaling_law.NUM_RESAMPLES", 20)
    write_ladder(tmp_path)
    comparison = compare_runs(read(tmp_path))
    section = comparison.scaling
    assert section.refusal == ""
    values = {name: float(value.replace(",", "")) for name, value, _ in section.constants}
    known = {"E": 1.8, "A": 40, "B": 60, "alpha": 0.4, "beta": 0.3, "a": 3 / 7, "b": 4 / 7}
    assert values == pytest.approx(known, rel=0.01)
    assert section.best_rates[0][:3] == ("100,000", "1M", "0.002, at the edge")
    assert section.best_rates[-1][:3] == ("400,000", "16M", "0.001, at the edge")
    panel = comparison.loss_panels[-1]
    assert [line.label for line in panel.lines] == ["100k", "200k", "400k"]
    assert len(panel.points) == 9
    assert "9 runs of 9 pairs of N and D" in comparison.describe()


def test_a_ladder_where_the_size_does_not_matter_is_not_fitted(tmp_path, monkeypatch):
    monkeypatch.setattr("llm.tools.report.scaling_law.NUM_RESAMPLES", 5)
    write_ladder(tmp_path, size_factor=0)
    section = compare_runs(read(tmp_path)).scaling
    assert "is not fitted: with the size, the fitted loss does not fall by mo" in section.refusal
    assert section.constants == ()


def test_a_ladder_with_few_lengths_says_why_it_is_not_fitted(tmp_path):
    write_ladder(tmp_path, ratios=(20,))
    section = compare_runs(read(tmp_path)).scaling
    assert section.refusal == (
        "L(N, D) = E + A / N^alpha + B / D^beta is not fitted: it needs 8 pairs of size and "
        "tokens with 3 sizes and 3 numbers of tokens, and the finished runs have 3 with 3 and 3."
    )
    assert section.panel is None
    assert len(section.best_rates) == 3


def test_without_scipy_the_report_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    write_ladder(tmp_path)
    monkeypatch.delitem(sys.modules, "llm.tools.report.scaling_law", raising=False)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"needs the package scipy: run {sys.executable} -m pip install scipy" in printed
    assert "needs the package scipy" in (tmp_path / "report.html").read_text()


ODD_VALUES = ["<i>$_$", "", "9" * 400, "1e999", 10**300, float("inf"), True, [0.5, "a/b"], [[1]]]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: str(value)[:9])
def test_odd_options_and_names_cannot_break_the_comparison(tmp_path, monkeypatch, value):
    monkeypatch.setattr("llm.tools.report.page.Charts", Undrawn)
    name = 'a<script>"&amp;$_$'
    for number, option in enumerate((value, 1, 2)):
        folder = write_member(tmp_path / f"{name}{number}", 3.0 + number)
        text = "inf" if option == float("inf") else json.dumps(option)
        with (folder / "config.toml").open("a") as file:
            file.write(f'"odd <b>" = {text}\n"{"k" * 5000}" = {text}\n')
    runs = read(tmp_path)
    page = make_page(runs, compare_runs(runs), x="step")
    assert page.count('<script>"') == page.count('<b>"') == page.count("<i>$") == 0
    assert f"1 3.0000 {name}0 20 2,000" in Reader(page).text


def test_images_have_a_file_for_each_option_and_the_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("llm.tools.report.scaling_law.NUM_RESAMPLES", 5)
    write_ladder(tmp_path / "ladder")
    assert main([str(tmp_path / "ladder"), "--png", str(tmp_path / "png")]) == 0
    names = {path.stem for path in (tmp_path / "png").iterdir()}
    assert {"option_learning_rate", "option_hidden_size", "scaling_law"} <= names


@pytest.mark.skipif(CHROMIUM is None, reason="needs the browser Chromium (apt install chromium)")
def test_in_a_browser_each_run_has_a_point_in_the_chart_of_an_option(sweep, tmp_path):
    check = """
    const said = [];
    addEventListener("error", (event) => said.push(event.message));
    const look = setInterval(() => {
      const [page] = Bokeh.documents;
      if (!document.querySelector(".bk-Figure")?.shadowRoot || !page?.is_idle) return;
      clearInterval(look);
      const chart = page.roots().at(-1);
      const points = chart.renderers.filter((drawn) => drawn.glyph.type == "Scatter");
      const color = getComputedStyle(document.documentElement).getPropertyValue("--run-0").trim();
      said.push(points.length, points.filter((p) => p.glyph.fill_color.value == color).length);
      document.getElementById("run-4").click();
      said.push(points.filter((drawn) => drawn.visible).length);
      parent.document.title = said.join("|");
    }, 50);
    """
    assert main([str(sweep)]) == 0
    page = (sweep / "report.html").read_text()
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{check}</script></body>"))
    (tmp_path / "frame.html").write_text(
        '<!doctype html><title></title><iframe src="page.html" width="390" height="800"></iframe>'
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
    assert re.search("<title>(.*?)</title>", done.stdout)[1] == "4|0|3"
