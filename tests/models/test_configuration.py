from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from llm.errors import ConfigError
from llm.models.configuration import (
    check_no_layers_skipped,
    has_weights,
    load_config,
    max_positions,
)
from llm.models.options import ModelOptions
from tests.support.families import every_family
from tests.support.models import tiny_config


def load(**options: Any) -> PreTrainedConfig:
    return load_config(ModelOptions(**options))


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> str:
    tiny_config("gpt2").save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


def test_config_name_comes_before_the_models_own(gpt2_folder: str, tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "llama")

    config = load(model_name_or_path=gpt2_folder, config_name=str(tmp_path / "llama"))
    assert config.model_type == "llama"


def test_a_name_comes_before_a_model_type(gpt2_folder: str) -> None:
    config = load(model_name_or_path=gpt2_folder, model_type="llama")

    assert (config.model_type, config.n_embd) == ("gpt2", 32)


def test_a_model_type_has_the_librarys_default_size() -> None:
    config = load(model_type="gpt2")

    assert (config.n_layer, config.n_embd, config.vocab_size) == (12, 768, 50257)


def test_overrides_take_the_type_of_the_field() -> None:
    config = load(
        model_type="gpt2",
        config_overrides="n_layer=4, n_embd=128,resid_pdrop=0,scale_attn_weights=false,"
        "activation_function=relu,n_inner=77",
    )

    assert (config.n_layer, config.n_embd, config.n_inner) == (4, 128, 77)
    assert config.resid_pdrop == 0.0
    assert config.scale_attn_weights is False
    assert config.activation_function == "relu"


def test_overrides_change_a_folders_configuration_under_either_name(gpt2_folder: str) -> None:
    config = load(model_name_or_path=gpt2_folder, config_overrides="num_hidden_layers=5")

    assert (config.n_layer, config.n_embd) == (5, 32)


def test_what_follows_from_an_overridden_field_follows() -> None:
    config = load(model_type="llama", config_overrides="hidden_size=128,num_attention_heads=4")

    assert config.head_dim == 32


def test_fields_that_only_the_models_code_reads_are_overridden(
    tmp_path: Path,
) -> None:
    tiny_config("llama", rope_theta=10_000.0).save_pretrained(tmp_path)
    folder = str(tmp_path)

    # Qwen3-MoE's attention reads head_dim with a default.
    assert load(model_type="qwen3_moe", config_overrides="head_dim=64").head_dim == 64
    # transformers 5 keeps rope_theta in rope_parameters, and a saved file states them.
    for named in ({"model_type": "llama"}, {"model_name_or_path": folder}):
        config = load(**named, config_overrides="rope_theta=5e5")
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500_000.0}
    assert load(model_name_or_path=folder, config_overrides="rope_theta=10000") is not None
    config = load(model_type="gpt_neox", config_overrides="rotary_pct=0.5,hidden_size=128")
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    config = load(model_type="gemma3_text", config_overrides="rope_local_base_freq=9")
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 9


def test_overrides_are_valid_only_together() -> None:
    overrides = "num_attention_heads=5,rope_theta=3,hidden_size=100"

    assert load(model_type="llama", config_overrides=overrides).head_dim == 20


def test_a_number_may_be_real_if_only_its_default_is_whole() -> None:
    overrides = "full_attn_alpha_factor=0.5"

    assert load(model_type="minimax", config_overrides=overrides).full_attn_alpha_factor == 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["--model_name_or_path", "--config_name", "--model_type"]),
        ({"model_type": "gtp2"}, ["gtp2", "gpt2"]),
        ({"model_type": "t5"}, ["t5", "not a causal language model"]),
        ({"model_type": "gpt2", "config_overrides": "n_layers=4"}, ["n_layers", "n_layer"]),
        ({"model_type": "gpt2", "config_overrides": "n_layer=4.5"}, ["a whole number"]),
        ({"model_type": "gpt2", "config_overrides": "resid_pdrop=x"}, ["a number"]),
        ({"model_type": "gpt2", "config_overrides": "use_cache=x"}, ["true or false"]),
        ({"model_type": "gpt2", "config_overrides": "n_layer"}, ["field=value"]),
        ({"model_type": "gpt2", "config_overrides": "rope_theta=5"}, ["no field rope_theta"]),
        ({"model_type": "llama", "config_overrides": "rope_thea=5"}, ["nearest: rope_theta"]),
        ({"model_type": "llama", "config_overrides": "rope_theta=x"}, ["a number"]),
        ({"model_type": "qwen3_moe", "config_overrides": "headdim=64"}, ["nearest: head_dim"]),
        (
            {"model_type": "gpt2", "config_overrides": "temperature=5"},
            ["temperature=5 changes nothing"],
        ),
        (
            {"model_type": "llama", "config_overrides": "num_attention_heads=5"},
            ["num_attention_heads=5", "not a multiple"],
        ),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(**options)

    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "without a config.json"),
        ('{"model_type"', "cannot be read"),
        ('{"model_type": "nonesuch"}', "nonesuch"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}', "--trust_remote_code"),
    ],
)
def test_a_folder_that_is_not_a_model_is_refused(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=words):
        load(model_name_or_path=str(tmp_path))


def test_an_unreachable_hub_is_reported_with_the_name_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ConfigError, match=r"nobody/nothing .* cannot be reached: .* local folder"):
        load(model_name_or_path="nobody/nothing")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"cannot be reached \(HF_HUB_OFFLINE is set\): check"):
        load(model_name_or_path="nobody/nothing")


@pytest.mark.parametrize(
    ("model_type", "field"),
    [("opt", "layerdrop"), ("xglm", "layerdrop"), ("bart", "decoder_layerdrop")],
)
def test_layers_that_are_skipped_at_random_are_refused(model_type: str, field: str) -> None:
    check_no_layers_skipped(load(model_type=model_type, config_overrides=f"{field}=0"))
    with pytest.raises(ConfigError, match=rf"{field}=0.1\), .* --config_overrides {field}=0, or"):
        check_no_layers_skipped(load(model_type=model_type, config_overrides=f"{field}=0.1"))


@every_family
def test_the_maximum_position_is_that_of_the_family(family: str) -> None:
    expected = None if family in ("bloom", "mamba") else 64

    assert max_positions(tiny_config(family)) == expected


def test_a_folder_has_weights_when_it_holds_them_whole_or_in_shards(tmp_path: Path) -> None:
    assert not has_weights(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").touch()
    assert has_weights(str(tmp_path))


def test_a_name_on_the_hub_is_taken_to_have_weights() -> None:
    assert has_weights("EleutherAI/gpt-neo-125m")


@pytest.mark.parametrize(
    ("model_type", "overrides", "sentence"),
    [
        (
            "llama",
            "num_attention_heads=4,num_key_value_heads=8",
            "The llama model has num_attention_heads=4 and num_key_value_heads=8, and the first "
            "must be a multiple of the second",
        ),
        ("gpt_oss", "num_attention_heads=4", "num_key_value_heads=8, and the first must be a"),
        ("llama", "num_key_value_heads=0", "cannot have num_key_value_heads=0, which must"),
        ("llama", "head_dim=0", "cannot have head_dim=0"),
        ("gpt2", "n_head=0", "The gpt2 model cannot have num_attention_heads=0"),
        ("gpt2", "n_embd=0", "cannot have hidden_size=0"),
        ("gpt2", "n_layer=-1", "cannot have num_hidden_layers=-1"),
        ("gpt2", "vocab_size=0", "cannot have vocab_size=0"),
        ("gpt2", "n_layer=20000", "num_hidden_layers=20000, more than 1000"),
        (
            "mixtral",
            "num_experts_per_tok=9",
            "The mixtral model cannot have num_experts_per_tok=9, which must be at least 1 and at "
            "most 8, its number of experts: change config.json or --config_overrides.",
        ),
        ("mixtral", "num_experts_per_tok=0", "cannot have num_experts_per_tok=0"),
        ("ernie4_5_moe", "moe_k=65", "cannot have num_experts_per_tok=65.* at most 64"),
        ("deepseek_v3", "num_experts_per_tok=257", "num_experts_per_tok=257.* at most 256"),
    ],
)
def test_impossible_sizes_are_refused(model_type: str, overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(model_type=model_type, config_overrides=overrides)


def test_latent_attention_may_have_any_number_of_key_value_heads() -> None:
    config = load(model_type="deepseek_v3", config_overrides="num_attention_heads=4")

    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 128)
