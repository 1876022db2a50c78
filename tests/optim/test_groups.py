import pytest
import torch
from transformers import AutoModelForCausalLM

from llm.extensions.matrix_optim.muon import make_muon
from llm.optim.adamw_and_sgd import make_adamw, make_sgd
from llm.optim.groups import has_weight_decay, parameter_groups, scale_learning_rates
from llm.optim.options import OptimizerOptions
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.support.families import every_family
from tests.support.models import tiny_config


@every_family
def test_weight_decay_falls_on_matrices_only(family):
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    name_of = {parameter: name for name, parameter in model.named_parameters()}

    decayed, undecayed = (
        {name_of[parameter] for parameter in group["params"]}
        for group in parameter_groups(OptimizerOptions(weight_decay=0.1), model)
    )

    assert decayed | undecayed == set(name_of.values())
    assert not decayed & undecayed
    assert not any(name.endswith("bias") for name in decayed)
    norms = {
        f"{name}.{inner}"
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for inner, _ in module.named_parameters(recurse=False)
    }
    assert norms <= undecayed
    assert norms
    matrices = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D", "Embedding")
        and f"{name}.weight" in name_of.values()
    }
    assert matrices <= decayed


def test_mambas_state_matrix_is_not_decayed():
    model = AutoModelForCausalLM.from_config(tiny_config("mamba"))
    _, undecayed = parameter_groups(OptimizerOptions(weight_decay=0.1), model)
    members = {id(parameter) for parameter in undecayed["params"]}
    assert id(model.backbone.layers[0].mixer.A_log) in members


def test_a_frozen_parameter_is_in_no_group():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    groups = parameter_groups(OptimizerOptions(weight_decay=0.1), model)
    assert len(groups) == 1
    assert groups[0]["params"] == [model.weight]


def test_our_adamw_takes_the_same_steps_as_torchs_plain_one():
    def train(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = make(model)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    options = OptimizerOptions(learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    ours = train(lambda model: make_adamw(options, model))
    plain = train(
        lambda model: torch.optim.AdamW(
            parameter_groups(OptimizerOptions(weight_decay=0.1), model),
            lr=0.01,
            betas=(0.9, 0.95),
            foreach=False,
        )
    )
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


def test_fused_experts_are_decayed_and_a_stack_of_their_biases_is_not():
    assert has_weight_decay("mlp.experts.gate_up_proj", torch.nn.Parameter(torch.ones(4, 8, 8)))
    assert not has_weight_decay(
        "mlp.experts.gate_up_proj_bias", torch.nn.Parameter(torch.ones(4, 8))
    )
    assert not has_weight_decay("mix.time_decay", torch.nn.Parameter(torch.ones(1, 1, 8)))


def test_sgd_is_torchs_with_decay_on_matrices_and_its_state_from_the_start():
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_sgd(OptimizerOptions(learning_rate=0.1, weight_decay=0.2), ours)
    assert optimizer.state[ours.weight]["momentum_buffer"].shape == (2, 3)
    groups = [{"params": [theirs.weight], "weight_decay": 0.2}, {"params": [theirs.bias]}]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)
    for step in range(5):
        for model, its in ((ours, optimizer), (theirs, reference)):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape)
            its.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_skips_a_step_by_its_flag(momentum):
    model = torch.nn.Linear(3, 2)
    options = OptimizerOptions(learning_rate=0.1, weight_decay=0.2, momentum=momentum)
    optimizer = make_sgd(options, model)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any(t.any() for p in model.parameters() for t in optimizer.state[p].values())


def test_a_parameter_has_the_schedules_rate_times_its_factor():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    options = OptimizerOptions(learning_rate=0.5, weight_decay=0.25)
    optimizer = make_adamw(options, model)
    factors = {"0.weight": 1.0, "1.weight": 0.5, "0.bias": 1.0, "1.bias": 2.0}
    scale_learning_rates(optimizer, model, lambda name, ndim, group: factors[name])

    expected = [
        (model[0].weight, 0.5, 0.25, 1.0),
        (model[1].weight, 0.25, 0.5, 0.5),  # the decay of a step, 0.125, stays
        (model[0].bias, 0.5, 0.0, 1.0),
        (model[1].bias, 1.0, 0.0, 2.0),
    ]
    for group, (parameter, *values) in zip(optimizer.param_groups, expected, strict=True):
        assert len(group["params"]) == 1
        assert group["params"][0] is parameter
        assert [group["lr"], group["weight_decay"], group["rate_factor"]] == values


def test_muons_groups_have_separate_factors():
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2"))
    optimizer = make_muon(GPTConfig(optimizer="muon", learning_rate=0.5), model)
    scale_learning_rates(
        optimizer, model, lambda name, ndim, group: 0.25 if group["is_muon"] else 1.0
    )
    assert {(group["is_muon"], group["lr"]) for group in optimizer.param_groups} == {
        (True, 0.125), (False, 0.5)
    }  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap", "sgd"])
def test_embeddings_head_and_gains_have_their_rate_with_every_optimizer(optimizer):
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2"))
    options = GPTConfig(
        optimizer=optimizer, learning_rate=0.01, embedding_learning_rate=0.08, weight_decay=0.1
    )
    made = choose_factory(options, make_extensions(options), seed=0).make(model, None).optimizer

    settings = {
        p: (group["lr"], group.get("rate_factor", 1.0), group["weight_decay"])
        for group in made.param_groups
        for p in group["params"]
    }
    block = model.transformer.h[0]
    assert settings[model.transformer.wte.weight] == (0.08, 8.0, 0.1)
    assert settings[model.transformer.wpe.weight] == (0.08, 8.0, 0.1)
    assert settings[block.ln_1.weight] == settings[block.mlp.c_fc.bias] == (0.08, 8.0, 0.0)
    assert settings[block.attn.c_attn.weight] == (0.01, 1.0, 0.1)
    assert len(settings) == len([*model.parameters()])


def test_an_untied_output_head_has_the_rate_of_the_embeddings():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    options = OptimizerOptions(learning_rate=0.01, embedding_learning_rate=0.08)
    rates = {p: g["lr"] for g in make_adamw(options, model).param_groups for p in g["params"]}
    assert rates[model.lm_head.weight] == 0.08
    assert rates[model.model.layers[0].mlp.up_proj.weight] == 0.01
