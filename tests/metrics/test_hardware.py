from types import SimpleNamespace

import pytest
import torch

from llm.metrics.hardware import (
    device_memory,
    device_peak_flops,
    measure_flops,
    memory_in_use,
    peak_flops,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300A", 980.6),
        ("Intel(R) Data Center GPU Max 1550", 419),
    ],
)
def test_the_peak_flops_are_those_of_the_device(name, tflops):
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["Abacus 2000", "NVIDIA RTX A4000", "NVIDIA A16", "RTX A1000"])
def test_the_peak_of_an_unknown_device_is_unknown(name):
    assert peak_flops(name) is None


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ({512: 0.01, 1024: 0.01, 2048: 0.01}, [512, 1024, 2048]),
        ({512: 1.0}, [512]),
        ({512: 0.01, 1024: 0.2}, [512, 1024]),
    ],
    ids=["larger is faster", "one takes too long", "larger is slower"],
)
def test_measured_products_grow_while_faster_and_take_under_half_a_second(
    monkeypatch, seconds, sizes
):
    now = 0.0
    multiplied = []

    def multiply(one, other, out):
        nonlocal now
        now += seconds[len(one)]
        multiplied.append(len(one))

    monkeypatch.setattr("llm.metrics.hardware.time.perf_counter", lambda: now)
    monkeypatch.setattr("torch.mm", multiply)

    measured = measure_flops(CPU, torch.float32)

    assert sorted(set(multiplied)) == sizes
    assert measured == pytest.approx(max(2 * size**3 / seconds[size] for size in sizes))


def test_an_unknown_accelerator_is_measured_by_large_products(monkeypatch):
    sizes = []
    monkeypatch.setattr("llm.metrics.hardware.synchronize_device", lambda device: None)
    monkeypatch.setattr("torch.mm", lambda one, other, out: sizes.append((len(one), one.dtype)))

    measure_flops(torch.device("meta"), torch.bfloat16)

    assert min(sizes) == (2048, torch.bfloat16)


def test_a_cpu_is_measured_in_the_precision_of_the_run(monkeypatch, caplog):
    caplog.set_level("INFO", logger="llm")
    asked = []
    monkeypatch.setattr(
        "llm.metrics.hardware.measure_flops", lambda device, dtype: asked.append(dtype) or 2.5e11
    )
    for precision in ("no", "bf16", "fp16"):
        device_peak_flops(CPU, precision)
    assert asked == [torch.float32, torch.bfloat16, torch.float16]
    assert "at least 0.25 TFLOP/s" in caplog.messages[1]
    assert "torch.bfloat16" in caplog.messages[1]


@pytest.mark.parametrize(
    ("kind", "name", "tflops"),
    [("cuda", "NVIDIA H100 80GB HBM3", 989), ("xpu", "Intel(R) Data Center GPU Max 1550", 419)],
)
def test_the_peak_of_a_known_device_is_not_measured(monkeypatch, kind, name, tflops):
    monkeypatch.setattr(torch.get_device_module(kind), "get_device_name", lambda device: name)
    assert device_peak_flops(torch.device(kind, 0), "bf16") == tflops * 1e12


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_memory_in_use_is_the_counter_of_the_device_where_there_is_one(monkeypatch, kind):
    reset = []
    backend = torch.get_device_module(kind)
    monkeypatch.setattr(backend, "max_memory_allocated", lambda device: 100 + device.index)
    monkeypatch.setattr(backend, "reset_peak_memory_stats", reset.append)

    assert memory_in_use(torch.device(kind, 1)) == 101
    assert reset == [torch.device(kind, 1)]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_memory_of_a_device_is_the_one_that_torch_reports(monkeypatch, kind):
    backend = torch.get_device_module(kind)
    monkeypatch.setattr(backend, "is_available", lambda: True)
    reported = SimpleNamespace(total_memory=85_899_345_920)
    monkeypatch.setattr(backend, "get_device_properties", lambda device: reported)

    assert device_memory(torch.device(kind, 1)) == 85_899_345_920
    assert device_memory(CPU) > 2**28


def test_memory_in_use_grows_with_allocations():
    before = memory_in_use(CPU)
    assert before is not None
    held = torch.ones(64 * 2**20 // 4)
    after = memory_in_use(CPU)
    assert after is not None
    assert after - before > 60 * 2**20
    assert held.numel()
