import time

import pytest
import torch

from llm.optim.kfac.factors import UpdateTimes, gram
from tests.optim.kfac.toy import forward_backward, toy_batch, toy_ekfac, toy_model


@pytest.mark.parametrize("size", [1, 256, 257, 300, 1030])
def test_half_of_a_symmetric_product_is_all_of_it(size):
    rows = torch.randn(40, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(gram(rows), rows.T @ rows)
    assert gram(rows).equal(gram(rows).T)


def test_the_parts_of_an_update_add_up_and_updates_are_averaged():
    times = UpdateTimes()
    for seconds in (0.02, 0.04):
        for _ in range(2):
            with times.measure("factor", ends=False):
                time.sleep(seconds / 2)
        with times.measure("factor"):
            pass
    found = times.take()
    assert found.keys() == {"factor_update_ms"}
    assert 29 < float(found["factor_update_ms"]) < 200
    assert times.take() == {}


def test_a_curvature_tells_its_times_and_does_not_save_them():
    model = toy_model()
    optimizer = toy_ekfac(model)
    forward_backward(model, optimizer.curvature, *toy_batch(0))
    optimizer.step()
    state = optimizer.curvature.state_dict()
    metrics = optimizer.curvature.metrics()
    assert float(metrics["factor_update_ms"]) > 0
    assert float(metrics["inv_update_ms"]) > 0
    assert not any("ms" in key for key in state)
    assert "inv_update_ms" not in optimizer.curvature.metrics()


@pytest.mark.parametrize("slow", ["record", "commit"])
def test_recording_and_averaging_are_both_a_part_of_the_factors_update(slow, monkeypatch):
    model = toy_model()
    optimizer = toy_ekfac(model)
    factor = optimizer.curvature.factors[0]
    quick = getattr(factor, slow)

    def slowly(*args, **kwargs):
        time.sleep(0.1)
        return quick(*args, **kwargs)

    monkeypatch.setattr(factor, slow, slowly)
    forward_backward(model, optimizer.curvature, *toy_batch(0))
    optimizer.step()
    assert float(optimizer.curvature.metrics()["factor_update_ms"]) > 100
    assert all(torch.isfinite(p).all() for p in model.parameters())
