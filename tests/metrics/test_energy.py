"""The joules of GPUs, by a made-up NVML."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm.metrics.energy import EnergyCounter
from llm.metrics.wall_time import WallTime, goodput_rows
from tests.support.ranks import run_ranks, values

IDENTIFIER = "11111111-2222-3333-4444-555555555555"


class MadeUpNvml:
    """The module pynvml with one GPU, that a test lets use energy."""

    class NVMLError(Exception):
        pass

    def __init__(self, millijoules: int) -> None:
        self.millijoules = millijoules
        self.has_counter = True

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, identifier: str) -> str:
        if identifier != f"GPU-{IDENTIFIER}":
            raise self.NVMLError
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle"
        if not self.has_counter:
            raise self.NVMLError
        return self.millijoules


def patch(monkeypatch: pytest.MonkeyPatch, nvml: Any, identifier: str = IDENTIFIER) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = SimpleNamespace(uuid=identifier)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_the_joules_since_the_start_are_counted(monkeypatch):
    nvml = MadeUpNvml(millijoules=5_000_000)
    patch(monkeypatch, nvml)
    counter = EnergyCounter(torch.device("cuda", 0), world_size=1)
    assert counter.total_joules() == 0.0
    nvml.millijoules += 1500
    assert counter.total_joules() == 1.5


@pytest.mark.parametrize("reason", ["a cpu", "no package", "another gpu", "no counter"])
def test_joules_that_nothing_counts_are_unknown(reason, monkeypatch):
    nvml = MadeUpNvml(millijoules=1)
    nvml.has_counter = reason != "no counter"
    is_known = reason != "no package"
    patch(
        monkeypatch, nvml if is_known else None, "other" if reason == "another gpu" else IDENTIFIER
    )
    device = torch.device("cpu") if reason == "a cpu" else torch.device("cuda", 0)
    assert EnergyCounter(device, world_size=1).total_joules() is None


def count_on_rank(rank_without_counter: int | None) -> float | None:
    """Let rank r use r + 1 joules, and return the sum."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    nvml = MadeUpNvml(millijoules=7_000)
    nvml.has_counter = rank != rank_without_counter
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch, nvml)
        counter = EnergyCounter(torch.device("cuda", 0), world_size=dist.get_world_size())
        nvml.millijoules += 1000 * (rank + 1)
        return counter.total_joules()


@pytest.mark.parametrize(("rank_without_counter", "joules"), [(None, 3.0), (1, None)])
def test_the_joules_of_all_ranks_are_added_or_unknown_on_all(rank_without_counter, joules):
    assert values(run_ranks(count_on_rank, 2, rank_without_counter)) == [joules, joules]


def started(path: Any, joules: float | None) -> WallTime:
    account = WallTime()
    account.open(path, num_devices=1)
    account.begin_training(seconds=0.0, tokens=0)
    account.start_joules = joules
    return account


def test_the_account_adds_the_joules_of_all_starts(tmp_path):
    path = tmp_path / "goodput.json"
    started(path, 0.0).write()  # killed before its first report
    started(path, 300.0).write()
    account = started(path, 100.0)
    account.tokens = 2000

    results = account.results()
    assert results["energy_joules"] == 400.0
    assert results["tokens_per_joule"] == 5.0
    rows = goodput_rows(results)
    assert (rows["energy joules"], rows["tokens per joule"]) == (400.0, 5.0)


@pytest.mark.parametrize("joules", [(None, 100.0), (100.0, None)])
def test_joules_are_absent_if_one_start_does_not_know_them(joules, tmp_path):
    path = tmp_path / "goodput.json"
    started(path, joules[0]).write()
    account = started(path, joules[1])
    assert "energy_joules" not in account.results()
    assert "tokens per joule" not in goodput_rows(account.results())
    account.write()
    assert json.loads(path.read_text())["energy_joules"] is None
