"""The losses of the sources in a logging interval, on one rank and on several."""

import copy
import json
import math

import pytest
import torch

from llm.metrics.meter import Meter
from tests.support.meters import all_reduce
from tests.support.operations import Reads

CPU = torch.device("cpu")


def meter_of(rank: int = 0, sources: tuple[str, ...] = ("web", "code")) -> Meter:
    counted = [name for source in sources for name in (f"loss/{source}", f"#loss/{source}")]
    return Meter(CPU, ("loss", *counted), rank=rank)


def add(meter: Meter, sums: list[float], labels: list[int], *, norm: float = 1.0) -> None:
    meter.add(
        0,
        torch.tensor(
            [sum(sums), *(n for pair in zip(sums, labels, strict=True) for n in pair)],
            dtype=torch.float64,
        ),
        sum(labels),
        grad_norm=torch.tensor(norm),
        skipped=torch.tensor(0.0 if math.isfinite(norm) else 1.0),
    )


def read(*meters: Meter) -> dict[str, float]:
    """All-reduce the meters of several ranks, and read the first."""
    all_reduce(*meters)
    return meters[0].read()


def test_each_source_has_the_mean_of_its_own_tokens():
    meter = meter_of()
    add(meter, [6.0, 1.0], [2, 1])
    add(meter, [0.0, 4.0], [0, 4])

    values = read(meter)

    assert (values["loss/web"], values["loss/code"]) == (3.0, 1.0)
    assert values["loss"] == (6 + 1 + 4) / 7


def test_a_source_without_a_sample_in_the_interval_is_left_out():
    meter = meter_of()
    add(meter, [6.0, 1.0], [2, 1])
    read(meter)
    add(meter, [3.0, 0.0], [2, 0])
    assert "loss/code" not in read(meter)


def test_a_skipped_step_is_left_out_of_every_source():
    meter = meter_of()
    add(meter, [6.0, 1.0], [2, 1])
    add(meter, [math.nan, 100.0], [2, 1], norm=math.nan)
    values = read(meter)
    assert (values["loss"], values["loss/web"], values["loss/code"]) == (7 / 3, 3.0, 1.0)


def test_ranks_are_summed_once_however_often_they_are_reduced():
    first, second = meter_of(), meter_of(rank=1)
    add(first, [6.0, 0.0], [2, 0])
    add(second, [2.0, 5.0], [2, 1])
    for meter in (first, second):
        meter.num_tokens.fill_(5)  # of all ranks
    read_before = copy.deepcopy((first, second))
    values = read(first, second)
    assert (values["loss/web"], values["loss/code"], values["loss"]) == (2.0, 5.0, 13 / 5)

    first, second = read_before
    all_reduce(first, second)  # as a save does before the interval ends
    assert read(first, second)["loss/web"] == 2.0


def test_the_sources_of_an_open_interval_continue_after_a_resume():
    before = meter_of()
    add(before, [0.1, 0.7], [3, 2])
    state = json.loads(json.dumps(before.state_dict()))
    # The other start has its sources in another order, and one more.
    after, other = meter_of(sources=("code", "new", "web")), meter_of(rank=1)
    after.load_state_dict(state)
    other.load_state_dict(state)
    assert not other.sums.any()
    add(before, [0.2, 0.1], [3, 1])
    add(after, [0.1, 0.0, 0.2], [1, 0, 3])
    assert read(before) == read(after)


def test_a_checkpoint_without_sources_is_read_and_written_as_before():
    plain = Meter(CPU, rank=0)
    assert "by_source" not in plain.state_dict()
    meter = meter_of()
    meter.load_state_dict(plain.state_dict())
    add(meter, [6.0, 1.0], [2, 1])
    assert read(meter)["loss/web"] == 3.0
    plain.load_state_dict(meter_of().state_dict())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_the_losses_of_the_sources_make_the_loss(scale):
    generator = torch.Generator().manual_seed(0)
    meter = meter_of(sources=("a", "b", "c", "d"))
    labels = [0, 0, 0, 0]
    for _ in range(100):
        counts = torch.randint(1, 1000, (4,), generator=generator)
        sums = counts * scale * torch.rand(4, generator=generator, dtype=torch.float64)
        add(meter, sums.tolist(), counts.tolist())
        labels = [n + more for n, more in zip(labels, counts.tolist(), strict=True)]
    values = read(meter)
    parts = [values[f"loss/{name}"] * n for name, n in zip("abcd", labels, strict=True)]
    assert sum(parts) / sum(labels) == pytest.approx(values["loss"], rel=1e-14)


def test_a_step_is_counted_without_a_read_from_the_device():
    meter = meter_of()
    with Reads() as reads:
        add(meter, [6.0, 1.0], [2, 1])
        meter.all_reduce(lambda sums: sums)
    assert reads.seen == []
