"""SOAP against its definition in NumPy, and against a library's."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llm.extensions.matrix_optim.soap import SOAP, make_soap
from llm.optim.groups import embeddings_and_head
from llm.trainers.gpt.extensions import GPTConfig
from tests.extensions.matrix_optim.toy import soap_updates
from tests.support.models import tiny_config
from tests.support.operations import Reads

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.8), "eps": 1e-8}


def gradients(steps: int, shape=(3, 3)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -1, shape[1])
    return [torch.randn(shape, generator=generator) * scales for _ in range(steps)]


def matrix(shape=(3, 3)) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape))


def soap(weight, sides=(0, 1), *, decay=0.0, update_steps=3) -> SOAP:
    groups = [{"params": [weight], "weight_decay": decay}]
    return SOAP(groups, {weight: sides}, **SETTINGS, update_steps=update_steps)


def train(weight, optimizer, grads, *, bad=()):
    for number, grad in enumerate(grads):
        weight.grad = grad.clone()
        if number in bad:
            weight.grad[0, 0], weight.grad[1, 1] = float("inf"), float("nan")
        optimizer.found_inf = torch.tensor(float(number in bad))
        optimizer.step()
    return weight


def state_of(weight, optimizer) -> dict[str, torch.Tensor]:
    tensors = {"weight": weight, **optimizer.state[weight]}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def by_definition(grads, sides, *, update_steps, decay=0.0) -> np.ndarray:
    theta = matrix(grads[0].shape).detach().double().numpy().copy()
    updates = soap_updates(
        [grad.double().numpy() for grad in grads],
        sides,
        betas=SETTINGS["betas"],
        eps=SETTINGS["eps"],
        update_steps=update_steps,
    )
    for step, update in enumerate(updates):
        if step > 0:
            theta = theta * (1 - SETTINGS["lr"] * decay) - SETTINGS["lr"] * update
    return theta


@pytest.mark.parametrize("sides", [(0, 1), (1,), (0,)])
@pytest.mark.parametrize("update_steps", [1, 3, 100])
def test_every_step_is_that_of_the_definition(sides, update_steps):
    grads = gradients(12)
    weight = matrix()
    train(weight, soap(weight, sides, decay=0.1, update_steps=update_steps), grads)
    expected = by_definition(grads, sides, update_steps=update_steps, decay=0.1)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=2e-5)
    assert np.abs(expected - matrix().detach().numpy()).max() > 0.05


@pytest.mark.parametrize("update_steps", [1, 3])
def test_every_step_is_that_of_the_library(update_steps):
    library = pytest.importorskip("pytorch_optimizer")
    grads = gradients(12)
    ours, theirs = matrix(), matrix()
    train(ours, soap(ours, update_steps=update_steps), grads)
    reference = library.SOAP(
        [theirs], **SETTINGS, weight_decay=0.0, precondition_frequency=update_steps
    )
    train(theirs, reference, grads)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_parameters_that_are_no_matrices_get_torchs_adamw():
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer = SOAP([{"params": [ours], "weight_decay": 0.1}], {}, **SETTINGS)
    adamw = torch.optim.AdamW([theirs], **SETTINGS, weight_decay=0.1, fused=True)
    for grad in gradients(6, (1, 5)):
        for p, its in ((ours, optimizer), (theirs, adamw)):
            p.grad = grad[0].clone()
            its.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [4, 6])
def test_a_skipped_step_changes_no_weight_moment_factor_or_basis(bad):
    grads = gradients(bad + 1)
    weight = matrix()
    optimizer = soap(weight)  # step 6 would turn the bases
    train(weight, optimizer, grads[:bad])
    before = state_of(weight, optimizer)
    train(weight, optimizer, grads[bad:], bad=[0])
    after = state_of(weight, optimizer)
    assert after.pop("calls") == before.pop("calls") + 1
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_skipped_first_steps_delay_the_first_basis():
    grads = gradients(8)
    weight = matrix()
    optimizer = soap(weight)
    train(weight, optimizer, grads[:3], bad=[0, 1, 2])
    assert torch.equal(weight, matrix())
    train(weight, optimizer, grads[3:4])  # the fourth call begins the factors and the basis
    assert torch.equal(weight, matrix())
    assert optimizer.state[weight]["has_basis"] == 1
    train(weight, optimizer, grads[4:])
    assert not torch.equal(weight, matrix())
    assert torch.isfinite(weight).all()
    assert optimizer.state[weight]["step"] == 4


def test_no_step_reads_the_device_but_those_that_begin_a_basis():
    weight = matrix()
    optimizer = soap(weight, update_steps=2)
    train(weight, optimizer, gradients(4))
    # The host's own count of calls, and whether a power of two has a basis already.
    for calls, reads_allowed in ((5, 1), (6, 1), (7, 1), (8, 2)):
        weight.grad = gradients(calls)[-1]
        with Reads() as reads:
            optimizer.step()
        assert len(reads.seen) == reads_allowed, calls


def test_each_step_updates_the_basis_of_one_matrix():
    weights = [matrix() for _ in range(3)]
    groups = [{"params": weights, "weight_decay": 0.0}]
    optimizer = SOAP(groups, dict.fromkeys(weights, (0, 1)), **SETTINGS, update_steps=3)
    turned = []
    for grad in gradients(7):
        before = [optimizer.state[w]["basis.0"].clone() for w in weights]
        for weight in weights:
            weight.grad = grad.clone()
        optimizer.step()
        after = [optimizer.state[w]["basis.0"] for w in weights]
        turned.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    assert turned[0] == [True, True, True]
    assert [row.index(True) for row in turned[1:]] == [1, 2, 0, 1, 2, 0]
    assert all(sum(row) == 1 for row in turned[1:])


def test_the_vocabulary_side_of_an_embedding_has_no_basis():
    model = AutoModelForCausalLM.from_config(tiny_config("gpt_neox"))
    outside = embeddings_and_head(model)
    optimizer = make_soap(GPTConfig(), model)
    assert {p.shape for p in outside} == {(320, 32)}
    for p in outside:
        assert optimizer.state[p].keys() >= {"basis.1"}
        assert "basis.0" not in optimizer.state[p]
    inside = model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight
    assert optimizer.state[inside]["basis.0"].shape == (64, 64)
    assert optimizer.state[inside]["basis.1"].shape == (32, 32)
    assert "calls" not in optimizer.state[model.gpt_neox.layers[0].mlp.dense_h_to_4h.bias]
