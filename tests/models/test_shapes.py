"""Shapes from a number of parameters, and counts without torch."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llm.config.duration import Tokens
from llm.errors import ConfigError
from llm.models.configuration import load_config
from llm.models.options import ModelOptions
from llm.models.shapes import (
    DEFAULT_FIELDS,
    SHAPED,
    SIZES,
    count_parameters,
    fit_shape,
    shape_changes,
)
from llm.models.sizes import parameter_counts


def counts_of(config: Any) -> tuple[int, int]:
    """The parameters of the library's model, and those of its embeddings."""
    with torch.device("meta"):
        counts = parameter_counts(AutoModelForCausalLM.from_config(config))
    return counts["total"], counts["embedding"]


@pytest.mark.parametrize("family", SHAPED)
def test_default_fields_are_those_of_the_library(family: str):
    fields = CONFIG_MAPPING[family]().to_dict()
    assert {name: fields.get(name) for name in DEFAULT_FIELDS[family]} == DEFAULT_FIELDS[family]


@pytest.mark.parametrize("size", ["60M", "124M", "355M", "1B", "7B"])
@pytest.mark.parametrize("family", SHAPED)
def test_a_fitted_shape_has_the_parameters_of_its_name(family: str, size: str):
    fields = {"model_type": family, **DEFAULT_FIELDS[family]}
    num_layers, width, num_heads = fit_shape(size, fields)
    shape = {
        "num_layers": num_layers,
        "hidden_size": width,
        "num_attention_heads": num_heads,
    }
    config = load_config(ModelOptions(model_type=family, **shape))

    total, embedding = counts_of(config)

    assert count_parameters(config.to_dict()) == (total, embedding)
    assert total == pytest.approx(Tokens(size), rel=0.05)
    assert width // num_heads in (64, 128)


@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [
        ("gpt2", "60M", (11, 512, 8)),
        ("gpt2", "124M", SIZES["124M"][:3]),
        ("gpt2", "355M", SIZES["355M"][:3]),
        ("llama", "124M", (10, 768, 12)),  # the table's shape has 138M parameters
        ("llama", "1B", (23, 1792, 28)),
        ("gpt2", "1.5B", SIZES["1.5B"][:3]),
        ("mistral", "1.5B", (25, 2048, 16)),  # its groups of 4 do not divide the table's 25 heads
    ],
)
def test_shapes_are_those_of_the_table_if_they_fit(family: str, size: str, shape: tuple[int, ...]):
    assert fit_shape(size, {"model_type": family, **DEFAULT_FIELDS[family]}) == shape


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"tie_word_embeddings": False, "n_inner": 500}),
        ("gpt_neox", {"attention_bias": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 48}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("mistral", {"head_dim": 48}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 2}),
    ],
)
def test_counts_follow_the_fields_that_change_them(family: str, changes: dict[str, Any]):
    config = CONFIG_MAPPING[family](
        **{"vocab_size": 512, "num_hidden_layers": 3, "hidden_size": 128, "pad_token_id": None},
        **{"num_attention_heads": 4, **changes},
    )
    assert count_parameters(config.to_dict()) == counts_of(config)


@pytest.mark.parametrize(
    ("size", "vocab_size", "positions"), [("60M", 50257, 1024), ("2B", 51200, 2048)]
)
def test_a_fitted_size_alone_is_a_gpt2_of_the_papers(size: str, vocab_size: int, positions: int):
    config = load_config(ModelOptions(model_size=size))

    assert (config.vocab_size, config.n_positions) == (vocab_size, positions)
    assert counts_of(config)[0] == pytest.approx(Tokens(size), rel=0.05)


@pytest.mark.parametrize("size", ["0M", "1e400"])
def test_a_size_that_no_model_has_is_refused(size: str):
    with pytest.raises(ConfigError, match=f"{size} is not a number of parameters"):
        fit_shape(size, {"model_type": "gpt2", **DEFAULT_FIELDS["gpt2"]})


def test_a_size_for_heads_that_do_not_share_keys_evenly_is_refused():
    fields = {"model_type": "qwen2", **DEFAULT_FIELDS["qwen2"], "num_attention_heads": 16}
    with pytest.raises(ConfigError, match="has 16 attention heads and num_key_value_heads=32"):
        shape_changes(ModelOptions(model_size="60M"), fields)
