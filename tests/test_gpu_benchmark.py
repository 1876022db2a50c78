"""The benchmark of training on a GPU, rehearsed on the CPU."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import gpu
from benchmarks.gpu import Card, Row, goals, rows_of, section
from benchmarks.gpu_programs import (
    MODELS,
    Training,
    flops_per_token,
    our_program,
    peer_program,
    write_model,
    write_tokens,
)
from benchmarks.gpu_timing import Period, Program, Sampler, Timed, time_program
from benchmarks.measure import CaseFailed
from llm.models.sizes import active_parameters, parameter_counts
from tests.support.processes import is_alive, wait_until

ROOT = Path(__file__).parent.parent
TIMED = Timed(
    ms=100.0, ms_median=99.0, steps=100, first_line=20.0, allocated=40 * 10**9, used=50 * 10**9,
    mhz=1980.0, watts=650.0, celsius=60.0,
)  # fmt: skip


def program(folder: Path, source: str) -> Program:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return Program(
        command=command, folder=folder / "run", line=r"^step (?P<step>\d+) (?P<peak>\d+)"
    )


def test_time_counts_after_the_warm_up_and_the_program_is_killed_then(tmp_path):
    source = """
        import itertools, time
        for step in itertools.count(10, 10):
            time.sleep(0.8 if step <= 20 else 0.1)
            print("step", step, 1000 + step)
    """
    period = Period(warm_up=20, seconds=0.8, multiple=50)
    timed = time_program(program(tmp_path, source), period, limit=60)
    assert timed.steps in (50, 100)  # 100, unless the machine is so busy that 50 take 0.8 s
    assert timed.ms * timed.steps >= 800
    # A step takes 10 ms, or less if lines are read late; the steps before take 80.
    assert 5 <= timed.ms < 40
    assert 5 <= timed.ms_median < 40
    assert timed.first_line > 0.8
    assert timed.allocated == 1020 + timed.steps


@pytest.mark.parametrize(
    ("source", "limit", "complaint"),
    [
        ("print('step 1 1'); exit('no such kernel')", 60, "exit code 1 after 1 .*no such kernel"),
        ("import time; time.sleep(60)", 0.5, "took [0-9]+ s after 0 readings of its loss"),
    ],
)
def test_a_program_that_ends_or_hangs_has_failed(tmp_path, source, limit, complaint):
    with pytest.raises(CaseFailed, match=f"(?s){complaint}"):
        time_program(program(tmp_path, source), Period(warm_up=0, seconds=9), limit=limit)


def test_the_program_of_a_killed_benchmark_ends(tmp_path):
    source = f"""
        import sys
        from pathlib import Path
        from benchmarks.gpu_timing import Period, Program, time_program
        sleep = "import os, time; open('pid.txt', 'w').write(str(os.getpid())); time.sleep(300)"
        folder = Path({str(tmp_path)!r}, "run")
        program = Program(command=[sys.executable, "-c", sleep], folder=folder, line="step")
        time_program(program, Period(warm_up=0, seconds=1), limit=300)
    """
    benchmark = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], cwd=ROOT)
    pid = tmp_path / "run" / "pid.txt"
    wait_until(lambda: pid.exists() and pid.read_text())
    assert is_alive(int(pid.read_text()))
    benchmark.kill()
    benchmark.wait()
    wait_until(lambda: not is_alive(int(pid.read_text())))


def test_the_gpu_is_sampled_while_steps_count(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    printed = """\
        100, 50.0, 30, 70000
        1980, 650.0, 60, 40000
        1950, [N/A], 61, 1
        1960, 640.0, 62, 50000"""
    script.write_text(f"#!{sys.executable}\nprint({printed!r})\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sampler = Sampler()
    sampler._thread.join(timeout=60)
    sampler.stop()
    times = [at for at, _ in sampler._rows]
    figures = sampler.figures(since=times[1])
    assert figures == {"mhz": 1970, "watts": 645, "celsius": 61, "used": 70000 * 2**20}


def test_without_nvidia_smi_nothing_is_sampled(monkeypatch):
    monkeypatch.setenv("PATH", "")
    sampler = Sampler()
    sampler.stop()
    nothing = {"mhz": None, "watts": None, "celsius": None, "used": None}
    assert sampler.figures(since=0) == nothing


def test_a_token_is_as_frequent_as_its_rank_says(tmp_path):
    write_tokens(50_257, tmp_path / "tokens", 200_000)
    ids = np.fromfile(tmp_path / "tokens" / "train.bin", dtype=np.uint16)
    counts = np.bincount(ids)
    assert len(ids) == 200_000
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert counts[0] / len(ids) == pytest.approx(1 / (np.log(50_257) + 0.5772), rel=0.05)


def test_a_micro_batch_fills_the_memory_of_the_gpu():
    sizes = {
        (name, length, gib): MODELS[name].batch_size(length, memory=gib * 2**30)
        for name, length, gib in [
            ("124M", 1024, 79.1),
            ("124M", 4096, 79.1),
            ("124M", 1024, 39.4),
            ("1.1B", 2048, 139.8),
            ("1.1B", 2048, 180.0),
            ("1.1B", 4096, 15.8),
        ]
    }
    assert list(sizes.values()) == [64, 16, 32, 8, 16, 1]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("124M", 124e6), ("350M", 355e6), ("1.1B", 1.1e9), ("3B", 3.21e9), ("8B", 8.03e9)],
)
def test_models_have_the_size_of_their_name(tmp_path, name, parameters):
    write_model(MODELS[name], 1024, tmp_path / "model")
    shape = MODELS[name]
    attention = 12 * shape.layers * shape.width * 1024
    weights = (flops_per_token(tmp_path / "model", 1024) - attention) / 6
    has_embedding = shape.is_llama and not shape.is_tied
    # Without positions, and of an untied pair of embedding and head only the head.
    assert weights + shape.vocab_size * shape.width * has_embedding == pytest.approx(
        parameters, rel=0.02
    )


def measured(monkeypatch, *arguments: str, results: list[object]) -> list[str]:
    """Run the benchmark with results, or errors, in place of programs; return the programs."""
    ran: list[str] = []

    def time_one(program: Program, period: Period, *, limit: float) -> Timed:
        result = results[len(ran)]
        ran.append(" ".join(program.command))
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, Timed)
        return result

    monkeypatch.setattr(gpu, "time_program", time_one)
    monkeypatch.setattr(gpu, "write_tokens", lambda *_: None)
    gpu.main(["--models", "124M", "--lengths", "1024", *arguments])
    return ran


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setattr(gpu, "find_card", lambda: Card("NVIDIA H100 80GB HBM3", 85e9))


def test_a_stopped_benchmark_has_written_its_rows_and_continues(h100, tmp_path, monkeypatch):
    report = tmp_path / "report.md"
    arguments = ["--only", "speed", "precisions", "--output", str(report)]
    stopped = [TIMED, TIMED, CaseFailed("no kernel"), TIMED, KeyboardInterrupt()]
    ran = measured(monkeypatch, *arguments, results=stopped)
    assert len(ran) == 5
    text = report.read_text()
    assert "| llm | 64 | 655,360 | 100.00 | 99.00 |" in text
    assert "Not measured yet: 124M 1024 llm, fp16, 124M 1024 llm, TF32" in text
    assert "HF Trainer failed: no kernel" in text

    ran = measured(monkeypatch, *arguments, results=[TIMED] * 5)
    failed, fp16, tf32, *bf16 = ran
    assert "benchmarks.peers.hf_trainer" in failed
    assert "--mixed_precision fp16" in fp16
    assert "--mixed_precision no" in tf32
    assert [command.split("--torch_compile ")[1] for command in bf16] == [
        "--fused_kernels all",
        "--fp8_head",
    ]
    assert "Not measured yet" not in report.read_text()


def test_half_the_batch_is_tried_while_memory_is_short(h100, tmp_path, monkeypatch):
    short = CaseFailed("exit code 1: torch.OutOfMemoryError: CUDA out of memory.")
    report = tmp_path / "report.md"
    arguments = ["--only", "speed", "--output", str(report)]
    ran = measured(monkeypatch, *arguments, results=[short, short, TIMED, TIMED, TIMED])
    sizes = [command.split("--per_device_train_batch_size ")[1].split()[0] for command in ran[:3]]
    assert sizes == ["64", "32", "16"]
    assert "| llm | 16 | 163,840 |" in report.read_text()


def test_a_program_that_failed_is_named_and_has_no_figures():
    ours = {"batch_size": 64, **TIMED.as_json()}
    found = {"llm": [ours, {**ours, "ms": 110.0}], "plain loop": [{"failed": "exit code 1: bad"}]}
    lines = section("124M", 1024, found, flops=1e9, peak=989e12).lines
    assert lines[2] == (
        "| llm | 64 | 625,571 (595,782-655,360) | 105.00 | 99.00 | 63.3% | 40.00 | 50.00 | 20.0 "
        "| 1,980 | 650 | 60 |"
    )
    assert lines[3:] == ["", "plain loop failed: exit code 1: bad"]


def test_a_program_that_torch_could_not_compile_is_named(tmp_path):
    source = """
        print("[0/0] WON'T CONVERT forward")
        for step in range(10): print("step", step, 1)
    """
    timed = time_program(program(tmp_path, source), Period(warm_up=0, seconds=0), limit=60)
    assert timed.runs_uncompiled
    found = {"llm": [{"batch_size": 64, **timed.as_json()}]}
    lines = section("124M", 1024, found, flops=1e9, peak=None).lines
    assert lines[-1] == "llm: torch could not compile a part, and ran it as it is."


def test_our_trainer_finds_packages_of_a_folder_that_the_user_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/site")
    training = Training(
        model=tmp_path, tokens=tmp_path, shape=MODELS["toy"], length=8, batch_size=1, on_gpu=False
    )
    for command in (our_program(training, tmp_path, ()), peer_program("x", training, tmp_path)):
        assert command.environment["PYTHONPATH"] == f"{ROOT}{os.pathsep}/site"


def test_goals_compare_means_of_what_was_measured():
    ours = {"batch_size": 8, **TIMED.as_json()}
    found = {
        "llm": [ours],
        "nanoGPT": [{**ours, "ms": 120.0}],
        "llm, fp16": [{**ours, "ms": 110.0}],
        "llm, AdamW, 8k tokens": [{**ours, "ms": 100.0, "ms_median": 100.0}],
        "llm, K-FAC, 8k tokens": [{**ours, "ms": 120.0, "ms_median": 100.0}],
    }
    reached = goals("124M", 1024, found, flops=1e9, peak=1e14)
    assert {goal.what.partition("tokens: ")[2]: goal.measured for goal in reached} == {
        "MFU in bf16: at least 0.5x": "0.82x",
        "speed, nanoGPT's = 1: at least 1.1x": "1.20x",
        "fp16's speed, bf16's = 1: at least 0.95x": "0.91x",
        "K-FAC's step, AdamW's = 1: at most 1.15": "1.20",
    }
    assert goals("124M", 1024, {}, flops=1e9, peak=1e14) == []


def test_every_program_runs_once_before_one_is_repeated():
    options = gpu.GPUBenchmarkOptions(models=("350M", "1.1B"), repeats=2, nanogpt="nanoGPT")
    rows = rows_of(options)
    half = len(rows) // 2
    assert [row.repeat for row in rows] == [0] * half + [1] * half
    assert rows[:half] == [replace(row, repeat=0) for row in rows[half:]]
    assert Row(model="350M", length=4096, program="nanoGPT", repeat=0) in rows
    assert not any(row.program == "nanoGPT" for row in rows if row.model == "1.1B")


def test_only_the_given_programs_run_in_their_order_and_alternate():
    options = gpu.GPUBenchmarkOptions(
        models=("124M",), lengths=(1024,), repeats=2, nanogpt="x", programs=("nanoGPT", "llm")
    )
    assert [row.program for row in rows_of(options)] == ["nanoGPT", "llm", "nanoGPT", "llm"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("8B", {"llm, recomputed"}),
        ("1.1B", {"llm, fp8", "llm, SOAP", "llm, Muon", "llm, EKFAC", "llm"}),
    ],
)
def test_a_model_has_the_programs_that_can_train_it(model, expected):
    rows = rows_of(gpu.GPUBenchmarkOptions(models=(model,)))
    assert expected <= {row.program for row in rows}
    assert ("llm" in {row.program for row in rows}) == (model == "1.1B")
    gpt2 = rows_of(gpu.GPUBenchmarkOptions(models=("124M",)))
    assert not {"llm, fp8", "llm, recomputed"} & {row.program for row in gpt2}


def test_a_program_has_its_options_in_the_precision_of_its_row(h100, tmp_path, monkeypatch):
    names = ["llm, SOAP", "llm, fp16"]
    report = ["--output", str(tmp_path / "report.md")]
    ran = measured(monkeypatch, "--programs", *names, *report, results=[TIMED, TIMED])
    assert ran[0].endswith("--mixed_precision bf16 --torch_compile --optimizer soap")
    assert "--mixed_precision fp16 --torch_compile" in ran[1]
    assert "--optimizer" not in ran[1]


def test_tokens_of_a_large_vocabulary_fit_16_bits(tmp_path):
    write_tokens(128_256, tmp_path / "tokens", 20_000)
    ids = np.fromfile(tmp_path / "tokens" / "train.bin", dtype=np.uint16)
    assert (ids < 100).mean() > 0.3  # frequent ids stay frequent


def test_neither_nanogpt_nor_kfac_trains_a_mixture_of_experts():
    rows = rows_of(gpu.GPUBenchmarkOptions(models=("OLMoE",), nanogpt="nanoGPT"))
    programs = {row.program for row in rows}
    assert programs == {
        *("llm", "plain loop", "HF Trainer"),
        *("llm, not compiled", "llm, fp16", "llm, TF32"),
        *("llm, all fused kernels", "llm, fp8 head"),
    }


def test_the_mixture_is_olmoe_with_fewer_layers(tmp_path):
    write_model(MODELS["OLMoE"], 1024, tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    sizes = (config.hidden_size, config.intermediate_size, config.num_experts_per_tok)
    assert (config.model_type, config.num_experts, *sizes) == ("olmoe", 64, 2048, 1024, 8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert active_parameters(model) == pytest.approx(0.61e9, rel=0.01)
    assert parameter_counts(model)["total"] == pytest.approx(2.72e9, rel=0.01)


@pytest.mark.benchmarks
@pytest.mark.parametrize(
    ("model", "program"), [("toy-llama", "llm, recomputed"), ("toy", "llm, SOAP")]
)
def test_one_program_of_a_toy_is_timed(model, program):
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--models", model, "--lengths", "32"),
        *("--seconds", "0.2", "--programs", program),
    ]
    hidden = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| llm")]
    assert [row.split(" | ")[0] for row in rows] == [f"| {program}"]


@pytest.mark.benchmarks
def test_a_toy_mixture_is_timed(tmp_path):
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--models", "toy-moe", "--lengths", "32"),
        *("--only", "speed", "--seconds", "0.2"),
    ]
    hidden = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "## toy mixture, 32 tokens" in done.stdout
    assert all(f"| {name} | 2 |" in done.stdout for name in ("llm", "plain loop", "HF Trainer"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "need a GPU, and torch sees none"),
        (("--models", "toy", "--nanogpt", "nowhere"), "--nanogpt nowhere holds no train.py."),
        (("--models", "toy", "--programs", "nanoGTP"), "--programs nanoGTP is none of: llm; nano"),
        (("--models", "toy", "--rows", "no/folder/x"), "a folder that does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, complaint, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "find_card", lambda: None)
    assert gpu.main(arguments) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


NANOGPT = """
import sys, time
assert "--log_interval=10" in sys.argv and "--max_iters=1000000" in sys.argv
for step in range(10**6):
    time.sleep(0.001)
    if step % 10 == 0:
        print(f"iter {step}: loss 10.9, time 1.00ms, mfu -100.00%")
"""


@pytest.mark.benchmarks
def test_all_programs_are_timed_at_toy_size(tmp_path):
    (tmp_path / "train.py").write_text(NANOGPT)  # prints what nanoGPT's prints
    report = tmp_path / "report.md"
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--models", "toy", "--lengths", "32"),
        *("--only", "speed", "kfac", "--seconds", "0.5", "--nanogpt", str(tmp_path)),
        *("--output", str(report)),
    ]
    # The toy trains on the CPU on every machine.
    hidden = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "- GPU: none, so that the figures say nothing" in done.stdout
    assert report.read_text() == done.stdout[:-1]
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    speeds = {row[0][2:]: float(row[2].replace(",", "")) for row in rows if row[0] != "| program"}
    assert speeds.keys() == {
        *("llm", "nanoGPT", "plain loop", "HF Trainer"),
        *("llm, AdamW, 8k tokens", "llm, K-FAC, 8k tokens"),
    }
    assert min(speeds.values()) > 0
    kept = [json.loads(line) for line in Path(f"{report}.rows").read_text().splitlines()]
    assert kept[-1][2]["steps"] % 50 == 0  # whole intervals between K-FAC's updates

    again = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.partition("## ")[2] == done.stdout.partition("## ")[2]
