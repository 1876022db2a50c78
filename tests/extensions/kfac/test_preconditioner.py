import pytest
import torch
from torch import nn

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.layers import find_covered_layers
from llm.extensions.kfac.preconditioner import Preconditioner
from tests.extensions.kfac.toy import forward_backward, toy_batch, toy_model


def make(model, *, damping=0.01, kl_clip=None, **options):
    curvature = Curvature(find_covered_layers(model), method="eigen", **options)
    return Preconditioner(curvature, model.parameters(), damping=damping, kl_clip=kl_clip)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_gradient_is_multiplied_by_the_damped_inverse_and_keeps_its_norm():
    model = toy_model()
    kfac = make(model)
    forward_backward(model, kfac.curvature, *toy_batch(0))
    before = {layer.name: layer.gradient().clone() for layer in kfac.curvature.layers}

    kfac.precondition(learning_rate=0.1)

    for layer in kfac.curvature.layers:
        a, g = (factor.averages()[0].double() for factor in kfac.curvature.factors_of(layer))
        mean_a, mean_g = a.trace() / len(a), g.trace() / len(g)
        whole = torch.kron(g, a)
        damped = whole + 0.01 * mean_a * mean_g * torch.eye(len(whole))
        gradient = before[layer.name].double().flatten()
        expected = torch.linalg.solve(damped, gradient)
        expected *= gradient.norm() / expected.norm()
        found = layer.gradient().double().flatten()
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


def test_the_update_is_bounded_in_the_measure_of_the_curvature():
    model = toy_model()
    kfac = make(model, kl_clip=1e-4)
    forward_backward(model, kfac.curvature, *toy_batch(0))
    before = gradients(model)
    kfac.precondition(learning_rate=0.1)

    after = gradients(model)
    unscaled = sum((before[name] * after[name]).sum() for name in before) / kfac.kl_scale
    assert kfac.kl_scale < 1
    assert 0.1**2 * unscaled * kfac.kl_scale**2 == pytest.approx(1e-4, rel=1e-4)
    metrics = kfac.metrics()
    assert metrics["clipped"] == 1
    assert metrics["damping"] == pytest.approx(0.01)
    assert metrics["fallbacks"] == 0
    assert metrics["condition"] > 1


def test_a_step_with_an_infinite_gradient_changes_no_state():
    results = []
    for seeds in ([0, 1, 2], [0, 2]):
        model = toy_model()
        kfac = make(model, factor_update_steps=1, inv_update_steps=1)
        for seed in seeds:
            forward_backward(model, kfac.curvature, *toy_batch(seed))
            if seed == 1:
                model.second.weight.grad[0, 0] = torch.inf
                before = gradients(model)
            kfac.precondition(learning_rate=0.1)
            if seed == 1:
                torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
        results.append(gradients(model))

    assert all(torch.isfinite(gradient).all() for gradient in results[0].values())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_layers_that_never_saw_a_token_keep_their_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kfac = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with kfac.curvature.capture_stats():
        pass
    kfac.precondition(learning_rate=0.1)

    torch.testing.assert_close(gradients(model)["0.weight"], torch.ones(3, 3))
