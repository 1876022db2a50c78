"""The benchmarks run at toy size, and measure what they say they measure."""

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import before, bits, data, kfac, killed_curve, report, train
from benchmarks.corpus import cut, make_corpus
from benchmarks.decentralized_delay import DelaySetting, theory
from benchmarks.delayed_link import DelayedNetwork, why_not
from benchmarks.kfac_report import horizon_goals, horizon_lines, shares, steps_to
from benchmarks.measure import Case, CaseFailed, Usage, interleave, median, run
from benchmarks.mup import best, section, shift
from benchmarks.report import run_benchmark
from llm.errors import DataError
from tests.support import made_up_device
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks, values
from tests.support.strict_mode import Strict
from tests.support.tokenizers import tiny_tokenizer

ROOT = Path(__file__).parent.parent


def program(folder: Path, source: str, name: str = "program") -> Case:
    return Case(name=name, command=[sys.executable, "-c", source], folder=folder / name)


def measured_elsewhere(case: Case) -> dict[str, float]:
    """`run` in a small process, as it asks to be: its own memory is handed on to the program."""
    source = (
        "import json, sys, dataclasses\n"
        "from pathlib import Path\n"
        "from benchmarks.measure import Case, run\n"
        "case = Case(name='x', command=json.loads(sys.argv[1]), folder=Path(sys.argv[2]))\n"
        "print(json.dumps(dataclasses.asdict(run(case))))\n"
    )
    command = [sys.executable, "-c", source, json.dumps(case.command), str(case.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def reported(**figures: float) -> Usage:
    return Usage(cpu_seconds=9, wall_seconds=9, peak_megabytes=9, reported=figures)


def benchmark(name: str, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end, of one thread a process; `given` is its input."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=given,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def rows_of(report: str) -> list[list[str]]:
    """The cells of the lines of all tables."""
    return [line.split(" | ") for line in report.splitlines() if line.startswith("| ")]


BURN = "import time\nwhile time.process_time() < {}: pass\n"


@pytest.mark.parametrize("start", ["run", "Popen"], ids=["child", "orphan"])
def test_the_cpu_time_of_children_counts_even_if_they_outlive_their_parent(tmp_path, start):
    child = f"subprocess.{start}([sys.executable, '-c', {BURN.format(0.5)!r}])"
    usage = measured_elsewhere(program(tmp_path, f"import subprocess, sys\n{child}"))
    assert 0.5 <= usage["cpu_seconds"] < 1.5


def test_the_peak_memory_is_that_of_all_processes_together(tmp_path):
    hold = "import time; held = bytearray(100_000_000); time.sleep(1.5)"
    source = (
        "import subprocess, sys\n"
        f"both = [subprocess.Popen([sys.executable, '-c', {hold!r}]) for _ in range(2)]\n"
        "for one in both: one.wait()\n"
    )
    assert 200 < measured_elsewhere(program(tmp_path, source))["peak_megabytes"] < 280


def test_a_program_reports_figures_in_its_last_line_from_an_empty_folder(tmp_path):
    source = "import os; print('hello\\n{\"files\": %d}' % len(os.listdir())); open('left', 'w')"
    case = program(tmp_path, source)
    assert run(case).reported == run(case).reported == {"files": 1}  # its own log


def test_the_last_output_of_a_failed_program_is_shown(tmp_path):
    with pytest.raises(CaseFailed, match=r"exit code 3: \.\.\.no such token"):
        run(program(tmp_path, "import sys; print('no such token'); sys.exit(3)"))


def test_runs_are_interleaved_and_a_program_that_fails_is_left_out(tmp_path):
    cases = [program(tmp_path, "", "a"), program(tmp_path, "raise SystemExit(1)", "b")]
    said: list[str] = []
    results = interleave([*cases, program(tmp_path, "", "c")], 2, said.append)
    assert [line.split(":")[0] for line in said] == [
        "1/2 a",
        "b FAILED and is left out",
        "1/2 c",
        "2/2 a",
        "2/2 c",
    ]
    assert {name: len(runs) for name, runs in results.items()} == {"a": 2, "b": 0, "c": 2}


def test_a_reported_figure_comes_before_the_measured_one():
    runs = [reported(cpu_seconds=seconds) for seconds in (1.0, 6.0, 2.0)]
    assert median(runs, "cpu_seconds") == 2.0
    assert report.spread(runs, "cpu_seconds") == "2.00 (1.00-6.00)"
    assert report.spread(runs, "wall_seconds") == "9.00 (9.00-9.00)"


def test_a_goal_that_was_missed_stands_out_in_the_report():
    goals = [
        report.at_least("speed", 7.9, 8),
        report.at_most("memory", 146.0, 400, " MB"),
    ]
    text = report.render("Title", ["a fact"], [report.Section(title="Part", lines=[], goals=goals)])
    assert "| speed: at least 8x | 7.90x | NO |" in text
    assert "| memory: at most 400 MB | 146 MB | yes |" in text


def test_a_program_that_failed_has_a_row_without_figures():
    results = {"ours": [reported(speed=3.0)], "theirs": []}
    lines = report.program_table(
        ("Program", "speed", "note"), results, lambda name, runs: (report.spread(runs, "speed"), "")
    )
    assert lines[2:] == ["| ours | 3.00 |  |", "| theirs | FAILED, see the log |  |"]


def test_a_corpus_does_not_depend_on_where_its_files_lie(tmp_path):
    digests = []
    for root in (tmp_path / "one", tmp_path / "two"):
        for number in range(20):
            file = root / f"folder{number % 3}" / f"module{number}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"x = {number}\n" * 100)
        (root / "binary.py").write_bytes(b"\xff\xfe" * 200)
        assert make_corpus(root / "corpus.jsonl", 1, roots=(root,)) == 20
        digests.append(cut(root / "corpus.jsonl", tmp_path / "cut", 0.001).digest)
    assert digests[0] == digests[1]


def test_a_repeated_short_corpus_omits_lines_with_the_special_token(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "abc"}\n{"text": "<|endoftext|>"}\n\n{"text": "def"}')
    piece = cut(corpus, tmp_path / "cut.jsonl", 50e-6)
    assert (tmp_path / "cut.jsonl").read_text() == '{"text": "abc"}\n{"text": "def"}\n' * 2
    assert (piece.documents, piece.passes) == (4, 2)


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no line of text"):
        cut(tmp_path / "corpus.jsonl", tmp_path / "cut.jsonl", 1)


def test_help_loads_no_heavy_library():
    source = (
        "import sys, benchmarks.data\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


REPORTS = {
    "before": (before.BeforeOptions, before.report),
    "data": (data.DataBenchmarkOptions, data.report),
    "kfac": (kfac.KFACBenchmarkOptions, kfac.report),
    "train": (train.TrainBenchmarkOptions, train.report),
}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("data --only prepare", "Give one of --corpus FILE and --make_corpus MB."),
        ("data --make_corpus 1", "--vocab_file is missing: preparation is measured with GPT-2's."),
        ("data --only far --megatron nowhere", "--megatron nowhere is not a checkout"),
        ("data --only far --peer_python nowhere", "--peer_python nowhere cannot be run."),
        ("data --only far --output /dev/null/x", "--output /dev/null/x is in a folder that does"),
        ("train --nanogpt nowhere", "--nanogpt nowhere holds no train.py."),
        (
            "before --earlier nowhere",
            "--earlier 'nowhere' is not a checkout: llm/trainers is missing",
        ),
        (f"before --earlier {ROOT}", "--corpus None is no file; --only prepare needs it."),
        ("kfac --methods adamw --only step --plot kfac.png", "--only step leaves out"),
        ("kfac --methods ekfac", "--methods must have adamw"),
        ("kfac --device cuda", "--device cuda needs a GPU, and torch sees none"),
        ("kfac --text nowhere.txt", "--text nowhere.txt is neither a folder of tokens nor a file."),
        ("kfac --methods adamw soap-library", "or leave soap-library out."),
        ("kfac --methods adamw --plot kfac.png", "pip install matplotlib"),
        ("kfac --methods adamw --output no/folder/x.md", "a folder that does not exist"),
    ],
)
def test_a_benchmark_refuses_in_one_sentence_before_it_measures(
    words, complaint, capsys, monkeypatch
):
    monkeypatch.setattr(kfac.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name, *arguments = words.split()
    assert run_benchmark(name, "", *REPORTS[name], arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.benchmarks
def test_our_program_prepares_a_toy_corpus_with_one_and_two_workers(tmp_path):
    tiny_tokenizer().backend_tokenizer.model.save(str(tmp_path))
    text = "the quick brown fox jumps over the lazy dog. " * 20
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(f"{json.dumps({'text': text})}\n" * 100)
    done = benchmark(
        "data",
        *("--only", "prepare", "start", "--corpus", str(corpus), "--sizes", "0.05"),
        *("--vocab_file", str(tmp_path / "vocab.json")),
        *("--merges_file", str(tmp_path / "merges.txt")),
        *("--repeats", "1", "--output", str(tmp_path / "report.md")),
    )
    text = (tmp_path / "report.md").read_text()
    assert "FAILED" not in text
    assert text == done.stdout[:-1]
    assert "Left out, as not asked for: Megatron-LM (--megatron), nanoGPT (--nanogpt)" in text
    assert "- llm, 2 workers: `.bin` and `.idx` are byte for byte ours." in text
    assert "our CPU for one line: at most 0.7 s" in text


@pytest.mark.benchmarks
def test_our_program_reads_toy_batches_and_a_distant_sample():
    done = benchmark(
        "data",
        *("--only", "assembly", "far", "waiting", "--tokens", "100000", "--batches", "4"),
        *("--repeats", "1"),
    )
    assert "FAILED" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert any(row.startswith("| llm, gather only | ") for row in rows)
    assert any(row.startswith("| llm, the training loader | ") for row in rows)
    assert any(row.startswith("| sample 10^9 of a file of 10^12 tokens | ") for row in rows)
    assert any(row.startswith("| the step sleeps | ") for row in rows)


@pytest.mark.benchmarks
def test_two_checkouts_are_measured_side_by_side():
    done = benchmark(
        *("before", "--earlier", str(ROOT), "--only", "start", "--shapes", "toy", "--repeats", "1")
    )
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| milestone"))
    _, before, now, ratio = row.strip("| ").split(" | ")
    assert float(ratio.split()[0]) == pytest.approx(float(now) / float(before), abs=0.01)


@pytest.mark.benchmarks
def test_training_is_compared_with_a_bare_loop_at_toy_size():
    done = benchmark(
        *("train", "--shapes", "toy", "--repeats", "1"),
        *("--only", "speed", "long", "--long_steps", "40"),
    )
    assert "FAILED" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    speeds = {row.split(" | ")[0][2:]: row.split(" | ")[1] for row in rows}
    assert float(speeds["llm"]) > 0
    assert float(speeds["bare loop"]) > 0
    assert any(row.startswith("| growth of resident memory") for row in rows)
    assert any(row.startswith("| 40 | ") for row in rows)


@pytest.mark.benchmarks
def test_gossip_is_compared_and_simulated_at_toy_size(tmp_path):
    text = tmp_path / "text"
    text.write_text((ROOT / "examples/data/shakespeare.txt").read_text()[:20000])
    words = (
        *("decentralized", "--only", "loss", "simulation", "--methods", "allreduce"),
        *("ring-accumadamw-power", "diloco-5-low-muon", "--learning_rates", "4e-3", "8e-3"),
        *("--ranks", "4", "--lengths", "20", "--seeds", "2", "--jobs", "1", "--text", str(text)),
        *("--batch_size", "4", "--block_size", "8", "--width", "8", "--layers", "1"),
        *("--sizes", "4", "16", "--trainings", str(tmp_path / "trainings")),
    )
    done = benchmark(*words, "--output", str(tmp_path / "report.md"))
    report_text = (tmp_path / "report.md").read_text()
    rows = rows_of(report_text)
    losses = {row[0][2:]: row for row in rows if len(row) == 5}
    assert losses["allreduce"][4].startswith("0 ± 0")  # of itself
    assert float(losses["ring-accumadamw-power"][3]) > 0  # ranks are apart
    assert float(losses["diloco-5-low-muon"][3]) < 1e-6  # after an outer step they are not
    assert done.stderr.count('"method": "diloco-5-low-muon"') >= 3
    again = benchmark(*words)
    assert '"method"' not in again.stderr  # all are kept
    assert again.stdout.partition("## ")[2] == report_text.partition("## ")[2] + "\n"
    # cos(pi / 8) a round, and one model out of a node: what a ring of 16 promises.
    assert ["| ring", "16", "2", "0.923880"] in [row[:4] for row in rows]
    assert "| matrices of up to 16 ranks symmetric and doubly stochastic: within 1e-12 |" in (
        report_text
    )


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_packet_on_a_delayed_link_takes_its_time_and_is_counted():
    listen = (
        "import socket\n"
        "server = socket.create_server(('10.99.0.2', 5000)); print('ready', flush=True)\n"
        "connection, _ = server.accept()\n"
        "while said := connection.recv(9): connection.sendall(said)"
    )
    ask = (
        "import socket, time\n"
        "connection = socket.create_connection(('10.99.0.2', 5000)); began = time.monotonic()\n"
        "connection.sendall(b'x'); connection.recv(9); print(time.monotonic() - began)"
    )
    with DelayedNetwork(2).up() as network:
        network.delay = 0.2
        server = subprocess.Popen(
            network.inside(1, [sys.executable, "-c", listen]), stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        server.stdout.readline()
        done = subprocess.run(
            network.inside(0, [sys.executable, "-c", ask]), capture_output=True, text=True
        )
        server.communicate(timeout=10)
    assert 0.4 <= float(done.stdout) < 2  # there and back
    assert network.carried[0, 1] > 40  # one byte, and the headers that bring it


@pytest.mark.benchmarks
@pytest.mark.parametrize("mode", ["allreduce", "diloco", "ring"])
def test_one_rank_of_the_slow_link_takes_steps_without_a_network(mode):
    options = {
        "mode": mode, "phases": 1, "warmup": 1, "steps": 2, "layers": 2, "width": 4,
        "compute": 0.01, "sync_every": 2, "ranks_per_node": 1,
    }  # fmt: skip
    done = benchmark("delayed_step", json.dumps(options), given="go\n")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0] == {"phase": 0}
    assert answers[1]["seconds"] >= 0.01


def test_the_bytes_of_a_step_by_theory():
    setting = DelaySetting(
        ranks=4, ranks_per_node=1, compute=1, delay=0, layers=1, width=10,
        sync_every=10, steps=1, repeats=1,
    )  # fmt: skip
    sent = {mode: theory(setting, mode) for mode in ("allreduce", "ring", "exp", "diloco")}
    assert sent == {"allreduce": 600, "ring": 400, "exp": 400, "diloco": 60}
    assert theory(setting, "alternating-exp-ring") == 200  # half of the pairs in each round


@pytest.mark.benchmarks
def test_a_family_is_compared_with_a_plain_loop():
    done = benchmark("families", "--families", "gpt2", "--steps", "10")
    assert any(line.startswith("| gpt2 | ") for line in done.stdout.splitlines())


def test_steps_to_a_loss_are_read_from_losses_at_several_horizons():
    losses = {100: 5.0, 200: 4.0, 400: 3.0, 800: 2.0}  # a straight line in the logarithm
    assert steps_to(losses, 3.5) == pytest.approx(100 * 2**1.5, rel=0.01)
    bent = {100: 9.0, 200: 4.0, 400: 1.0, 800: 0.0}  # (log2(800 / steps))^2
    assert steps_to(bent, 2.25) == pytest.approx(800 / 2**1.5, rel=0.01)
    assert steps_to(losses, 1.9) == math.inf
    assert steps_to(losses, 5.5) == 100.0  # an upper bound


def test_methods_are_compared_by_steps_to_the_last_loss_of_adamw():
    found = {
        "adamw": {100: [5.0, 5.0], 200: [4.0, 4.0], 400: [3.0, 3.0]},
        "ekfac": {100: [4.0, 4.0], 200: [3.0, 3.0], 400: [2.0, 2.0]},
        "muon": {100: [4.5, 4.5], 200: [3.5, 3.5], 400: [2.5, 2.5]},
        "soap": {100: [5.0, 5.0], 200: [4.5, 4.5], 400: [3.5, 3.5]},
        "normuon": {100: [4.5, 5.0], 200: [3.5, 4.5], 400: [2.5, 3.5]},
    }
    costs = {"adamw": 1.0, "ekfac": 1.1, "muon": 1.0, "soap": 1.2, "normuon": 1.0}
    assert shares(found, "adamw") == pytest.approx([1.0, 1.0], rel=0.01)
    assert shares(found, "ekfac") == pytest.approx([0.5, 0.5], rel=0.01)
    rows = [line.split(" | ") for line in horizon_lines(found, costs, {})]
    last_cells = [row[-1] for row in rows[3:]]
    assert last_cells[:2] == ["0.550 ± 0.000 |", "0.707 ± 0.000 |"]
    assert last_cells[2:] == ["never |", "never in 1 of 2 |"]
    met = {goal.what: goal.met for goal in horizon_goals(found, costs)}
    assert met["ekfac's steps to AdamW's last loss: at most 0.4 of AdamW's"] is False
    assert met["ekfac's lead over muon: at least two standard errors"] is True
    assert not any("soap" in what for what in met)  # it never arrives, as the table says
    assert met["ekfac's step: at most 1 of muon's"] is False


TOY_KFAC = (
    *("--only", "convergence", "--text", "examples/data/shakespeare.txt", "--trial_steps", "10"),
    *("--learning_rates", "2e-3", "--horizons", "20", "40", "--seeds", "1", "--batch_size", "2"),
    *("--block_size", "32", "--width", "32", "--layers", "1", "--jobs", "1", "--turns", "3"),
    *("--embedding_factors", "1", "4"),
)


@pytest.mark.benchmarks
def test_ekfac_is_compared_with_adamw_at_toy_size(tmp_path):
    report = tmp_path / "report.md"
    done = benchmark("kfac", *TOY_KFAC, "--methods", "adamw", "ekfac", "--output", str(report))
    assert report.read_text() == done.stdout[:-1]
    rows = rows_of(done.stdout)
    adamw = next(row for row in rows if row[0] == "| adamw")
    ekfac = next(row for row in rows if row[0] == "| ekfac")
    assert adamw[3] == "1.00"
    assert adamw[4:] == ["1.000", "1.000 |"]  # it reaches its own loss at its own last step
    assert float(ekfac[2]) < float(ekfac[1]) < 4.5  # less than the log of 65 characters and some
    trials = [row for row in rows if len(row) == 5 and row[0] != "| method"]
    # Rate 2e-3 and its neighbours, embeddings at its rate and at four times it, three decays.
    methods = [row[0] for row in trials]
    assert methods.count("| ekfac") == 6
    assert methods.count("| adamw") >= 10  # each decay at three rates
    assert {row[2] for row in trials} == {"1", "4"}
    losses = [float(row[4].rstrip(" |")) for row in trials if row[0] == "| ekfac"]
    assert losses == sorted(losses)


@pytest.mark.benchmarks
def test_the_optimizers_of_2026_are_compared_at_toy_size(tmp_path):
    methods = ("adamw", "normuon", "soap-hyperball")
    kept = ("--trainings", str(tmp_path / "kept"))
    done = benchmark("kfac", *TOY_KFAC, "--methods", *methods, *kept)
    rows = rows_of(done.stdout)
    trials = [row for row in rows if len(row) == 5 and row[0] != "| method"]
    rates = {method: {row[1] for row in trials if row[0] == f"| {method}"} for method in methods}
    # Steps of Hyperball are relative to the weights, and embeddings have rates of their own.
    assert "0.002" in rates["normuon"]
    assert "0.016" in rates["soap-hyperball"]
    factors = {row[2] for row in trials if row[0] == "| soap-hyperball"}
    assert factors == {"0.125", "0.5"}
    for method in methods:
        losses = next(row for row in rows if row[0] == f"| {method}" and len(row) > 5)[1:3]
        assert all(0 < float(loss) < 4.5 for loss in losses)


@pytest.mark.benchmarks
def test_a_killed_kfac_benchmark_ends_its_trainings_and_continues(tmp_path):
    kept, mark = tmp_path / "kept", f"MARK_OF_THIS_TEST={tmp_path}"
    words = [*TOY_KFAC, "--methods", "adamw", "muon", "--trainings", str(kept)]
    command = [sys.executable, "-m", "benchmarks.kfac", *words]

    def alive() -> list[str]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text())
        return found

    name, _, value = mark.partition("=")
    begun = subprocess.Popen(command, cwd=ROOT, env={**os.environ, name: value})
    wait_until(lambda: kept.exists() and kept.read_text())
    wait_until(lambda: any("kfac_run" in line for line in alive()))
    begun.kill()
    begun.wait()
    wait_until(lambda: not alive())

    done = benchmark("kfac", *words)

    assert " trainings: kept\n" in done.stderr
    keys = [json.loads(line)[0] for line in kept.read_text().splitlines()]
    assert len(set(keys)) == len(keys)  # none was trained twice
    after_trials = [key for key in keys if json.loads(key)["seed"] == 0]
    assert len(after_trials) == 4  # of two methods, at two horizons


@pytest.mark.benchmarks
def test_what_a_step_with_kfac_costs_is_measured_in_steps_of_adamw():
    done = benchmark(
        "kfac",
        *("--only", "step", "--methods", "adamw", "ekfac", "--step_widths", "32"),
        *("--step_tokens", "256", "--factor_update_steps", "3", "--inv_update_steps", "3"),
        *("--text", "examples/data/shakespeare.txt"),
    )
    assert "## A step, width 32, 256 tokens" in done.stdout
    rows = rows_of(done.stdout)
    assert [row[2] for row in rows if row[0] == "| adamw"] == ["1.00"]
    assert [float(row[2]) > 1 for row in rows if row[0] == "| ekfac"] == [True]


def kfac_steps_on_a_made_up_gpu() -> tuple[str, dict[str, int], int]:
    """Where the weights are, how many steps were timed, and how often the host waited."""
    from benchmarks import kfac_run

    made_up_device.install(rank=0, world_size=1)
    made_up_device.cast_as_on_cuda()
    waits: list[int] = []
    torch.get_device_module(made_up_device.NAME).synchronize = lambda: waits.append(1)
    settings = {
        "methods": ["adamw", "ekfac"], "device": made_up_device.NAME, "turns": 2,
        "text": "examples/data/shakespeare.txt", "batch_size": 2, "block_size": 32, "width": 32,
        "layers": 1, "seed": 0, "mixed_precision": "bf16", "factor_update_steps": 2,
        "inv_update_steps": 2, "soap_update_steps": 2, "max_dim": None, "learning_rate": 1e-3,
        "betas": (0.9, 0.95),
    }  # fmt: skip
    with Strict():
        taken = kfac_run.time_steps(settings)
        device = kfac_run.model_of(settings, vocab_size=65).device.type
    return device, {method: len(times) for method, times in taken.items()}, len(waits)


@pytest.mark.extended
def test_steps_with_kfac_are_timed_on_a_gpu_once_it_has_finished_them():
    [(device, timed, waits)] = values(run_ranks(kfac_steps_on_a_made_up_gpu, 1))
    assert device == made_up_device.NAME
    assert timed == {"adamw": 2, "ekfac": 2}
    assert waits == 4


@pytest.mark.benchmarks
def test_the_bases_of_kfac_and_soap_are_compared():
    done = benchmark("kfac", *TOY_KFAC, "--only", "bases")
    rows = rows_of(done.stdout)
    assert rows[0][1:3] == ["attention, 64 tokens a step", "attention, 256 tokens a step"]
    shares = {row[0]: [float(share.rstrip(" |")) for share in row[1:]] for row in rows[1:]}
    for soap, none in zip(shares["| SOAP"], shares["| none (AdamW)"], strict=True):
        assert 0 < none < soap < 1


@pytest.mark.benchmarks
def test_branches_and_means_are_compared_with_runs_of_their_lengths():
    small = ("--lengths", "10", "20", "--seeds", "1", "--every", "2", "--cosine_rates", "0.006")
    done = benchmark("cooldowns", *small)
    rows = rows_of(done.stdout)
    by_length = {row[0]: row[1:] for row in rows}
    assert {key: by_length[key][0] for key in ("| 10", "| 20")} == {"| 10": "2", "| 20": "4"}
    assert "take 22 steps, the separate runs 30" in done.stdout
    assert "0.73x" in done.stdout
    assert "1 of 1" in done.stdout or "0 of 1" in done.stdout


@pytest.mark.benchmarks
def test_rates_with_and_without_mup_are_compared_at_toy_size(tmp_path):
    toy = (
        *("mup", "--kept", str(tmp_path / "kept.jsonl")),
        *("--widths", "16", "32", "--learning_rates", "1e-3", "4e-3", "--steps", "4"),
        *("--batch_size", "2", "--block_size", "8", "--layers", "1"),
        *("--plot", str(tmp_path / "mup.png"), "--output", str(tmp_path / "report.md")),
    )
    done = benchmark(*toy)
    # Two at width 16, where muP changes nothing, and two each at width 32.
    assert done.stderr.count("learning_rate=") == 6
    rows = rows_of(done.stdout)
    of_width = {width: [row for row in rows if row[0] == f"| {width}"] for width in (16, 32)}
    assert of_width[16][0] == of_width[16][1]
    assert of_width[32][0] != of_width[32][1]
    assert (tmp_path / "mup.png").stat().st_size > 1000
    again = benchmark(*toy)
    assert again.stderr == ""
    assert again.stdout.partition("## ")[2] == done.stdout.partition("## ")[2]


def test_the_best_rate_of_a_width_and_its_shift_over_widths():
    losses = {
        64: {0.01: 2.0, 0.02: 1.5, 0.04: 1.75},
        512: {0.01: 1.25, 0.02: 1.5, 0.04: float("nan")},
    }
    assert [best(of_width) for of_width in losses.values()] == [0.02, 0.01]
    assert shift(losses) == 1.0
    assert section("muP", losses).lines == [
        "| width | 0.01 | 0.02 | 0.04 | best rate | lost at 0.02 |",
        "|---|---:|---:|---:|---:|---:|",
        "| 64 | 2.000 | **1.500** | 1.750 | 0.02 | 0.000 |",
        "| 512 | **1.250** | 1.500 | nan | 0.01 | 0.250 |",
    ]


def test_a_line_of_the_log_is_timed(tmp_path):
    source = "import time; time.sleep(0.5); print('step 1', flush=True); time.sleep(0.5)"
    usage = run(replace(program(tmp_path, source), milestone="^step 1"))
    assert 0.5 <= usage.reported["milestone_seconds"] < usage.wall_seconds - 0.4


@pytest.mark.benchmarks
def test_the_benchmark_of_large_corpora_runs_at_toy_size(tmp_path):
    pytest.importorskip("distributed", reason="pip install 'llm-trainers[dask]'")
    tokenizer = str(ROOT / "examples" / "tokenizer")
    size = ("--megabytes", "1", "--shards", "20", "--workers", "2", "--repeats", "1")

    done = benchmark("large_corpus", "--tokenizer_name", tokenizer, *size)

    assert "The files are the same byte for byte." in done.stdout
    assert "| a shard's overhead with Dask: at most 10 ms |" in done.stdout
    assert "| memory of a worker for four times the text: at most 1.1x |" in done.stdout


@pytest.mark.benchmarks
def test_bits_compares_resumed_trainings_with_straight_ones():
    conditions = ["reproducible, straight", "reproducible, resumed with the saved code"]
    sizes = ["--backend", "aot_eager", "--layers", "1", "--width", "32"]
    done = benchmark("bits", *sizes, "--conditions", *conditions)
    assert [row[:2] for row in rows_of(done.stdout)[1:3]] == [
        [f"| {name}", "none"] for name in conditions
    ]
    assert "other bits: at most 0 | 0 of 1 | yes |" in done.stdout


def test_the_first_other_bits_are_found():
    def training(**gradients: str) -> dict[str, object]:
        steps = {"3": {"loss": "a", "norm": 1.0, "gradients": {"w": "b", "v": "c"}}}
        steps["4"] = {"loss": "d", "norm": 2.0, "gradients": {"w": "e", "v": "f"} | gradients}
        return {"steps": steps, "code": []}

    assert bits.first_difference(training(), training()) is None
    difference = bits.first_difference(training(), training(v="g"))
    assert difference == bits.Difference(
        step=5, is_loss_equal=True, tensors=["v"], norms=(2.0, 2.0)
    )
    assert bits._compare("resumed", training(v="g"), training()) == [
        *("resumed", "5", "the loss is equal; 1 gradients, the last v; norm 2 for 2", "")
    ]


def test_trainings_are_reported_before_the_time_ends(tmp_path, monkeypatch):
    output = tmp_path / "bits.md"
    results = iter([{"steps": {}, "code": []}, "failed: no kernel", KeyboardInterrupt()])

    def train(*_: object, **__: object) -> object:
        result = next(results)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(bits, "_train", train)
    monkeypatch.setattr(bits, "find_card", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        bits.report(bits.BitsOptions(output=str(output)), tmp_path)
    rows = rows_of(output.read_text())[1:]
    assert [row[:2] for row in rows] == [
        ["| reproducible, straight", "none"],
        ["| reproducible, resumed with the saved code", "failed: no kernel"],
    ]


def test_a_killed_curve_is_reported_after_each_start_and_in_time(tmp_path, monkeypatch):
    output = tmp_path / "curve.md"
    now = [0.0]
    starts: list[tuple[str, float]] = []

    def start(runs: Any, name: str, kill_at: int | None) -> killed_curve.Part:
        if starts:
            raise KeyboardInterrupt  # the time of the machine ends
        starts.append((name, runs._deadline))
        return killed_curve.Part(first_step=0, last_step=9, end="finished")

    def make_corpus(path: Path, _: int) -> None:
        path.write_text("text")
        now[0] += 30

    monkeypatch.setattr(killed_curve, "make_corpus", make_corpus)
    monkeypatch.setattr(killed_curve, "find_card", lambda: None)
    monkeypatch.setattr(killed_curve.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(killed_curve._Runs, "_start", start)
    options = killed_curve.CurveOptions(size="toy", seconds=100.0, output=str(output))
    with pytest.raises(KeyboardInterrupt):
        killed_curve.report(options, tmp_path)
    assert starts == [("straight", 100.0)]  # the time for the text counts
    assert "| straight | 0 | 9 | finished |" in output.read_text()


def test_a_killed_curve_without_time_for_a_run_is_reported_too(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("text")
    monkeypatch.setattr(killed_curve, "find_card", lambda: None)
    monkeypatch.setattr(killed_curve.time, "monotonic", iter([0.0, 2.0, 2.0]).__next__)
    options = killed_curve.CurveOptions(size="toy", seconds=1.0, text=str(text))
    report_text = killed_curve.report(options, tmp_path)
    assert "Of 0 steps that both runs logged" in report_text


def test_a_run_is_killed_once_in_each_part():
    steps = killed_curve.kill_steps(800, 3)
    assert [step // 200 for step in steps] == [0, 1, 2]
    assert killed_curve.kill_steps(800, 3) == steps


def test_curves_are_compared_where_both_have_a_loss():
    straight = {1: 3.0, 2: 2.0, 3: 1.0}
    assert killed_curve.compare(straight, {1: 3.0, 2: 2.0}) == (0.0, None)
    assert killed_curve.compare(straight, {1: 3.0, 2: 2.5, 3: 0.75, 4: 9.0}) == (0.5, 2)


@pytest.mark.benchmarks
def test_the_curve_of_a_killed_toy_is_that_of_an_uninterrupted_one(tmp_path):
    output = tmp_path / "curve.md"
    text = ROOT / "examples" / "data" / "shakespeare.txt"
    sizes = ["--size", "toy", "--steps", "60", "--kills", "2", "--batch_size", "16"]
    done = benchmark("killed_curve", *sizes, "--text", str(text), "--output", str(output))
    assert "| Largest difference of two losses: at most 0 | 0 | yes |" in done.stdout
    assert "| Bits of the final weights: equal | equal | yes |" in done.stdout
    ends = [row[3].rstrip(" |") for row in rows_of(done.stdout)[1:5]]
    assert ends == ["finished", "killed", "killed", "finished"]
    assert len(Path(f"{output}.tsv").read_text().splitlines()) == 61


@pytest.mark.benchmarks
@pytest.mark.timeout(900)  # four starts of a training, with up to 4 processes
def test_a_run_on_1_4_and_2_ranks_has_the_curve_of_one_rank(tmp_path):
    done = benchmark("ranks_curve", "--steps", "24", "--plot", str(tmp_path / "ranks"))
    rows = rows_of(done.stdout)
    assert [row[0] for row in rows[1:4]] == ["| 1", "| 4", "| 2"]
    assert rows[-1][0] == "| Largest difference of 24 losses: at most 0.001"
    assert rows[-1][-1] == "yes |"
    assert {path.name for path in tmp_path.iterdir()} == {"ranks-dark.svg", "ranks-light.svg"}
