"""Routers in training: loads that are exact, losses with torch's gradient, biases that balance."""

import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm.errors import ConfigError
from llm.extensions.moe.expert_layers import find_expert_layers
from llm.extensions.moe.options import MoEExtension
from llm.models.loss import LanguageModelLoss
from llm.trainers.gpt.extensions import GPTConfig
from tests.extensions.moe.toy import (
    deepseek_v4,
    ernie4_5_moe,
    extension_of,
    glm4_moe,
    jetmoe,
    loop_of,
    mixtral,
    phimoe,
    routers_of,
    take_step,
    tokens,
)
from tests.support.models import tiny_config, tiny_model
from tests.support.operations import Reads

FAMILIES = [mixtral, glm4_moe, ernie4_5_moe]
LAYERS, EXPERTS, CHOICES = 2, 4, 128  # of 64 tokens


def loads_of(routers) -> list[list[int]]:
    return routers.state_dict()["load"]


def biases_of(model) -> list[list[float]]:
    return [layer.bias.flatten().tolist() for layer in find_expert_layers(model)]


def reference_loads(config, *, step: int) -> list[list[int]]:
    """The choices that hooks see in one forward pass of the same model and data."""
    model, counts = tiny_model(config), []
    for layer in find_expert_layers(model):
        layer.experts.register_forward_pre_hook(
            lambda _, args: counts.append(args[1].flatten().bincount(minlength=EXPERTS).tolist())
        )
    model(tokens(seed=step)[0])
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_are_the_choices_of_all_micro_batches(family):
    model, routers = routers_of(family())
    take_step(model, routers, micro_batches=2)
    assert loads_of(routers) == reference_loads(family(), step=1)
    assert [sum(row) for row in loads_of(routers)] == [CHOICES] * LAYERS


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_counts_no_token_twice(mode):
    config = mixtral()
    model = tiny_model(config, activation_checkpointing=mode)
    routers = loop_of(model, router_aux_loss_coef=0.1)
    take_step(model, routers)
    assert loads_of(routers) == reference_loads(config, step=1)


@pytest.mark.parametrize("scope", ["global", "sequence"])
def test_padding_samples_have_neither_load_nor_loss(scope):
    runs = []
    for padding_samples in (0, 4):
        model, routers = routers_of(
            mixtral(),
            router_aux_loss_coef=0.3,
            router_aux_loss_scope=scope,
            router_balancing="loss",
            router_z_loss=0.1,
        )
        for step in (1, 2):
            take_step(model, routers, step=step, padding_samples=padding_samples, micro_batches=2)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        runs.append((loads_of(routers), gradients, routers.metrics()[0]))
    (loads, gradients, metrics), (padded_loads, padded_gradients, padded_metrics) = runs
    assert padded_loads == loads
    assert padded_metrics == pytest.approx(metrics)
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_an_evaluation_counts_nothing():
    _, routers = routers_of(mixtral())
    with torch.no_grad():
        routers._strategy.loss(*tokens())
    routers.after_step(1, SimpleNamespace(num_tokens=64))
    assert loads_of(routers) == [[0] * EXPERTS] * LAYERS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scope", ["global", "sequence"])
def test_the_gradient_is_torchs_of_the_formula(family, scope):
    options = {"router_balancing": "loss", "router_aux_loss_scope": scope}
    model, routers = routers_of(family(), **options, router_aux_loss_coef=0.3, router_z_loss=0.1)
    take_step(model, routers, step=1)
    loads = torch.tensor(loads_of(routers))
    take_step(model, routers, step=2, micro_batches=2)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain, recorded = tiny_model(family()), []
    for layer in find_expert_layers(plain):
        layer.router.register_forward_hook(lambda _, __, output: recorded.append(output[0]))
    objective, _ = LanguageModelLoss(plain)(*tokens(seed=2))
    for row, logits in enumerate(recorded):
        scores = logits.sigmoid() if family is glm4_moe else logits.softmax(-1)
        p = scores / scores.sum(-1, keepdim=True)
        chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0).view(4, 16, EXPERTS)
        if scope == "global":
            f = loads[row].expand(4, EXPERTS) * EXPERTS / CHOICES
        else:
            f = chosen.mean(1) * EXPERTS / 2
        objective = objective + 0.3 * (f.unsqueeze(1) * p.view(4, 16, EXPERTS)).sum()
        objective = objective + 0.1 * logits.logsumexp(-1).square().sum()
    (objective / 64).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_a_first_step_has_no_loss_because_no_load_is_known():
    model, routers = routers_of(mixtral())
    take_step(model, routers, step=1)
    assert routers.metrics()[0]["moe_aux_loss"] == 0
    take_step(model, routers, step=2)
    assert routers.metrics()[0]["moe_aux_loss"] == pytest.approx(0.01 * LAYERS, rel=0.1)


def test_the_sign_of_the_missing_load_moves_the_bias():
    model, routers = routers_of(glm4_moe())
    take_step(model, routers)
    for load, bias in zip(loads_of(routers), biases_of(model), strict=True):
        signs = torch.tensor([CHOICES / EXPERTS - n for n in load]).sign()
        expected = 1e-3 * (signs - signs.mean())
        assert bias == pytest.approx(expected.tolist())


def test_a_proportional_bias_moves_by_the_relative_deviation():
    options = {"router_bias_update": "proportional", "router_bias_update_rate": 0.01}
    model, routers = routers_of(glm4_moe(), **options)
    take_step(model, routers)
    for load, bias in zip(loads_of(routers), biases_of(model), strict=True):
        assert bias == pytest.approx([0.01 * (1 - n * EXPERTS / CHOICES) for n in load], abs=1e-7)


def test_the_rate_is_smaller_for_softmax_scores():
    model, routers = routers_of(ernie4_5_moe(moe_num_experts=8))
    take_step(model, routers)
    largest = max(abs(value) for bias in biases_of(model) for value in bias)
    assert 0 < largest < 2 * 1e-3 * 2 / 8


def test_the_log_says_how_routers_score(caplog):
    caplog.set_level(logging.INFO, logger="llm")
    model, routers = routers_of(glm4_moe())
    for step in (1, 2):
        take_step(model, routers, step=step)
    assert caplog.messages == ["routers score by sigmoid."]


@pytest.mark.parametrize(
    ("config", "num_steps", "score"),
    [
        (tiny_config("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=True), 10, "softmax"),
        (glm4_moe(num_experts_per_tok=1, norm_topk_prob=True), 10, "sigmoid"),
        (
            glm4_moe(num_experts_per_tok=1, norm_topk_prob=False, routed_scaling_factor=2.5),
            1,
            "sigmoid",
        ),
    ],
)
def test_routers_that_choose_one_expert_have_the_scores_of_the_class(config, num_steps, score):
    model, routers = routers_of(config)
    for step in range(1, num_steps):
        take_step(model, routers, step=step)
    assert routers.scores == [None, None]
    take_step(model, routers, step=num_steps)
    assert routers.scores == [score, score]


def test_ten_taken_steps_without_known_scores_assume_softmax(caplog):
    caplog.set_level(logging.INFO, logger="llm")
    model, routers = routers_of(phimoe())
    routers._strategy.skipped = torch.ones(())
    take_step(model, routers, step=1000)  # of a resumed run
    routers._strategy.skipped = torch.zeros(())
    for step in range(1001, 1010):
        take_step(model, routers, step=step)
    state = routers.state_dict()
    assert (state["scores"], caplog.messages) == ([None, None], [])

    model, routers = routers_of(phimoe())
    routers.load_state_dict(state)
    take_step(model, routers, step=1010)
    assert routers.scores == ["softmax", "softmax"]
    assert caplog.messages == [
        "routers score by softmax: this is assumed for 2 layers (0, 1), because the routing "
        "weights of 10 steps did not show it. These steps had no auxiliary loss and changed no "
        "bias there."
    ]


@pytest.mark.parametrize("family", [glm4_moe, ernie4_5_moe])
@pytest.mark.parametrize("options", [{"router_balancing": "none"}, {"router_balancing": "loss"}])
def test_nothing_but_bias_balancing_moves_a_bias(family, options):
    model, routers = routers_of(family(), **options)
    for step in (1, 2):
        take_step(model, routers, step=step)
    assert biases_of(model) == [[0.0] * EXPERTS] * LAYERS


def test_a_skipped_step_moves_neither_loads_nor_biases():
    model, routers = routers_of(glm4_moe())
    take_step(model, routers, step=1)
    state, biases = routers.state_dict(), biases_of(model)
    routers._strategy.skipped = torch.ones(())
    take_step(model, routers, step=2)
    assert routers.state_dict() == state
    assert biases_of(model) == biases


@pytest.mark.parametrize("update", ["sign", "proportional"])
def test_repeated_steps_balance_a_collapsed_router(update):
    options = {"router_bias_update": update, "router_bias_update_rate": 0.005}
    model, routers = routers_of(glm4_moe(), **options)
    for layer in find_expert_layers(model):
        layer.bias.add_(torch.tensor([0.1, 0.1, 0.0, 0.0]))  # two experts take all
    columns = []
    for _ in range(60):
        take_step(model, routers)
        columns.append(routers.metrics()[1])
    assert columns[0] == "load 2.0x"
    assert columns[-1] in ("load 1.0x", "load 1.1x", "load 1.2x")


@pytest.mark.parametrize("options", [{}, {"router_balancing": "both", "router_z_loss": 0.1}])
def test_a_step_reads_nothing_from_the_device_once_scores_are_known(options):
    model, routers = routers_of(glm4_moe(), **options)
    take_step(model, routers)
    model.zero_grad()
    with Reads() as reads:
        objective, _ = routers._strategy.loss(*tokens())
        objective.backward()
        routers.after_step(2, SimpleNamespace(num_tokens=64))
    assert reads.seen == []


def test_the_metrics_are_loads_relative_to_the_mean():
    model, routers = routers_of(mixtral(), router_balancing="none")
    take_step(model, routers)
    largest = [max(row) * EXPERTS / CHOICES for row in loads_of(routers)]
    values, column = routers.metrics()
    assert values == {
        "moe_max_load": pytest.approx(max(largest)),
        "moe_mean_max_load": pytest.approx(sum(largest) / LAYERS),
        "moe_idle_experts": 0.0,
    }
    assert column == f"load {max(largest):.1f}x"


def test_the_load_of_every_expert_is_an_event(caplog):
    caplog.set_level(logging.INFO, logger="llm")
    model, routers = routers_of(mixtral(), expert_load_steps=5)
    take_step(model, routers)
    values = routers.periodic.run(1)
    table = [[round(n * EXPERTS / CHOICES, 3) for n in row] for row in loads_of(routers)]
    assert caplog.records[-1].event == {
        "kind": "experts",
        "step": 1,
        "layers": [0, 1],
        "loads": table,
    }
    assert values == {f"moe_max_load/{number}": max(table[number]) for number in (0, 1)}


def test_idle_experts_are_named_again_when_their_number_doubles(caplog):
    model, routers = routers_of(glm4_moe(), router_balancing="none")
    for layer in find_expert_layers(model):
        layer.bias.add_(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    take_step(model, routers)
    routers._idle_steps += 98  # as if it had been so before
    routers.metrics()
    assert caplog.text == ""
    take_step(model, routers)
    routers.metrics()
    routers.metrics()
    [message] = caplog.messages
    assert message == (
        "4 experts had less than 0.1 of the mean load in each of 100 steps, such as expert 2 of "
        "layer 0; balance them with --router_balancing bias in a new run, or in this one with "
        "--change_on_resume."
    )
    routers._idle_steps[0, 0] = 100
    routers.metrics()
    assert len(caplog.messages) == 1
    routers._idle_steps += 100
    routers.metrics()
    routers.metrics()
    assert [message.split(" had")[0] for message in caplog.messages] == ["4 experts", "8 experts"]


@pytest.mark.parametrize(
    ("config", "options", "described"),
    [
        (mixtral(), {}, "balanced by an auxiliary loss of 0.01 over each global batch"),
        (glm4_moe(), {}, "balanced by a bias that changes by the load's sign, rate 0.001"),
        (
            glm4_moe(),
            {"router_balancing": "both", "router_aux_loss_scope": "sequence"},
            "balanced by an auxiliary loss of 0.01 over each sample and a bias that changes by the "
            "load's sign, rate 0.001",
        ),
        (
            mixtral(),
            {"pretrained": True},
            "not balanced because the weights are pretrained (--router_balancing)",
        ),
        (
            mixtral(),
            {"router_balancing": "none", "router_z_loss": 0.001},
            "not balanced; z-loss 0.001",
        ),
        (
            # Hugging Face's coefficient, times two experts per token, divided by two layers
            glm4_moe(output_router_logits=True, router_aux_loss_coef=0.05),
            {"pretrained": True},
            "balanced by an auxiliary loss of 0.05 over each global batch (output_router_logits of "
            "the configuration)",
        ),
        (
            mixtral(output_router_logits=True, router_aux_loss_coef=0.0),
            {},
            "not balanced because the coefficient of the auxiliary loss in the configuration is 0",
        ),
        (
            glm4_moe(output_router_logits=True, router_aux_loss_coef=0.0),
            {},
            "balanced by a bias that changes by the load's sign, rate 0.001",
        ),
    ],
)
def test_the_log_says_how_a_model_is_balanced(config, options, described):
    _, routers = routers_of(config, **options)
    [line] = routers.describe()
    start = "experts: 2 layers of 4, 2 per token; "
    assert line.startswith(start)
    assert line.endswith(f" parameters are active; {described}")


def test_layers_that_a_hash_routes_are_named():
    _, routers = routers_of(deepseek_v4("hash_moe", "moe"), router_balancing="loss")
    assert routers.describe()[1:] == [
        "The routers of 1 layer have no logits, so nothing balances them: 0."
    ]


def saved_bytes(loss: Any) -> int:
    """The bytes that a forward pass keeps for its backward pass, which runs, too."""
    sizes = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        objective, _ = loss(*tokens())
    objective.backward()
    return sum(sizes)


@pytest.mark.parametrize("config", [mixtral(), glm4_moe()], ids=["loss", "bias and z-loss"])
def test_a_trial_keeps_the_activations_of_the_losses_of_routers(config):
    options = {"router_z_loss": 0.1}
    model, routers = routers_of(config, **options)
    take_step(model, routers)  # the scores are known from the first step on
    in_training = saved_bytes(routers._strategy.loss)

    extension, context = extension_of(tiny_model(config).train(), **options)
    plain = saved_bytes(context.strategy.loss)
    with extension.trial_context(context):
        assert saved_bytes(context.strategy.loss) == in_training > plain
    assert saved_bytes(context.strategy.loss) == plain


def test_a_trial_of_a_model_without_experts_is_a_plain_pass():
    extension, context = extension_of(tiny_model(tiny_config("gpt2")))
    plain = saved_bytes(context.strategy.loss)
    with extension.trial_context(context):
        assert saved_bytes(context.strategy.loss) == plain


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"router_balancing": "loss"}, "--router_balancing loss"),
        ({"router_z_loss": 0.1}, "--router_z_loss"),
    ],
)
def test_a_loss_of_routers_without_logits_is_refused(options, asked):
    said = f"{asked} needs the logits of routers, and deepseek_v4 gives none; leave it out."
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        routers_of(deepseek_v4("hash_moe", "hash_moe"), **options)


def test_a_run_from_before_stays_unbalanced():
    _, routers = routers_of(glm4_moe())
    routers.begin()
    assert routers.describe()[0].endswith("not balanced because the run was not until now")
    state = routers.state_dict()
    _, resumed = routers_of(glm4_moe())
    resumed.load_state_dict(state)
    assert resumed.balancing.kind == "none"
    _, changed = routers_of(glm4_moe(), router_balancing="bias")
    changed.load_state_dict(state)
    assert changed.balancing.kind == "bias"


def test_a_run_from_before_keeps_the_loss_of_its_configuration():
    config = glm4_moe(output_router_logits=True, router_aux_loss_coef=0.05)
    _, routers = routers_of(config)
    routers.begin()
    assert routers.describe()[0].endswith(
        "balanced by an auxiliary loss of 0.05 over each global batch (output_router_logits of the "
        "configuration)"
    )
    assert routers.state_dict()["balancing"] == "loss"


@pytest.mark.parametrize(
    ("coefficient", "options", "said"),
    [
        (
            -1.0,
            {},
            "The mixtral model has router_aux_loss_coef=-1.0, which must be 0 or more: a negative "
            "one would make routers send all tokens to the same experts; change config.json or "
            "--config_overrides.",
        ),
        (
            0.0,
            {"router_balancing": "loss"},
            "--router_balancing loss needs a coefficient, and the configuration of mixtral has "
            "output_router_logits with a coefficient of 0; set --router_aux_loss_coef.",
        ),
    ],
)
def test_a_coefficient_that_cannot_balance_is_refused(coefficient, options, said):
    config = mixtral(output_router_logits=True, router_aux_loss_coef=coefficient)
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        routers_of(config, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"router_balancing": "bias"},
            "--router_balancing bias changes the bias of routers, and the routers of mixtral have "
            "none; take loss.",
        ),
        (
            {"router_balancing": "both"},
            "--router_balancing both changes the bias of routers, and the routers of mixtral have "
            "none; take loss.",
        ),
    ],
)
def test_a_bias_that_a_class_lacks_is_refused(options, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        routers_of(mixtral(), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"router_aux_loss_scope": "sequence", "context_parallel_size": 2},
            "--router_aux_loss_scope sequence needs whole samples, and --context_parallel_size "
            "divides them; take global.",
        ),
        (
            {"router_balancing": "loss", "data_parallel": "gossip"},
            "--router_balancing loss balances one model, and --data_parallel gossip trains "
            "several; leave one of them out.",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(options, said):
    assert MoEExtension(GPTConfig(**options)).find_problems() == [said]


def test_experts_without_the_interface_are_named(caplog):
    assert loop_of(tiny_model(jetmoe())) is None
    assert caplog.messages == [
        "The load of the experts of jetmoe cannot be measured, and nothing balances it: the model "
        "lacks the interface of experts in transformers."
    ]


def test_a_dense_variant_of_a_mixture_has_no_experts(caplog):
    model = tiny_model(tiny_config("qwen3_moe", num_experts=4, decoder_sparse_step=3))
    assert loop_of(model) is None
    assert caplog.messages == []
    assert loop_of(model, router_z_loss=0.1) is None
    assert caplog.messages == ["--router_z_loss changes nothing: qwen3_moe has no experts."]


def test_options_without_effect_on_a_dense_model_are_named(caplog, monkeypatch):
    monkeypatch.delitem(sys.modules, "llm.extensions.moe.balanced_routers")
    model = tiny_model(tiny_config("llama"))
    assert loop_of(model) is None
    assert caplog.messages == []
    assert loop_of(model, router_balancing="loss", router_z_loss=0.1) is None
    assert caplog.messages == [
        "--router_balancing changes nothing: llama has no experts.",
        "--router_z_loss changes nothing: llama has no experts.",
    ]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert "llm.extensions.moe.balanced_routers" not in sys.modules
