import time

import pytest
import torch

from llm.extensions.kfac.factors import UpdateTimes, compute_gram_matrix
from tests.extensions.kfac.toy import forward_backward, toy_batch, toy_ekfac, toy_model


@pytest.mark.parametrize("size", [1, 256, 257, 300, 1030])
def test_the_gram_matrix_from_one_triangle_equals_the_full_product(size):
    rows = torch.randn(40, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(compute_gram_matrix(rows), rows.T @ rows)
    assert compute_gram_matrix(rows).equal(compute_gram_matrix(rows).T)


def test_times_within_an_update_are_summed_and_updates_are_averaged():
    times = UpdateTimes()
    for seconds in (0.02, 0.04):
        for _ in range(2):
            with times.measure("factor", ends_update=False):
                time.sleep(seconds / 2)
        with times.measure("factor"):
            pass
    found = times.pop_means()
    assert found.keys() == {"factor_update_ms"}
    assert 29 < float(found["factor_update_ms"]) < 200
    assert times.pop_means() == {}


def test_update_times_are_metrics_and_not_saved():
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


@pytest.mark.parametrize("slow", ["record", "update_average"])
def test_factor_update_time_includes_recording_and_averaging(slow, monkeypatch):
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
