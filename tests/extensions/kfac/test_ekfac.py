import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.ekfac import EKFAC, _zero_rounding_errors, compute_nesterov_step
from llm.extensions.kfac.layers import find_covered_layers
from llm.extensions.kfac.make_kfac import make_kfac
from llm.extensions.matrix_optim.eigenbases import rotate
from llm.extensions.matrix_optim.soap import SOAP
from llm.optim.adamw_and_sgd import adamw_state
from llm.trainers.gpt.extensions import GPTConfig
from tests.extensions.kfac.toy import forward_backward, loss_sum, toy_batch, toy_ekfac, toy_model
from tests.support.models import tiny_config


def train(model, optimizer, seeds, *, bad=()):
    for seed in seeds:
        inputs, labels = toy_batch(seed)
        forward_backward(model, optimizer.curvature, inputs, labels)
        if seed in bad:
            model.first.weight.grad[0, 0] = torch.inf
        optimizer.found_inf = torch.tensor(float(seed in bad))
        optimizer.step()


def everything(model, optimizer):
    moments = {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state[parameter].items()
    }
    factors = {
        f"{name}.{key}": tensor
        for name, factor in optimizer.curvature.state_dict()["factors"].items()
        for key, tensor in factor.items()
    }
    whole = {**dict(model.named_parameters()), **moments, **factors}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def test_without_statistics_it_is_adamw():
    model, reference = toy_model(), toy_model()
    optimizer = toy_ekfac(model)
    adamw = torch.optim.AdamW(
        reference.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    for seed in range(5):
        for one, its in ((model, optimizer), (reference, adamw)):
            its.zero_grad()
            loss_sum(one, *toy_batch(seed)).backward()
            its.step()

    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_nesterovs_step_is_adamws_with_the_moment_one_gradient_ahead():
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    gradients = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    first = second = torch.zeros(3)
    for step, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        ahead = (0.9 * first + 0.1 * gradient) / (1 - 0.9 ** (step + 1))
        expected = -0.1 * ahead / (second / (1 - 0.99**step)).sqrt()

        torch.testing.assert_close(compute_nesterov_step(group, gradient, state, None), expected)

    before = {key: tensor.clone() for key, tensor in state.items()}
    infinite = torch.tensor([torch.inf, 1.0, 1.0])
    skipped = compute_nesterov_step(group, infinite, state, torch.ones(()))
    assert torch.equal(skipped, torch.zeros(3))
    assert all(torch.equal(state[key], before[key]) for key in before)


def test_without_statistics_it_takes_nesterovs_steps():
    model, reference = toy_model(), toy_model()
    curvature = Curvature(find_covered_layers(model))
    optimizer = EKFAC(model.parameters(), curvature, lr=0.01, betas=(0.9, 0.95), nesterov=True)
    group = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    state = {p: adamw_state(p) for p in reference.parameters()}
    for seed in range(5):
        for one in (model, reference):
            one.zero_grad()
            loss_sum(one, *toy_batch(seed)).backward()
        optimizer.step()
        with torch.no_grad():
            for p in reference.parameters():
                p += compute_nesterov_step(group, p.grad, state[p], None)

    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_beside_soap_each_trains_its_own_weights_as_if_it_were_alone():
    model, only_soap, only_ekfac = toy_model(), toy_model(), toy_model()
    settings = {"lr": 0.01, "betas": (0.9, 0.95)}

    def soap_of(model):
        groups = [{"params": [model.second.weight], "weight_decay": 0.1}]
        return SOAP(groups, {model.second.weight: (0, 1)}, **settings)

    def ekfac_of(model, others=None):
        curvature = Curvature(find_covered_layers(model, skip_layers=("second",)))
        groups = [{"params": list(model.first.parameters())}]
        return EKFAC(groups, curvature, make_soap=others, **settings)

    both = ekfac_of(model, lambda: soap_of(model))
    soap, ekfac = soap_of(only_soap), ekfac_of(only_ekfac)
    for seed in range(4):
        for one, its in ((model, both), (only_ekfac, ekfac)):
            forward_backward(one, its.curvature, *toy_batch(seed))
        only_soap.second.weight.grad = model.second.weight.grad.clone()
        for optimizer in (both, soap, ekfac):
            optimizer.step()
        # So that the next inputs of the covered layer are the same.
        with torch.no_grad():
            only_ekfac.second.weight.copy_(model.second.weight)

    assert torch.equal(model.second.weight, only_soap.second.weight)
    assert torch.equal(model.first.weight, only_ekfac.first.weight)
    assert not torch.equal(model.first.weight, toy_model().first.weight)
    assert [unit.weight for unit in both.units] == [model.first.weight, model.second.weight]


def test_the_first_step_is_the_sign_of_the_gradient_in_the_eigenbasis():
    model = toy_model()
    optimizer = toy_ekfac(model)
    forward_backward(model, optimizer.curvature, *toy_batch(0))
    gradient = model.second.weight.grad.clone()
    before = model.second.weight.detach().clone()

    optimizer.step()

    inputs, outputs = optimizer.curvature.factors_of(optimizer.curvature.layers[1])
    (right,), (left,) = inputs.bases, outputs.bases
    rotated = left.T @ gradient @ right
    # A softmax's gradient has no component along (1, ..., 1): that is rounding error.
    rotated[rotated.abs() < 3e-6 * rotated.square().mean().sqrt()] = 0
    expected = left @ rotated.sign() @ right.T
    torch.testing.assert_close(
        model.second.weight, before * (1 - 0.01 * 0.1) - 0.01 * expected, atol=1e-5, rtol=1e-4
    )


def test_flat_directions_of_a_wide_layer_are_kept_and_empty_ones_are_not():
    """Entries of 1 to 1e-9 in the basis, and rows that are zero there but for rounding."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(512, 512, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    values = 10.0 ** -torch.linspace(0, 9, 512 * 512, dtype=torch.float64)
    values = values[torch.randperm(512 * 512, generator=generator)].view(512, 512)
    values[500:] = 0
    gradient = (left @ values @ right.T).float()

    kept = _zero_rounding_errors(rotate(gradient, [left.float()], [right.float()]))

    # Rounding is about 3e-7 of the norm, spread over the entries.
    noise = 3e-7 * values.norm() / 512
    large = values > 20 * noise
    assert (kept[large] / values[large] - 1).abs().max() < 0.5
    assert large.float().mean() > 0.6
    assert not kept[500:].any()


def test_the_moments_are_rotated_with_the_basis():
    model = toy_model()
    optimizer = toy_ekfac(model, factor_update_steps=1, inv_update_steps=1000)
    train(model, optimizer, range(7))
    layer = optimizer.curvature.layers[0]
    inputs, outputs = optimizer.curvature.factors_of(layer)
    state = optimizer.state[layer.weight]

    def first_moment():
        return outputs.bases[0] @ state["exp_avg"] @ inputs.bases[0].T

    before, energy = first_moment(), state["exp_avg_sq"].sum()
    old = inputs.bases[0].clone()
    inputs.sums[0].copy_(torch.diag(torch.arange(1.0, 8.0)))
    optimizer._rotate_moments(layer, optimizer.curvature._decompose_factors([inputs], None))

    assert not torch.allclose(inputs.bases[0], old)
    torch.testing.assert_close(first_moment(), before)
    torch.testing.assert_close(state["exp_avg_sq"].sum(), energy)
    assert (state["exp_avg_sq"] >= 0).all()


def test_conv1d_and_linear_with_equal_weights_get_the_same_update():
    linear = toy_model()
    conv = copy.deepcopy(linear)
    conv.first = Conv1D(8, 6)
    conv.first.weight.data = linear.first.weight.data.T.clone()
    conv.first.bias.data = linear.first.bias.data.clone()
    for model in (linear, conv):
        train(model, toy_ekfac(model), range(12))

    torch.testing.assert_close(conv.first.weight.T, linear.first.weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(conv.first.bias, linear.first.bias, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(conv.second.weight, linear.second.weight, atol=1e-5, rtol=1e-5)


def test_a_run_with_an_infinite_gradient_equals_one_without_that_batch():
    runs = []
    for seeds in ([0, 1, 2, 3, 4], [0, 1, 3, 4]):
        model = toy_model()
        # Skipped steps count for the schedule, so all that is due is due at every step.
        optimizer = toy_ekfac(model, factor_update_steps=1, inv_update_steps=1)
        train(model, optimizer, seeds, bad=[2])
        runs.append(everything(model, optimizer))

    assert all(torch.isfinite(tensor).all() for tensor in runs[0].values())
    torch.testing.assert_close(runs[0], runs[1], atol=0, rtol=0)


def test_parameters_outside_covered_layers_get_adamw():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    reference = copy.deepcopy(model)
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.5},
        {"params": [*model[1].parameters(), model[2].bias], "weight_decay": 0.0},
    ]
    optimizer = EKFAC(groups, Curvature(find_covered_layers(model)), lr=0.1)
    adamw = torch.optim.AdamW(
        [
            {"params": [reference[0].weight], "weight_decay": 0.5},
            {"params": reference[1].parameters(), "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
        fused=True,
    )
    tokens, labels = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    with optimizer.curvature.capture_stats():
        nn.functional.cross_entropy(model(tokens), labels).backward()
    nn.functional.cross_entropy(reference(tokens), labels).backward()
    optimizer.step()
    adamw.step()

    torch.testing.assert_close(model[0].weight, reference[0].weight)
    torch.testing.assert_close(model[1].weight, reference[1].weight)


def test_soap_beside_it_may_have_nothing_to_train():
    """As on a middle stage of a pipeline whose norms have no weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" in name)
    options = GPTConfig(learning_rate=1e-3, kfac=True, optimizer="soap")

    optimizer = make_kfac(options, model).optimizer

    assert isinstance(optimizer, EKFAC)
    covered = {p for unit in optimizer.units for p in unit.parameters}
    assert covered == {p for p in model.parameters() if p.requires_grad}
