"""Profiled steps: the trace, the table, and what their times are put down to."""

import contextlib
import gzip
import json
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from llm.data.loader import StepBatch
from llm.extensions.profiler.step_profiler import StepProfiler, format_table, sum_seconds_by_class
from tests.support.training import Bench


def profiled(work):
    with torch.profiler.profile() as profile:
        work()
    return sum_seconds_by_class(profile.events(), on_gpu=False)


def test_matmuls_attention_and_the_optimizer_are_classified():
    matrix = torch.ones(256, 256)
    heads = torch.ones(1, 4, 128, 64)
    parameter = torch.nn.Parameter(torch.ones(100_000))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    works = {
        "matmul": lambda: matrix @ matrix,
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads),
        "optimizer": optimizer.step,
    }
    for name, work in works.items():
        work()
        busy = profiled(work)
        assert max(busy, key=busy.get) == name, busy


def test_a_product_inside_the_loss_counts_as_loss():
    hidden = torch.ones(64, 32, requires_grad=True)

    def work():
        with torch.profiler.record_function("_ChunkedCrossEntropy"):
            hidden @ torch.ones(32, 512)

    busy = profiled(work)
    assert busy["loss"] > 0
    assert busy["matmul"] == 0


def event(name, *, device="CPU", microseconds, around=None):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        self_device_time_total=microseconds,
        self_cpu_time_total=1,
        cpu_parent=around,
    )


def test_a_kernel_counts_once_as_the_operation_that_started_it():
    step = event("Optimizer.step#AdamW.step", microseconds=0)
    events = [
        step,
        event("aten::_fused_adamw_", microseconds=20, around=step),
        event("adamw_kernel", device="CUDA", microseconds=20),
        event("Optimizer.step#AdamW.step", device="CUDA", microseconds=20),
        event("aten::mm", microseconds=100),
        event("ampere_gemm", device="CUDA", microseconds=100),
    ]
    busy = sum_seconds_by_class(events, on_gpu=True)
    assert {name: round(1e6 * seconds) for name, seconds in busy.items() if seconds} == {
        "optimizer": 20,
        "matmul": 100,
    }


def test_profiled_steps_outside_this_run_get_a_warning(tmp_path, caplog):
    profiler = StepProfiler(
        range(1, 3),
        folder=tmp_path,
        rank=0,
        device=torch.device("cpu"),
        paused=contextlib.nullcontext,
    )
    with caplog.at_level("INFO", logger="llm"):
        profiler.before_step(1)
        profiler.after_step(2, cast(StepBatch, None))
        profiler.close()
    assert "--profile 1:3: this start did not train all" in caplog.text
    assert not list(tmp_path.iterdir())


def test_time_without_any_operation_counts_as_waiting():
    lines = format_table({"matmul": 0.2, "loss": 0.1}, 0.4, num_steps=2)
    assert lines == [
        "profile of 2 steps, 200.0 ms each:",
        "  matmul                 100.0 ms   50.0%",
        "  loss                    50.0 ms   25.0%",
        "  waiting                 50.0 ms   25.0%",
    ]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.layouts)])
def test_a_run_profiles_the_steps_that_are_asked_for(tmp_path, ranks):
    run = Bench(tmp_path).train_well(ranks=ranks, max_train_steps=5, profile="2:4")
    folder = run.folder / "profile"
    assert "profile of 2 steps" in (folder / "profile.txt").read_text()
    assert "profile of 2 steps" in run.output
    for rank in range(ranks):
        with gzip.open(folder / f"rank{rank}.trace.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        steps = [event for event in events if event.get("name", "").startswith("Optimizer.step")]
        assert len({event["ts"] for event in steps}) == 2
