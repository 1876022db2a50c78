import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from llm.errors import ConfigError
from llm.extensions.kfac.layers import find_covered_layers
from tests.support.models import tiny_config


def family(name, **options):
    return find_covered_layers(AutoModelForCausalLM.from_config(tiny_config(name)), **options)


def run(model):
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "layers_per_block"),
    [
        ("gpt2", 4),
        ("gpt_neo", 6),
        ("gpt_neox", 4),
        ("opt", 6),
        ("llama", 7),
        ("qwen2", 7),
        ("falcon", 4),
    ],
)
def test_all_linear_layers_of_all_blocks_are_covered(name, layers_per_block):
    coverage = family(name)

    assert len(coverage.layers) == 2 * layers_per_block


def test_output_head_embeddings_and_norms_are_skipped_with_a_reason():
    skipped = family("llama").skipped

    assert skipped["lm_head"] == "since it is the output head"
    assert skipped["model.embed_tokens"] == "since it is an Embedding"
    assert skipped["model.norm"] == "since it is a LlamaRMSNorm"


def test_stacks_of_experts_are_covered_matrix_by_matrix():
    coverage = family("mixtral")

    attention, stacks = 4, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert len(coverage.layers) == 2 * (attention + len(stacks))
    found = {layer.name: layer for layer in coverage.layers}
    gate_up = found["model.layers.0.mlp.experts.gate_up_proj"]
    assert (gate_up.weight.shape, gate_up.rows, gate_up.columns) == ((4, 128, 32), 128, 32)
    assert gate_up.is_stack
    assert not found["model.layers.0.self_attn.q_proj"].is_stack


def test_stacks_are_left_out_where_nothing_covers_them():
    coverage = family("mixtral", covers_stacks=False)

    assert not any(layer.is_stack for layer in coverage.layers)
    assert (
        "Not covered, since it is a stack of experts: model.layers.0.mlp.experts, "
        "model.layers.1.mlp.experts (2 modules)." in coverage.describe()
    )


def test_a_pattern_skips_one_of_two_stacks():
    coverage = family("mixtral", skip_layers=["experts.down"])

    assert [layer.name for layer in coverage.layers if layer.is_stack] == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.gate_up_proj",
    ]


def test_mambas_convolution_is_not_a_stack_of_experts():
    skipped = family("mamba").skipped

    assert skipped["backbone.layers.0.mixer.conv1d"] == "since it is a Conv1d"


def test_conv1d_is_covered_with_outputs_in_rows_and_bias_as_last_column():
    layers = {layer.name: layer for layer in family("gpt2").layers}
    layer = layers["transformer.h.0.attn.c_attn"]
    layer.weight.grad = torch.randn_like(layer.weight)
    layer.bias.grad = torch.randn_like(layer.bias)

    matrix = layer.gradient()

    assert (layer.rows, layer.columns) == (96, 33)
    torch.testing.assert_close(matrix[:, :-1], layer.weight.grad.T)
    torch.testing.assert_close(matrix[:, -1], layer.bias.grad)
    weight, bias = layer.split(matrix)
    torch.testing.assert_close(weight, layer.weight.grad)
    torch.testing.assert_close(bias, layer.bias.grad)


@pytest.mark.parametrize(
    ("name", "groups"),
    [("llama", [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]), ("gpt2", [])],
)
def test_layers_that_read_the_same_tensor_share_a_factor(name, groups):
    shared = {}
    for layer in family(name, sample_forward=run).layers:
        shared.setdefault(layer.input_name, set()).add(layer.name.rpartition(".")[2])

    assert [names for names in shared.values() if len(names) > 1] == 2 * groups


def test_a_pattern_skips_the_layers_whose_names_it_matches():
    names = [layer.name for layer in family("llama", skip_layers=[r"mlp\.(gate|up)"]).layers]

    assert len(names) == 2 * 5
    assert not any("gate" in name or "up_proj" in name for name in names)


def test_a_pattern_that_matches_no_layer_is_refused():
    with pytest.raises(ConfigError, match=r"'attn\.typo' matches no Linear or Conv1D"):
        family("gpt2", skip_layers=["mlp", "attn.typo"])


def test_an_invalid_pattern_is_refused():
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        family("gpt2", skip_layers=["("])


def test_a_model_without_a_layer_to_cover_is_refused():
    with pytest.raises(ConfigError, match="found no layer to cover"):
        find_covered_layers(nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3)))
    with pytest.raises(ConfigError, match="found no layer to cover"):
        family("llama", skip_layers=["."])


def test_frozen_and_tied_weights_are_not_covered():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    model[2].weight = model[1].weight

    coverage = find_covered_layers(model)

    assert [layer.name for layer in coverage.layers] == ["3"]
    assert "frozen" in coverage.skipped["0"]
    assert "tied" in coverage.skipped["1"]
    assert "tied" in coverage.skipped["2"]


def test_the_description_counts_parameters_and_explains_skipped_modules():
    lines = family("gpt2", skip_layers=["mlp"]).describe().splitlines()

    assert lines[0] == "K-FAC covers 4 layers with 8,448 of 37,760 parameters (22.4%)."
    assert "Not covered, as --kfac_skip_layers asks: transformer.h.0.mlp.c_fc" in "\n".join(lines)
