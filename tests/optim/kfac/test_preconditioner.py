import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.layers import find_layers
from llm.optim.kfac.preconditioner import Preconditioner
from tests.optim.kfac.toy import forward_backward, toy_batch, toy_model

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.npz"))


def make(model, method="eigen", *, damping=0.01, kl_clip=None, graft=False, **options):
    curvature = Curvature(find_layers(model), method=method, damping=damping, **options)
    return Preconditioner(
        curvature, model.parameters(), damping=damping, kl_clip=kl_clip, graft=graft
    )


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def relative_error(found, expected):
    return (found - torch.from_numpy(expected)).abs().max() / np.abs(expected).max()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_compat_is_the_arithmetic_of_kfac_pytorch(path):
    """Recorded from runs of kfac-pytorch 0.4.2: factors, gradients before and after, weights."""
    data = np.load(path)
    meta = json.loads(str(data["meta"]))
    model = nn.Sequential()
    model.fc1, model.tanh, model.fc2 = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5, bias=False)
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(data[f"s0.param.{name}"])
    kfac = make(
        model,
        {"eigen": "eigen", "inverse": "cholesky"}[meta["compute_method"]],
        damping=meta["damping"],
        kl_clip=meta["kl_clip"],
        factor_update_steps=meta["factor_update_steps"],
        inv_update_steps=meta["inv_update_steps"],
        factor_decay=meta["factor_decay"],
        compat=True,
    )
    for step in range(3):
        model.zero_grad()
        x, y = torch.from_numpy(data["x"][step]), torch.from_numpy(data["y"][step])
        with kfac.curvature.capture_stats(token_weight=1 / y.numel()):
            for inputs, labels in zip(x, y, strict=True):
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
                (loss / len(x)).backward()
        for name, gradient in gradients(model).items():
            assert relative_error(gradient, data[f"s{step}.grad.{name}"]) < 1e-5

        kfac.precondition(learning_rate=meta["lr"])

        for layer in kfac.curvature.layers:
            for side, factor in zip("AG", kfac.curvature.factors_of(layer), strict=True):
                expected = data[f"s{step}.{side}.{layer.name}"]
                assert relative_error(factor.averages()[0], expected) < 1e-5
            result = layer.gradient() / kfac.kl_scale
            assert relative_error(result, data[f"s{step}.v.{layer.name}"]) < 2e-4
        assert float(kfac.kl_scale) == pytest.approx(float(data[f"s{step}.nu"]), rel=2e-4)
        for name, parameter in model.named_parameters():
            assert relative_error(parameter.grad, data[f"s{step}.pgrad.{name}"]) < 2e-4
            parameter.data -= meta["lr"] * parameter.grad
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.detach(), data[f"final.param.{name}"]) < 1e-5


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_a_gradient_is_multiplied_by_both_damped_inverses(method):
    model = toy_model()
    kfac = make(model, method)
    forward_backward(model, kfac.curvature, *toy_batch(0))
    before = {layer.name: layer.gradient().clone() for layer in kfac.curvature.layers}

    kfac.precondition(learning_rate=0.1)

    for layer in kfac.curvature.layers:
        a, g = (factor.averages()[0].double() for factor in kfac.curvature.factors_of(layer))
        mean_a, mean_g = a.trace() / len(a), g.trace() / len(g)
        if method == "eigen":
            whole = torch.kron(g, a)
            damped = whole + 0.01 * mean_a * mean_g * torch.eye(len(whole))
        else:
            pi = (mean_a / mean_g).sqrt()
            root = (0.01 * mean_a * mean_g).sqrt()
            damped = torch.kron(
                g + root / pi * torch.eye(len(g)), a + pi * root * torch.eye(len(a))
            )
        expected = torch.linalg.solve(damped, before[layer.name].double().flatten())
        found = layer.gradient().double().flatten()
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_the_result_does_not_depend_on_micro_batches_or_loss_scale(method):
    results = []
    for split in ({}, {"micro_batches": 4}, {"loss_scale": 4096.0}):
        model = toy_model()
        kfac = make(model, method)
        for seed in range(3):
            forward_backward(model, kfac.curvature, *toy_batch(seed), **split)
            kfac.precondition(learning_rate=0.1)
        results.append(gradients(model))

    for other in results[1:]:
        for name, expected in results[0].items():
            assert (other[name] - expected).abs().max() < 2e-4 * expected.abs().max()


def test_grafting_keeps_the_norm_of_each_layers_gradient():
    model = toy_model()
    kfac = make(model, graft=True)
    forward_backward(model, kfac.curvature, *toy_batch(0))
    norms = [layer.gradient().norm() for layer in kfac.curvature.layers]

    kfac.precondition(learning_rate=0.1)

    after = [layer.gradient().norm() for layer in kfac.curvature.layers]
    torch.testing.assert_close(after, norms)


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


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_a_step_with_an_infinite_gradient_changes_no_state(method):
    results = []
    for seeds in ([0, 1, 2], [0, 2]):
        model = toy_model()
        kfac = make(model, method, factor_update_steps=1, inv_update_steps=1)
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


def test_conv1d_and_linear_with_equal_weights_get_the_same_gradient():
    linear = toy_model()
    conv = copy.deepcopy(linear)
    conv.first = Conv1D(8, 6)
    conv.first.weight.data = linear.first.weight.data.T.clone()
    conv.first.bias.data = linear.first.bias.data.clone()
    for model in (linear, conv):
        kfac = make(model)
        forward_backward(model, kfac.curvature, *toy_batch(0))
        kfac.precondition(learning_rate=0.1)

    torch.testing.assert_close(conv.first.weight.grad.T, linear.first.weight.grad)
    torch.testing.assert_close(conv.first.bias.grad, linear.first.bias.grad)


@pytest.mark.parametrize("compat", [False, True])
def test_a_resumed_run_continues_bit_by_bit(compat):
    options = {"factor_update_steps": 2, "inv_update_steps": 3, "compat": compat}
    model = toy_model()
    kfac = make(model, **options)
    results = []
    for seed in range(12):
        if seed == 7:
            state = copy.deepcopy(kfac.state_dict())
        forward_backward(model, kfac.curvature, *toy_batch(seed))
        kfac.precondition(learning_rate=0.1)
        results.append(gradients(model))
    resumed = make(model, **options)
    resumed.load_state_dict(state)
    for seed in range(7, 12):
        forward_backward(model, resumed.curvature, *toy_batch(seed))
        resumed.precondition(learning_rate=0.1)

        torch.testing.assert_close(gradients(model), results[seed], rtol=0, atol=0)


def test_layers_that_never_saw_a_token_keep_their_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kfac = make(model, graft=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with kfac.curvature.capture_stats():
        pass
    kfac.precondition(learning_rate=0.1)

    torch.testing.assert_close(gradients(model)["0.weight"], torch.ones(3, 3))
