"""All families with experts: balanced, counted, resumed and exported, and none forgotten."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm.extensions.moe.expert_layers import find_expert_layers
from llm.models.mixtures import find_routed_experts
from tests.extensions.moe.families import (
    COVERED,
    OF_SEVERAL_MODELS,
    UNMEASURED,
    families_with_experts,
    family_config,
)
from tests.extensions.moe.toy import loop_of, routers_of, take_step
from tests.support.models import export_to, tiny_model


def skip_without(family: str) -> None:
    if family not in families_with_experts():
        pytest.skip("this version of transformers does not have it")


def choices_of(model: PreTrainedModel) -> list[list[int]]:
    """The choices that hooks see in the forward passes of each layer, once the list is read."""
    counts: list[list[int]] = []
    for experts in find_routed_experts(model).values():
        row = [0] * int(experts.num_experts)
        counts.append(row)

        def count(_, args, kwargs, row=row):
            index = args[1] if len(args) > 1 else kwargs["top_k_index"]
            for expert in index.flatten().tolist():
                row[expert] += 1

        experts.register_forward_pre_hook(count, with_kwargs=True)
    return counts


def train_step(model: PreTrainedModel, routers, *, step: int) -> None:
    torch.manual_seed(step)  # some routers add noise, and the trainer seeds each step
    take_step(model, routers, step=step)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def assert_same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    tensors, others = model.state_dict(), other.state_dict()
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


@pytest.mark.extended
@pytest.mark.parametrize("family", COVERED)
def test_a_family_is_balanced_counted_resumed_and_exported(family, tmp_path):
    skip_without(family)
    options = {"router_bias_update_rate": 0.01}
    model, routers = routers_of(family_config(family), **options)
    assert routers.balancing.kind != "none"
    counts = choices_of(model)
    train_step(model, routers, step=1)
    loads = routers.state_dict()["load"]
    assert [row[: len(count)] for row, count in zip(loads, counts, strict=True)] == counts

    again, resumed = routers_of(family_config(family), **options)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(routers.state_dict())
    train_step(model, routers, step=2)
    train_step(again, resumed, step=2)
    assert_same(model, again)
    assert resumed.state_dict() == routers.state_dict()

    export_to(tmp_path, model)
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.extended
@pytest.mark.parametrize("family", UNMEASURED)
def test_a_family_without_the_interface_says_that_it_trains_unbalanced(family, caplog):
    skip_without(family)
    assert loop_of(tiny_model(family_config(family))) is None
    assert f"The load of the experts of {family} cannot be measured, and nothing" in caplog.text


def test_the_probabilities_of_gemma4s_router_are_not_normalized_twice():
    """The auxiliary loss of E/K sum f p, of the probabilities p as the router gives them."""
    skip_without("gemma4_text")
    options = {"router_balancing": "loss", "router_aux_loss_coef": 0.5, "router_z_loss": 0.1}
    model, routers = routers_of(family_config("gemma4_text"), **options)
    take_step(model, routers, step=1)
    assert routers.scores == ["probabilities", "probabilities"]
    loads = torch.tensor(routers.state_dict()["load"]).float()
    routers.metrics()
    probabilities = []
    for layer in find_expert_layers(model):
        layer.router.register_forward_hook(lambda _, __, out: probabilities.append(out[0]))
    take_step(model, routers, step=2)
    means = torch.stack([p.detach().view(-1, 4).mean(0) for p in probabilities])
    expected = 0.5 * 4 * (loads / loads.sum(1, keepdim=True) * means).sum()
    values, _ = routers.metrics()
    assert values["moe_aux_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert values["moe_z_loss"] == 0


def test_every_family_with_experts_is_covered_or_named_with_a_reason():
    """If this fails with a new version of transformers, add the family to `families.py`."""
    known = {*COVERED, *UNMEASURED, *OF_SEVERAL_MODELS}
    assert families_with_experts() - known == set()
    assert {*OF_SEVERAL_MODELS.values()} <= {*COVERED, *UNMEASURED}
