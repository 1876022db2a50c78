"""The losses of routers, compared with their formulas, transformers and torch's gradients."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from llm.extensions.moe.losses import (
    SCORES,
    assume_score,
    compute_balancing_loss,
    compute_router_z_loss,
    compute_score_errors,
    compute_sequence_shares,
    find_score,
)
from tests.support.models import tiny_config

LOGITS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
CHOSEN = LOGITS.topk(2).indices
"""Twelve tokens choose two of four experts."""


def loss_of_a_sample(logits, chosen):
    shares = compute_sequence_shares(chosen.reshape(1, -1), 4)
    return compute_balancing_loss(logits.softmax(-1).unsqueeze(0), shares)


def test_equal_loads_cost_one_for_each_token():
    probabilities = LOGITS.softmax(-1).unsqueeze(0)
    assert compute_balancing_loss(probabilities, torch.full((1, 4), 1 / 4)).item() == pytest.approx(
        12
    )


def test_two_of_four_experts_alone_cost_two_for_each_token():
    logits = torch.tensor([[50.0, 50.0, 0.0, 0.0]]).expand(12, 4)
    assert loss_of_a_sample(logits, torch.tensor([[0, 1]]).expand(12, 2)).item() == 24


def test_shares_are_those_of_each_sequence():
    chosen = torch.tensor([[0, 1, 0, 1], [2, 3, 2, 0]])
    expected = [[0.5, 0.5, 0, 0], [0.25, 0, 0.5, 0.25]]
    assert compute_sequence_shares(chosen, 4).tolist() == expected


def test_the_loss_of_a_layer_is_transformers_divided_by_k():
    theirs = load_balancing_loss_func((LOGITS,), 4, 2)
    torch.testing.assert_close(loss_of_a_sample(LOGITS, CHOSEN).squeeze() / 12, theirs / 2)


def test_transformers_calls_two_collapsed_layers_balanced():
    front = torch.tensor([[50.0, 50.0, 0.0, 0.0]]).expand(12, 4)
    back = front.flip(1)
    balanced = 2.0  # K
    assert load_balancing_loss_func((front, back), 4, 2).item() == pytest.approx(balanced)
    ours = [loss_of_a_sample(logits, logits.topk(2).indices) / 12 for logits in (front, back)]
    assert [loss.item() for loss in ours] == pytest.approx([2, 2])  # where 1 is balanced


def test_the_z_loss_is_the_sum_of_squares_of_log_sum_exp():
    expected = sum(torch.log(torch.exp(row).sum()) ** 2 for row in LOGITS)
    torch.testing.assert_close(compute_router_z_loss(LOGITS.unsqueeze(0)), expected.unsqueeze(0))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_the_scores_of_a_router_are_known_by_its_weights(name, scale, experts_per_token):
    chosen = CHOSEN[:, :experts_per_token]
    weights = scale * SCORES[name](LOGITS).gather(-1, chosen)
    for kind in (torch.float32, torch.bfloat16):
        errors = compute_score_errors(LOGITS, chosen, weights.to(kind))
        assert find_score(errors.tolist()) == name


def test_equal_weights_do_not_tell_the_score():
    weights = torch.full((12, 1), 2.5)
    assert find_score(compute_score_errors(LOGITS, CHOSEN[:, :1], weights).tolist()) is None


@pytest.mark.parametrize(
    ("family", "has_bias", "score"),
    [
        ("qwen3_moe", False, "softmax"),
        ("glm4_moe", True, "sigmoid"),
        ("ernie4_5_moe", True, "softmax"),
        ("deepseek_v4", True, "sqrtsoftplus"),  # its configuration says so
    ],
)
def test_scores_that_weights_do_not_tell_are_those_of_the_family(family, has_bias, score):
    assert assume_score(tiny_config(family), has_bias=has_bias) == score


def test_logits_of_zero_do_not_tell_the_score():
    logits = torch.zeros(12, 4)
    weights = F.softmax(logits, -1).gather(-1, CHOSEN)
    assert find_score(compute_score_errors(logits, CHOSEN, weights).tolist()) is None
