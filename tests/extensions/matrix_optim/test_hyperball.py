"""Hyperball around each optimizer, against the algorithm of its paper in float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from llm.errors import ConfigError
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.extensions.matrix_optim.toy import put_gradients, quintic, soap_updates, state_of
from tests.support.models import still_model
from tests.support.operations import Reads

RATE, BETAS = 0.02, (0.9, 0.95)


def make_run_optimizer(model, optimizer: str, **options):
    config = GPTConfig(
        optimizer=optimizer, hyperball=True, learning_rate=RATE, betas=BETAS, **options
    )
    return choose_factory(config, make_extensions(config), seed=0).make(model, None)


def adamw_updates(gradients: list[np.ndarray]) -> Iterator[np.ndarray]:
    """AdamW's update in each step, without weight decay (Loshchilov & Hutter 2019)."""
    first = second = np.zeros_like(gradients[0])
    for step, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        yield first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)


def muon_updates(gradients: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The orthogonal matrix of each step (Jordan et al. 2024), with Nesterov's momentum."""
    momentum = np.zeros_like(gradients[0])
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.95 * momentum + 0.05 * gradient
        u, values, vh = np.linalg.svd(ahead / np.linalg.norm(ahead), full_matrices=False)
        yield u * quintic(values) @ vh


def normuon_updates(gradients: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Muon's matrices, divided by the roots of the second moments of rows (Li et al. 2025)."""
    rows = np.zeros((len(gradients[0]), 1))
    for update in muon_updates(gradients):
        rows = 0.95 * rows + 0.05 * (update**2).mean(axis=1, keepdims=True)
        yield update / np.sqrt(rows)


UPDATES = {
    "adamw": adamw_updates,
    "muon": muon_updates,
    "normuon": normuon_updates,
    "soap": lambda gradients: soap_updates(
        gradients, (0, 1), betas=BETAS, eps=1e-8, update_steps=1
    ),
}


def by_definition(weight: np.ndarray, updates: Iterator[np.ndarray]) -> np.ndarray:
    """W <- R normalize(W - lr R normalize(u)); an update of zero changes nothing."""
    radius = np.linalg.norm(weight)
    for update in updates:
        if update.any():
            weight = weight - RATE * radius * update / np.linalg.norm(update)
            weight = radius * weight / np.linalg.norm(weight)
    return weight


def matrices_of(model, read) -> list[np.ndarray]:
    """The matrices [outputs, inputs] of a GPT-2 with one layer; queries, keys and values apart."""
    block = model.transformer.h[0]
    fused = read(block.attn.c_attn.weight).T.chunk(3)
    others = (block.attn.c_proj.weight, block.mlp.c_fc.weight, block.mlp.c_proj.weight)
    matrices = [*fused, *(read(weight).T for weight in others)]
    return [matrix.detach().double().numpy().copy() for matrix in matrices]


@pytest.mark.parametrize("optimizer", UPDATES)
def test_twenty_steps_are_those_of_the_paper(optimizer, monkeypatch):
    monkeypatch.setattr("llm.extensions.matrix_optim.muon.has_half_products", lambda device: False)
    # Matrices are square, so that no basis is left to rounding.
    model = still_model("gpt2", n_layer=1, n_inner=32)
    options = {"soap_update_steps": 1} if optimizer == "soap" else {}
    stepper = make_run_optimizer(model, optimizer, weight_decay=0.1, **options).optimizer
    starts = matrices_of(model, lambda p: p)
    gradients = []
    for step in range(20):
        put_gradients(model, step)
        gradients.append(matrices_of(model, lambda p: p.grad))
        stepper.step()
    for index, weight in enumerate(matrices_of(model, lambda p: p)):
        updates = UPDATES[optimizer]([matrices[index] for matrices in gradients])
        expected = by_definition(starts[index], updates)
        error = np.linalg.norm(weight - expected) / np.linalg.norm(expected - starts[index])
        # Muon's matrices are rounded to bf16.
        assert error < (2e-3 if "muon" in optimizer else 2e-4)
        np.testing.assert_allclose(np.linalg.norm(weight), np.linalg.norm(starts[index]), rtol=1e-6)
        assert np.linalg.norm(weight - starts[index]) > 0.05 * np.linalg.norm(weight)


@pytest.mark.parametrize(
    "optimizer", ["adamw", "muon", pytest.param("normuon", marks=pytest.mark.extended)]
)
def test_each_matrix_of_an_expert_keeps_its_norm_in_many_steps(optimizer):
    model = still_model("mixtral", num_hidden_layers=1, hidden_size=16, intermediate_size=24)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[0, :24] *= 3.0  # the gate of the first expert has another norm

    def norms() -> torch.Tensor:
        gates_and_ups = experts.gate_up_proj.double().unflatten(1, (2, 24)).flatten(0, 1)
        matrices = [*gates_and_ups, *experts.down_proj.double()]
        return torch.stack([matrix.norm() for matrix in matrices]).detach()

    stepper = make_run_optimizer(model, optimizer).optimizer
    before, start = norms(), experts.down_proj.detach().clone()
    for step in range(100):
        put_gradients(model, step)
        stepper.step()
    torch.testing.assert_close(norms(), before, rtol=1e-6, atol=0)
    assert not torch.allclose(experts.down_proj, start, atol=1e-2)


@pytest.mark.parametrize("optimizer", UPDATES)
def test_weights_outside_of_spheres_train_as_without_hyperball(optimizer):
    models = []
    for hyperball in (True, False):
        config = GPTConfig(
            optimizer=optimizer, hyperball=hyperball, learning_rate=RATE, weight_decay=0.1
        )
        model = still_model("gpt2", n_layer=1)
        stepper = (
            choose_factory(config, make_extensions(config), seed=0).make(model, None).optimizer
        )
        for step in range(3):
            put_gradients(model, step)
            stepper.step()
        models.append(dict(model.named_parameters()))
    on_spheres = {name for name, p in models[0].items() if ".h." in name and p.ndim == 2}
    assert len(on_spheres) == 4
    for name, weight in models[0].items():
        assert torch.equal(weight, models[1][name]) is (name not in on_spheres), name


@pytest.mark.parametrize("optimizer", UPDATES)
def test_routers_have_the_rate_of_embeddings(optimizer):
    """Their steps are AdamW's, for which a length relative to the weights is no rate."""
    model = still_model("mixtral", num_hidden_layers=1)
    stepper = make_run_optimizer(model, optimizer, embedding_learning_rate=1e-3).optimizer
    rates = {
        p: (group["lr"], group.get("rate_factor", 1.0))
        for group in stepper.param_groups
        for p in group["params"]
    }
    layer = model.model.layers[0]
    assert rates[layer.self_attn.q_proj.weight] == rates[layer.mlp.experts.down_proj] == (RATE, 1.0)
    assert rates[layer.mlp.gate.weight] == rates[model.lm_head.weight] == (1e-3, 1e-3 / RATE)


@pytest.mark.parametrize("optimizer", UPDATES)
def test_a_skipped_step_changes_nothing(optimizer):
    model = still_model("gpt2", n_layer=1)
    stepper = make_run_optimizer(model, optimizer).optimizer
    for step in range(3):
        put_gradients(model, step)
        stepper.step()
    before = state_of(model, stepper)
    put_gradients(model, 3)
    for p in model.parameters():
        p.grad.view(-1)[0] = float("inf")
    stepper.found_inf = torch.ones(())
    stepper.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, state_of(model, stepper), strict=True)]
    # SOAP counts the calls on the host.
    assert sum(changed) == (len(before_calls(stepper)) if optimizer == "soap" else 0)


def before_calls(stepper) -> list[torch.Tensor]:
    return [t for state in stepper.state.values() for key, t in state.items() if "calls" in key]


def test_a_rate_of_zero_changes_no_weight():
    model = still_model("gpt2", n_layer=1)
    stepper = make_run_optimizer(model, "muon").optimizer
    before = [p.detach().clone() for p in model.parameters()]
    for group in stepper.param_groups:
        group["lr"] = 0.0  # as in the first step of a warm-up
    put_gradients(model, 0)
    stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_matrix_that_begins_at_zero_is_refused_by_name():
    model = still_model("gpt2", n_layer=1)
    nn.init.zeros_(model.transformer.h[0].mlp.c_proj.weight)
    stepper = make_run_optimizer(model, "adamw").optimizer
    put_gradients(model, 0)
    with pytest.raises(ConfigError, match=r"begin at zero, such as transformer\.h\.0\.mlp\.c_proj"):
        stepper.step()


def test_only_the_first_step_of_a_start_reads_from_the_device():
    model = still_model("gpt2", n_layer=1)
    stepper = make_run_optimizer(model, "muon").optimizer
    for expected in (1, 0, 0):
        put_gradients(model, 0)
        with Reads() as reads:
            stepper.step()
        assert len(reads.seen) == expected


def test_the_log_says_what_replaces_weight_decay():
    model, options = still_model("gpt2", n_layer=2), {"embedding_learning_rate": 1e-3}
    assert make_run_optimizer(model, "adamw", weight_decay=0.1, **options).describe() == (
        "hyperball: 12 matrices keep their initial norms; the learning rate is the length of their "
        "steps relative to them; --weight_decay 0.1 applies to other matrices only, such as "
        "embeddings"
    )


def test_the_log_names_the_option_for_the_rate_of_other_weights():
    description = make_run_optimizer(still_model("gpt2"), "adamw").describe()
    assert description.endswith(
        "relative to them; it is also the rate of all other weights, which is usually too high "
        "for them (--embedding_learning_rate)"
    )


@pytest.mark.parametrize(
    ("options", "conflict"),
    [
        (["--optimizer", "sgd"], "--optimizer sgd"),
        (["--optimizer", "accumadamw"], "--optimizer accumadamw"),
        (["--kfac"], "--kfac"),
        (["--data_parallel", "diloco"], "--data_parallel diloco"),
    ],
)
def test_what_was_not_tried_with_hyperball_is_refused(options, conflict):
    with pytest.raises(ConfigError, match=f"normuon and soap with one model, not with {conflict};"):
        parse_args(["--hyperball", "--train_file", "a.txt", *options])


def test_moments_in_bf16_are_refused_with_hyperball():
    with pytest.raises(ConfigError, match=r"--moment_dtype bf16 is for AdamW .* --hyperball;"):
        parse_args(["--hyperball", "--train_file", "a.txt", "--moment_dtype", "bf16"])
