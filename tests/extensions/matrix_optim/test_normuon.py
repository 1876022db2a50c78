"""NorMuon against the algorithm of its paper, in float64."""

import math

import pytest
import torch
from torch import nn

from llm.extensions.matrix_optim.muon import MuonAndAdamW, make_muon
from llm.trainers.gpt.extensions import GPTConfig
from tests.extensions.matrix_optim.toy import put_gradients, quintic, state_of
from tests.support.models import still_model

OPTIONS = GPTConfig(
    optimizer="normuon",
    learning_rate=0.01,
    weight_decay=0.1,
    momentum=0.9,
    normuon_beta2=0.8,
)


@pytest.fixture(autouse=True)
def float32_iteration(monkeypatch):
    monkeypatch.setattr("llm.extensions.matrix_optim.muon.has_half_products", lambda device: False)


def orthogonal(momentum: torch.Tensor) -> torch.Tensor:
    """U S' V^T with the singular values of five quintic steps."""
    u, values, vh = torch.linalg.svd(momentum / momentum.norm(), full_matrices=False)
    return u * quintic(values) @ vh


class Reference:
    """Algorithm 1 of Li et al. 2025 on a matrix [outputs, inputs], with Nesterov's look-ahead."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach().double().clone()
        self.momentum = torch.zeros_like(self.weight)
        self.rows = torch.zeros(len(self.weight), 1, dtype=torch.float64)

    def step(self, gradient: torch.Tensor) -> None:
        gradient = gradient.double()
        self.momentum = 0.9 * self.momentum + 0.1 * gradient
        direction = orthogonal(0.9 * self.momentum + 0.1 * gradient)
        self.rows = 0.8 * self.rows + 0.2 * direction.square().mean(1, keepdim=True)
        normalized = direction / self.rows.sqrt()
        outputs, inputs = self.weight.shape
        rate = 0.2 * 0.01 * math.sqrt(outputs * inputs) / normalized.norm()
        self.weight = self.weight - 0.01 * 0.1 * self.weight - rate * normalized


def check_steps(optimizer: MuonAndAdamW, model, matrices) -> None:
    """Take 20 steps, and compare the matrices.

    Args:
        optimizer: Trains the model.
        model: The model.
        matrices: Returns a model's matrices [outputs, inputs] from a function of its parameters.
    """
    references = [Reference(weight) for weight in matrices(lambda p: p.detach())]
    starts = [reference.weight for reference in references]
    for step in range(20):
        put_gradients(model, step)
        for reference, gradient in zip(references, matrices(lambda p: p.grad), strict=True):
            reference.step(gradient)
        optimizer.step()
    weights = matrices(lambda p: p.detach())
    for weight, reference, start in zip(weights, references, starts, strict=True):
        # Orthogonal matrices and steps are rounded to bf16.
        error = (weight - reference.weight).norm() / (reference.weight - start).norm()
        assert error < 2e-3


def test_twenty_steps_are_those_of_the_paper():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(4, 24), nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False)
    )
    check_steps(
        make_muon(OPTIONS, model),
        model,
        lambda read: [read(model[1].weight), read(model[2].weight)],
    )


def test_rows_of_gpt2_are_outputs_and_queries_keys_and_values_are_apart():
    model = still_model("gpt2", n_layer=1)
    block = model.transformer.h[0]  # its weights are [inputs, outputs]

    def matrices(read):
        feed_forward = [read(block.mlp.c_fc.weight).T, read(block.mlp.c_proj.weight).T]
        return [*read(block.attn.c_attn.weight).T.chunk(3), *feed_forward]

    check_steps(make_muon(OPTIONS, model), model, matrices)


def test_each_expert_has_matrices_with_rows_apart():
    model = still_model("mixtral", num_hidden_layers=1, intermediate_size=24, hidden_size=16)
    experts = model.model.layers[0].mlp.experts

    def matrices(read):
        gates_and_ups = [half for expert in read(experts.gate_up_proj) for half in expert.chunk(2)]
        return gates_and_ups + list(read(experts.down_proj))

    check_steps(make_muon(OPTIONS, model), model, matrices)


def test_a_skipped_step_changes_neither_weights_nor_moments():
    model = still_model()
    optimizer = make_muon(OPTIONS, model)
    put_gradients(model, 0)
    optimizer.step()
    before = state_of(model, optimizer)
    put_gradients(model, 1)
    for p in model.parameters():
        p.grad.view(-1)[0] = float("nan")
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = state_of(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
