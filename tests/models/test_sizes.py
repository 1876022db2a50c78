import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from llm.errors import ConfigError
from llm.models.configuration import find_weights, load_config
from llm.models.mixtures import find_experts
from llm.models.options import ModelOptions
from llm.models.patches.experts import experts_on_meta
from llm.models.shapes import SIZES
from llm.models.sizes import active_parameters, flops_per_token, parameter_counts
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.models import MIXTURES, tiny_config, tiny_model
from tests.support.package import ROOT

# Families whose every matrix product torch's counter sees.
COUNTED = ["gpt2", "gpt_neox", "gptj", "opt", "llama", "mistral", "qwen2", "qwen3", "phi", "olmo2"]


def load(**options: Any) -> PreTrainedConfig:
    return load_config(ModelOptions(**options))


def on_meta(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# Layers, width and heads of table 1 of Narayanan et al. 2021.
PAPER = {
    "1.7B": (24, 2304, 24),
    "3.6B": (30, 3072, 32),
    "7.5B": (36, 4096, 32),
    "18.4B": (40, 6144, 48),
    "39.1B": (48, 8192, 64),
    "76.1B": (60, 10240, 80),
    "145.6B": (80, 12288, 96),
    "310.1B": (96, 16384, 128),
}


@pytest.mark.parametrize("name", PAPER)
def test_parameters_and_operations_are_those_of_the_papers_formulas(name: str) -> None:
    layers, h, heads = PAPER[name]
    config = load(model_size=name)
    model = on_meta(config)

    assert (config.n_layer, config.n_embd, config.n_head) == (layers, h, heads)
    assert (config.vocab_size, config.n_positions) == (51200, 2048)
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h))
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == pytest.approx(formula, rel=1e-4)
    # Without recomputation three quarters of the blocks' share of the paper's 96 B s l h^2.
    operations = 72 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (12 * layers * h))
    assert flops_per_token(model, block_size=2048) == pytest.approx(operations, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("124M", 124_439_808),
        ("355M", 354_823_168),
        ("774M", 774_030_080),
        ("1.5B", 1_557_611_200),
        ("1.7B", 1_652_230_656),
        ("310.1B", 310_130_540_544),
    ],
)
def test_a_size_alone_is_a_gpt2_with_that_number_of_parameters(name: str, parameters: int) -> None:
    model = on_meta(load(model_size=name))

    assert model.config.model_type == "gpt2"
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_guide_names_every_published_size() -> None:
    guide = (ROOT / "docs/guides/parallelism.md").read_text(encoding="utf-8")
    section = guide.partition("\n## Sizes of models\n")[2].partition("\n## ")[0]
    published_sizes = "".join(re.findall(r"^- \d.*", section, flags=re.MULTILINE))
    assert set(re.findall(r"\b[\d.]+[MB]\b", published_sizes)) == {*SIZES}


def test_a_llama_keeps_the_proportions_of_its_mlp_and_of_its_key_heads(tmp_path: Path) -> None:
    tiny = tiny_config("llama")
    tiny.update({"num_attention_heads": 4, "num_key_value_heads": 2})
    tiny.save_pretrained(tmp_path)
    config = load(config_name=str(tmp_path), model_size="7.5B")

    assert (config.num_hidden_layers, config.hidden_size) == (36, 4096)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 16)
    assert config.intermediate_size == 4096 * tiny.intermediate_size // tiny.hidden_size
    assert config.vocab_size == tiny.vocab_size
    assert config.head_dim == 128


def test_a_llama_of_a_size_has_as_many_block_parameters_as_the_gpt() -> None:
    config = load(model_type="llama", model_size="18.4B")
    assert config.intermediate_size == 16512  # 6144 * 11008 / 4096

    model = on_meta(config)
    embedding = 2 * 32000 * 6144
    blocks = sum(parameter.numel() for parameter in model.parameters()) - embedding
    assert blocks == pytest.approx(12 * 40 * 6144**2, rel=0.01)


def test_megatrons_three_numbers_make_a_gpt2(tmp_path: Path) -> None:
    config = load(num_layers=3, hidden_size=96, num_attention_heads=6)

    assert (config.n_layer, config.n_embd, config.n_head) == (3, 96, 6)
    assert (config.vocab_size, config.n_positions) == (50257, 1024)


def test_one_number_changes_a_named_model_and_overrides_come_after(tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)
    config = load(
        model_name_or_path=str(tmp_path), num_layers=7, config_overrides="n_positions=4096"
    )

    assert (config.n_layer, config.n_embd, config.n_positions) == (7, 32, 4096)


def test_a_model_of_a_chosen_size_is_trained_from_scratch() -> None:
    # The Hub's name stands for weights, which would not fit.
    assert find_weights(ModelOptions(model_name_or_path="gpt2")) == "gpt2"
    assert find_weights(ModelOptions(model_name_or_path="gpt2", model_size="355M")) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"model_type": "qwen3", "model_size": "5M"},
            "No qwen3 with a vocabulary of 151,936 tokens has 5M parameters within 5%; the nearest "
            "has 19,538,240.",
        ),
        ({"model_type": "bloom", "num_layers": 2}, "this model is bloom"),
        ({"model_type": "gpt2", "hidden_size": 100}, "--hidden_size 100 cannot be divided by"),
    ],
)
def test_impossible_sizes_are_refused_in_one_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(**options)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_size": "small"}, "--model_size small is not a number of parameters such as 60M"),
        ({"model_size": "1.7B", "num_layers": 2}, "--model_size 1.7B sets --num_layers already"),
        ({"num_layers": 2}, "give --hidden_size and --num_attention_heads too"),
    ],
)
def test_sizes_that_contradict_are_refused_before_anything_is_read(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(GPTConfig(train_file="a.txt", tokenizer_name="gpt2", **options))
    assert says in str(refused.value)


@pytest.mark.parametrize("family", COUNTED)
def test_flops_per_token_are_three_forward_passes_as_torch_counts_them(family):
    # Torch does not count the fused attention of a CPU.
    model = AutoModelForCausalLM.from_config(
        tiny_config(family), attn_implementation="eager"
    ).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 16, dtype=torch.long), use_cache=False)
    counted = 3 * counter.get_total_flops() / (2 * 16)
    assert flops_per_token(model, block_size=16) == pytest.approx(counted, rel=0.02)


def test_gpt2_124m_needs_855_mflop_a_token_at_1024():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config())
    assert flops_per_token(model, block_size=1024) == pytest.approx(855e6, rel=0.005)


def test_experts_that_a_token_does_not_choose_are_not_active():
    whole = on_meta(tiny_config("mixtral", num_local_experts=8, num_experts_per_tok=8))
    two = on_meta(tiny_config("mixtral", num_local_experts=8, num_experts_per_tok=2))
    total, expert = parameter_counts(two)["total"], 3 * 32 * 64
    assert active_parameters(whole) == total
    assert active_parameters(two) == total - 2 * 6 * expert
    dense = on_meta(tiny_config("gpt2"))
    assert active_parameters(dense) == parameter_counts(dense)["total"]


def test_flops_count_only_the_chosen_experts_of_a_mixture():
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    config = tiny_config("mixtral")
    config.num_experts_per_tok = config.num_local_experts
    dense = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for name, p in dense.named_parameters() if "experts" in name)
    chosen = tiny_config("mixtral").num_experts_per_tok / config.num_local_experts
    difference = flops_per_token(dense, block_size=8) - flops_per_token(model, block_size=8)
    assert difference == pytest.approx(6 * experts * (1 - chosen))
    assert difference > 0


@pytest.mark.parametrize("family", ["mixtral", *MIXTURES])
def test_flops_count_as_many_experts_as_a_router_sends_a_token_to(family):
    model = tiny_model(tiny_config(family), device=torch.device("meta"))
    stacks = list(find_experts(model).values())
    shapes = []
    for stack in stacks:
        stack.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[1].shape)))
    with experts_on_meta(model), torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.long, device="meta"), use_cache=False)
    assert shapes == [(8, 2)] * 2

    used = flops_per_token(model, block_size=0)
    all_experts = 6 * sum(p.numel() for stack in stacks for p in stack.parameters())
    for stack in stacks:
        assert stack.num_experts == 4
        stack.num_experts = 2  # as if a token went to all experts
    assert flops_per_token(model, block_size=0) - used == all_experts * (1 - 2 / 4)
