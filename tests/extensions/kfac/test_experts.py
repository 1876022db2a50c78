"""Stacks of experts: all tokens that were sent to any of them make the factors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.ekfac import EKFAC
from llm.extensions.kfac.layers import find_covered_layers
from llm.extensions.kfac.make_kfac import covers_stacks
from llm.extensions.kfac.preconditioner import Preconditioner
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values

STEPS = 4
EPS = 1e-3
"""About the size of the gradients: with less AdamW makes a step of what differs by rounding."""
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def mixtral(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("mixtral", num_hidden_layers=1, **changes))


def batch(seed: int = 0):
    return torch.randint(320, (16, 16), generator=torch.Generator().manual_seed(seed))


def forward_backward(model, curvature, ids, *, micro_batches: int = 1):
    model.zero_grad()
    with curvature.capture_stats(token_weight=1 / ids.numel()):
        for part in ids.chunk(micro_batches):
            logits = model(input_ids=part).logits
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), part.flatten(), reduction="sum"
            )
            (loss / ids.numel()).backward()


def covered(model):
    """The experts alone: where a factor has equal eigenvalues, rounding chooses the basis."""
    return find_covered_layers(model, skip_layers=["attn"])


def train(*, optimizer: str = "ekfac", steps: int = STEPS, micro_batches: int = 1):
    """Weights after some steps."""
    model = mixtral()
    options = {"factor_update_steps": 1, "inv_update_steps": 2}
    if optimizer == "ekfac":
        curvature = Curvature(covered(model), **options)
        stepper = EKFAC([{"params": list(model.parameters())}], curvature, lr=0.01, eps=EPS)
        precondition = None
    else:
        curvature = Curvature(covered(model), method=optimizer, **options)
        stepper = torch.optim.SGD(model.parameters(), lr=0.01)
        precondition = Preconditioner(curvature, model.parameters())
    for step in range(steps):
        forward_backward(model, curvature, batch(step), micro_batches=micro_batches)
        if precondition is not None:
            precondition.precondition(learning_rate=0.01)
        stepper.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def expected_factors(model, ids):
    """A and G of both stacks, from each token at each of its experts by itself."""
    experts = model.model.layers[0].mlp.experts
    seen = {}
    hooks = [
        experts.register_forward_hook(lambda _, args, out: seen.update(args=args)),
        experts.register_full_backward_hook(lambda _, __, grads: seen.update(grad=grads[0])),
    ]
    logits = model(input_ids=ids).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    hidden, chosen, weights = (tensor.detach() for tensor in seen["args"])
    rows = {(name, side): [] for name in STACKS for side in "AG"}
    for token, (experts_of, weights_of) in enumerate(zip(chosen, weights, strict=True)):
        for expert, weight in zip(experts_of, weights_of, strict=True):
            first = (experts.gate_up_proj[expert] @ hidden[token]).detach().requires_grad_()
            gate, up = first.chunk(2)
            inner = experts.act_fn(gate) * up
            second = (experts.down_proj[expert] @ inner.detach()).detach().requires_grad_()
            (through,) = torch.autograd.grad(
                weight * second, second, grad_outputs=seen["grad"][token]
            )
            back = experts.down_proj[expert].detach().T @ through
            (before,) = torch.autograd.grad(inner, first, grad_outputs=back)
            rows[STACKS[0], "A"].append(hidden[token])
            rows[STACKS[0], "G"].append(before)
            rows[STACKS[1], "A"].append(inner.detach())
            rows[STACKS[1], "G"].append(through)
    stacked = {key: torch.stack(values) for key, values in rows.items()}
    return {key: each.T @ each / len(each) for key, each in stacked.items()}


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm", "eager"])
def test_factors_are_means_over_tokens_at_each_of_their_experts(kernel, micro_batches):
    model = mixtral()
    expected = expected_factors(model, batch())
    model.config._experts_implementation = kernel
    curvature = Curvature(find_covered_layers(model))
    forward_backward(model, curvature, batch(), micro_batches=micro_batches)
    curvature.update()

    factors = {factor.name: factor for factor in curvature.factors}
    for (name, side), reference in expected.items():
        factor = factors[f"model.layers.0.{name}.{side}"]
        assert factor.count.item() == 2 * batch().numel()  # two experts for each token
        torch.testing.assert_close(factor.averages()[0], reference)
    assert model.config._experts_implementation == kernel


def test_the_model_is_as_it_was_when_nothing_is_recorded():
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    curvature = Curvature(find_covered_layers(model))
    with curvature.capture_stats():
        assert "forward" in vars(experts)
    assert "forward" not in vars(experts)


def test_a_checkpointed_block_with_experts_is_counted_once():
    model = mixtral()
    model.gradient_checkpointing_enable()
    model.train()
    curvature = Curvature(find_covered_layers(model))
    forward_backward(model, curvature, batch())
    curvature.update()
    counts = {f.name: f.count.item() for f in curvature.factors if "experts" in f.name}
    assert set(counts.values()) == {2 * batch().numel()}


def test_in_the_identity_basis_experts_learn_as_with_adamw():
    model, other = mixtral(), mixtral()
    ekfac = EKFAC([{"params": list(model.parameters())}], Curvature(covered(model)), lr=0.01)
    adamw = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for each, optimizer in ((model, ekfac), (other, adamw)):
        logits = each(input_ids=batch()).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch().flatten()).backward()
        optimizer.step()
    ours, theirs = (each.model.layers[0].mlp.experts for each in (model, other))
    for one, reference in (
        (ours.gate_up_proj, theirs.gate_up_proj),
        (ours.down_proj, theirs.down_proj),
    ):
        # Rounding errors, as ekfac takes them for, do not count.
        norms = torch.linalg.vector_norm(reference.grad, dim=(1, 2), keepdim=True)
        compared = reference.grad.abs() > 2e-6 * norms
        assert compared.float().mean() > 0.99
        torch.testing.assert_close(one[compared], reference[compared])


def test_an_expert_that_saw_no_token_decays_and_stays_finite():
    model = mixtral()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[3] = -100.0 * torch.ones(32)
        model.model.embed_tokens.weight.abs_()  # nothing is sent to the last expert
        model.model.layers[0].input_layernorm.weight.abs_()
    curvature = Curvature(find_covered_layers(model), factor_update_steps=1, inv_update_steps=1)
    ekfac = EKFAC([{"params": list(model.parameters())}], curvature, lr=0.01, weight_decay=0.1)
    experts = model.model.layers[0].mlp.experts
    before = experts.gate_up_proj.detach().clone()
    forward_backward(model, curvature, batch())
    idle = [e for e in range(4) if not experts.gate_up_proj.grad[e].any()]
    ekfac.step()
    assert idle
    for expert in idle:
        torch.testing.assert_close(experts.gate_up_proj[expert], before[expert] * (1 - 0.01 * 0.1))
    assert torch.isfinite(experts.gate_up_proj).all()


def on_ranks():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = mixtral()
    curvature = Curvature(covered(model), factor_update_steps=1, inv_update_steps=2)
    ekfac = EKFAC([{"params": list(model.parameters())}], curvature, lr=0.01, eps=EPS)
    for step in range(STEPS):
        ids = batch(step)
        own = ids.chunk(ranks)[rank]
        model.zero_grad()
        with curvature.capture_stats(token_weight=1 / ids.numel()):
            logits = model(input_ids=own).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
            (loss / ids.numel()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        ekfac.step()
    state = {name: ekfac.state[p] for name, p in model.named_parameters()}
    shapes = {name: kept["exp_avg"].shape for name, kept in state.items() if kept}
    return {name: p.detach() for name, p in model.named_parameters()}, shapes


def test_two_ranks_learn_as_one():
    alone = train()
    found = values(run_ranks(on_ranks, 2))
    for weights, _ in found:
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
    kept = found[0][1] | found[1][1]
    assert kept["model.layers.0.mlp.experts.down_proj"] == (4, 32, 64)


@pytest.mark.parametrize(
    ("given", "covered"),
    [({}, True), ({"kfac_library": "kfac-pytorch"}, False)],
    ids=["by default", "the library"],
)
def test_experts_are_covered_except_by_the_library(given, covered):
    assert covers_stacks(GPTConfig(kfac=True, **given)) is covered
