"""Muon with AdamW, against both of torch's optimizers run side by side."""

import dataclasses

import pytest
import torch

from llm.errors import ConfigError
from llm.extensions.matrix_optim.muon import (
    POLAR_EXPRESS,
    QUINTIC,
    make_muon,
    orthogonalize,
)
from llm.trainers.gpt.extensions import GPTConfig
from tests.extensions.matrix_optim.toy import put_gradients, quintic, state_of
from tests.support.models import FAMILIES, still_model
from tests.support.operations import Reads

OPTIONS = GPTConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95))


def muons(model) -> set[str]:
    optimizer = make_muon(OPTIONS, model)
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p] for group in optimizer.param_groups if group["is_muon"] for p in group["params"]
    }


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("mamba", "mixtral")])
def test_linear_layers_but_for_the_head_are_muons_and_embeddings_are_not(family):
    model = still_model(family)
    head = model.get_output_embeddings().weight
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D", "FalconLinear")
        and module.weight is not head
    }
    assert muons(model) == linear
    assert linear


def test_a_model_without_a_matrix_inside_is_refused():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.LayerNorm(2))
    with pytest.raises(ConfigError, match="--optimizer muon found no matrix"):
        make_muon(OPTIONS, model)


def test_every_step_is_torchs_muon_and_torchs_adamw(monkeypatch):
    monkeypatch.setattr("llm.extensions.matrix_optim.muon.has_half_products", lambda device: True)
    ours, theirs = still_model(), still_model()
    names = muons(ours)
    monkeypatch.setattr(
        "llm.extensions.matrix_optim.muon.find_fused_weights", lambda model: {}
    )  # torch's has none
    options = dataclasses.replace(OPTIONS, momentum=0.8)
    optimizer = make_muon(options, ours)
    named = dict(theirs.named_parameters())
    muon = torch.optim.Muon(
        [named[name] for name in sorted(names)],
        lr=0.01,
        weight_decay=0.1,
        momentum=0.8,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [named[n] for n in ("transformer.wte.weight", "transformer.wpe.weight")]},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(4):
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 / (1 + step)  # as a schedule sets it
        for model, steppers in ((ours, [optimizer]), (theirs, [muon, adamw])):
            put_gradients(model, step)
            for stepper in steppers:
                stepper.step()
    for name, p in ours.named_parameters():
        assert torch.equal(p, named[name]), name


def polar_express(values):
    """Algorithm 1 of Amsel et al. 2025 on singular values, with its coefficients to 8 digits."""
    values = values / 1.01
    for a, b, c in (
        (8.2872120, -23.5958865, 17.3003873),
        (4.1070591, -2.9478499, 0.5448431),
        (3.9486909, -2.9089021, 0.5518191),
        (3.3184197, -2.4884880, 0.5100489),
        (2.3006520, -1.6689040, 0.4188073),
    ):
        values = a / 1.01 * values + b / 1.01**3 * values**3 + c / 1.01**5 * values**5
    return values


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize(
    ("iteration", "polynomial"), [(QUINTIC, quintic), (POLAR_EXPRESS, polar_express)]
)
def test_without_bf16_arithmetic_the_iteration_is_in_float32(
    monkeypatch, shape, iteration, polynomial
):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, vh = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    exact = u * polynomial(values) @ vh
    monkeypatch.setattr("llm.extensions.matrix_optim.muon.has_half_products", lambda device: False)
    [ours] = orthogonalize(matrix[None], iteration)
    assert ours.dtype == torch.bfloat16
    # Only the result is rounded, to eight bits.
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-5)


def test_polar_express_comes_closer_to_an_orthogonal_matrix():
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))

    def distance(iteration) -> float:
        [ours] = orthogonalize(matrix[None], iteration)
        return (torch.linalg.svdvals(ours.float()) - 1).square().mean().sqrt().item()

    assert distance(QUINTIC) == pytest.approx(0.20, abs=0.02)
    assert distance(POLAR_EXPRESS) == pytest.approx(0.09, abs=0.02)


def test_a_skipped_step_changes_nothing():
    model, sound = still_model(), still_model()
    optimizer = make_muon(OPTIONS, model)
    reference = make_muon(OPTIONS, sound)
    for step in range(3):
        if step == 1:
            put_gradients(model, 9)
            for p in model.parameters():
                p.grad.view(-1)[0] = float("inf")
            before = state_of(model, optimizer)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            after = state_of(model, optimizer)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        optimizer.found_inf = reference.found_inf = torch.zeros(())
        for one, its in ((model, optimizer), (sound, reference)):
            put_gradients(one, step)
            its.step()
    for ours, theirs in zip(model.parameters(), sound.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_reads_no_value_from_the_device():
    model = still_model()
    optimizer = make_muon(OPTIONS, model)
    optimizer.found_inf = torch.zeros(())
    put_gradients(model, 0)
    with Reads() as reads:
        optimizer.step()
    assert reads.seen == []
