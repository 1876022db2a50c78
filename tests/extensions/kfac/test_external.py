import importlib.util
import sys

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from llm.errors import ConfigError
from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.external import ExternalPreconditioner
from llm.extensions.kfac.layers import find_covered_layers
from tests.extensions.kfac.toy import forward_backward, toy_batch, toy_model

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("kfac") is None, reason="kfac-pytorch is not installed"
)
OPTIONS = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_decay": 0.9}


def external(model):
    return ExternalPreconditioner(
        find_covered_layers(model), model.parameters(), damping=0.01, **OPTIONS
    )


def conv_model():
    model = toy_model()
    conv = Conv1D(8, 6)
    conv.weight.data, conv.bias.data = model.first.weight.data.T.clone(), model.first.bias.data
    model.first = conv
    return model


def step(model, kfac, seed, **options):
    forward_backward(model, kfac, *toy_batch(seed), **options)
    kfac.precondition(learning_rate=0.1)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kfac", None)
    monkeypatch.setitem(sys.modules, "kfac.distributed", None)

    with pytest.raises(ConfigError, match=r"pip install git\+https://github.com/gpauloski/kfac"):
        external(toy_model())


@needs_library
@pytest.mark.parametrize("make", [toy_model, conv_model])
@pytest.mark.parametrize("split", [{}, {"micro_batches": 2, "loss_scale": 1024.0}])
def test_a_first_gradient_is_multiplied_by_the_damped_inverse(make, split):
    """The averages begin with the identity, and damping is absolute."""
    model = make()
    library = external(model)
    coverage = find_covered_layers(model)
    curvature = Curvature(coverage, method="eigen")
    forward_backward(model, curvature, *toy_batch(0))
    curvature.update()
    before = {layer.name: layer.gradient().clone() for layer in coverage.layers}
    tokens = len(toy_batch(0)[0].flatten(0, -2))
    model.zero_grad()

    step(model, library, 0, **split)

    for layer in coverage.layers:
        a, g = (factor.averages()[0].double() for factor in curvature.factors_of(layer))
        a, g = (0.9 * torch.eye(len(m)) + 0.1 * m for m in (a, g / tokens**2))
        damped = torch.kron(g, a) + 0.01 * torch.eye(len(a) * len(g))
        expected = torch.linalg.solve(damped, before[layer.name].double().flatten())
        found = layer.gradient().double().flatten()
        found /= found.norm() / expected.norm()  # the bound on the update has one factor for all
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@needs_library
def test_a_step_with_an_overflow_counts_for_nothing():
    results = []
    for seeds in ([0, 1, 2], [0, 2]):
        model = toy_model()
        kfac = external(model)
        for seed in seeds:
            forward_backward(model, kfac, *toy_batch(seed))
            if seed == 1:
                model.first.weight.grad[0, 0] = torch.inf
            kfac.precondition(learning_rate=0.1)
        results.append([p.grad for p in model.parameters()])

    torch.testing.assert_close(*results, rtol=0, atol=0)


@needs_library
def test_its_memory_is_counted():
    # A and G of 7, 8, 8 and 5; their eigenvectors; and the divisors of 8 x 7 and 5 x 8.
    assert external(toy_model()).num_bytes() == 4 * (2 * (49 + 64 + 64 + 25) + 56 + 40)
