"""Which models can be divided layer by layer, and what is said of the others."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm.errors import ConfigError
from llm.parallel.tensor_plans import (
    check_tensor_parallel,
    list_planned_model_types,
    make_tensor_plan,
)
from tests.support.models import tiny_config


def refusal(family: str, size: int, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        check_tensor_parallel(tiny_config(family, **changes), size)
    return str(caught.value)


def empty_model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_the_common_families_have_a_plan():
    known = {"gpt2", "gpt_neo", "opt", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma"}
    assert known < set(list_planned_model_types())


@pytest.mark.parametrize("family", ["bloom", "falcon", "mamba", "mixtral"])
def test_a_family_without_an_exact_plan_is_refused_with_alternatives(family):
    assert family not in list_planned_model_types()
    said = refusal(family, 2)
    assert f"a plan of how to divide {family}" in said
    assert "--data_parallel_shard_size 2" in said
    assert "gpt2, gpt_neo, gpt_neox," in said


def test_heads_must_be_divisible_by_the_tensor_parallel_size():
    said = refusal("llama", 3, num_attention_heads=4)
    assert said.startswith("--tensor_parallel_size 3 does not divide the 4 num_attention_heads of")
    said = refusal("llama", 4, num_attention_heads=4, num_key_value_heads=2)
    assert "does not divide the 2 num_key_value_heads of llama" in said
    assert "does not divide the 2 num_attention_heads of gpt2" in refusal("gpt2", 4)
    check_tensor_parallel(tiny_config("llama", num_attention_heads=4, num_key_value_heads=4), 4)
    check_tensor_parallel(tiny_config("bloom"), 1)


def test_a_plan_names_the_modules_of_each_layer():
    plan = make_tensor_plan(empty_model(tiny_config("gpt2")))
    assert plan.styles["transformer.h.1.attn.c_attn"] == "conv1d_heads"
    assert plan.styles["transformer.wte"] == "embedding_rowwise"
    assert len(plan.styles) == 2 * 4 + 2
    assert plan.divided_attributes == {f"transformer.h.{n}.attn": "split_size" for n in range(2)}
    plan = make_tensor_plan(empty_model(tiny_config("qwen3")))
    assert plan.styles["model.layers.0.self_attn.q_norm"] == "replicated_with_grad_allreduce"


def test_a_plan_that_forgets_a_weight_beside_split_columns_is_refused():
    """Its gradient would be that of one rank's columns, on each rank another one."""
    model = empty_model(tiny_config("llama"))
    model.model.layers[0].mlp.act_fn = torch.nn.PReLU(device="meta")
    with pytest.raises(ConfigError, match=r"around model\.layers\.0\.mlp\.act_fn\.weight, but not"):
        make_tensor_plan(model)
