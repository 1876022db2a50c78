"""Which models may be given a shard of each sequence; test_context.py trains them."""

import pytest
import transformers

from llm.errors import ConfigError
from llm.parallel.context import check_context_parallel
from tests.support.models import FAMILIES, tiny_config, tiny_model

REFUSED = {"gpt_neo", "bloom", "falcon", "mamba"}
"""Their attention is code of their own; mamba has none. GPT-J's was until transformers 5.24."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gptj"])
def test_a_sequence_can_be_sharded_only_if_just_attention_mixes_tokens(family):
    model = tiny_model(tiny_config(family))
    kernel = model.config._attn_implementation
    if family in REFUSED:
        with pytest.raises(ConfigError, match=f"samples of 16 tokens of {family}: its tokens meet"):
            check_context_parallel(model, num_ranks=2, block_size=16)
    else:
        check_context_parallel(model, num_ranks=2, block_size=16)
    assert model.config._attn_implementation == kernel
    assert model.training


def test_recurrent_layers_among_attention_are_detected():
    config = transformers.JambaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    with pytest.raises(ConfigError, match="jamba"):
        check_context_parallel(tiny_model(config), num_ranks=2, block_size=16)


def test_attention_with_a_soft_cap_is_refused():
    config = transformers.Gemma2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    with pytest.raises(ConfigError, match="gemma2"):
        check_context_parallel(tiny_model(config), num_ranks=2, block_size=16)


@pytest.mark.parametrize(("block_size", "divisible"), [(32, True), (64, False)])
def test_length_dependent_rope_is_refused_if_a_shard_ends_before_its_limit(block_size, divisible):
    # Of 64 positions, one of two ranks has the last and the other one none beyond the 48th.
    rotation = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_model(tiny_config("llama", max_position_embeddings=48, rope_parameters=rotation))
    if divisible:
        check_context_parallel(model, num_ranks=2, block_size=block_size)
    else:
        with pytest.raises(ConfigError, match="samples of 64 tokens of llama"):
            check_context_parallel(model, num_ranks=2, block_size=block_size)
