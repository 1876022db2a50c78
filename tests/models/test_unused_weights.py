"""Weights without a gradient are found without values, as a real backward pass shows them."""

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from llm.models.attention import disable_packing_detection
from llm.models.unused_weights import find_unused_weights
from tests.support.models import FAMILIES, MIXTURES, VOCAB_SIZE, tiny_config, tiny_model


def after_a_backward_pass(config: PreTrainedConfig, length: int) -> list[str]:
    """The weights of a model with values that get no gradient."""
    model = tiny_model(config)
    ids = torch.randint(VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(0))
    model(ids, use_cache=False).logits.sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [name for name, parameter in trained.items() if parameter.grad is None]


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_the_weights_without_a_gradient_are_found_on_the_meta_device(family: str) -> None:
    config = tiny_config(family)
    model = tiny_model(config, activation_checkpointing="full" if family != "mamba" else "none")
    modes = [module.training for module in model.modules()]

    unused = find_unused_weights(model, length=16)

    assert unused == after_a_backward_pass(config, 16)
    assert bool(unused) == (family in ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"))
    assert all("indexer" in name for name in unused)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_that_only_long_samples_use_are_not_unused() -> None:
    config = tiny_config("deepseek_v4")

    short = find_unused_weights(tiny_model(config), length=7)
    long = find_unused_weights(tiny_model(config), length=8)

    assert short == after_a_backward_pass(config, 7)
    assert long == after_a_backward_pass(config, 8)
    compressor = "model.layers.1.self_attn.compressor.kv_proj.weight"  # of eight tokens
    assert compressor in short
    assert compressor not in long


def test_skipped_layers_are_not_unused() -> None:
    config = tiny_config("opt", layerdrop=0.9)
    assert find_unused_weights(tiny_model(config), length=16) == []


def test_a_model_that_needs_values_is_not_judged() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "big_bird", is_decoder=True, attention_type="original_full", vocab_size=VOCAB_SIZE, **shape
    )
    disable_packing_detection()
    assert find_unused_weights(tiny_model(config), length=16) is None
