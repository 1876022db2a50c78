"""Sizes of models: presets by name, parameters, FLOPs per token, and the blocks that repeat.

The presets and Megatron's three numbers (layers, width, heads) are for GPT-2- and Llama-shaped
models.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from llm.errors import ConfigError
from llm.models.options import ModelOptions


class ModelSize(NamedTuple):
    """The shape of a GPT; vocabulary and positions only apply if no model is named."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int = 51200
    max_positions: int = 2048


SIZES = {
    # Radford et al. 2019, table 2, with the parameter counts of the released weights.
    "124M": ModelSize(12, 768, 12, 50257, 1024),
    "355M": ModelSize(24, 1024, 16, 50257, 1024),
    "774M": ModelSize(36, 1280, 20, 50257, 1024),
    "1.5B": ModelSize(48, 1600, 25, 50257, 1024),
    # Narayanan et al. 2021 (arXiv:2104.04473), table 1.
    "1.7B": ModelSize(24, 2304, 24),
    "3.6B": ModelSize(30, 3072, 32),
    "7.5B": ModelSize(36, 4096, 32),
    "18.4B": ModelSize(40, 6144, 48),
    "39.1B": ModelSize(48, 8192, 64),
    "76.1B": ModelSize(60, 10240, 80),
    "145.6B": ModelSize(80, 12288, 96),
    "310.1B": ModelSize(96, 16384, 128),
}

SHAPED = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
"""Architectures with sizes that the options can set."""

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")
"""Names of the number of chosen experts: most configurations, AriaText, Gemma 4, DBRX."""

_MLP_WIDTH_MULTIPLE = 128
"""The width of a gated MLP becomes a multiple of this number."""


def shape_changes(options: ModelOptions, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face configuration fields that the shape options change.

    Vocabulary and positions stay, as do the ratios of MLP width to hidden size and of query heads
    to key-value heads: GPT-2's MLP is four times as wide as the hidden states, Llama 2's 11008 /
    4096 times (rounded up to a multiple of 128).

    Args:
        options: A size by name, numbers, or both; a number overrides the size.
        fields: The configuration's fields, from its `to_dict`.

    Returns:
        Values by the architecture's names of these fields.

    Raises:
        ConfigError: The size does not exist, the architecture has another shape, or the numbers do
            not divide each other.
    """
    model_type = str(fields["model_type"])
    if model_type not in SHAPED:
        raise ConfigError(
            f"--model_size, --num_layers, --hidden_size and --num_attention_heads are for "
            f"{', '.join(SHAPED)}, and this model is {model_type}; set its fields with "
            "--config_overrides."
        )
    field_names = ("n_layer", "n_embd", "n_head")
    if model_type != "gpt2":
        field_names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    old_shape = [int(fields[name]) for name in field_names]
    new_shape = _choose_shape(options, old_shape)
    old_layers, old_width, old_heads = old_shape
    new_layers, new_width, new_heads = new_shape
    if new_width % new_heads:
        raise ConfigError(
            f"--hidden_size {new_width} cannot be divided by --num_attention_heads {new_heads}; "
            "change one of them."
        )
    changes: dict[str, Any] = dict(zip(field_names, new_shape, strict=True))
    if model_type == "gpt2":
        mlp_width = fields.get("n_inner")
        if mlp_width is not None:  # None means four times the hidden size
            changes["n_inner"] = mlp_width * new_width // old_width
        return changes
    changes["intermediate_size"] = fields["intermediate_size"]
    if new_width != old_width:
        scaled_width = fields["intermediate_size"] * (new_width / old_width)
        num_multiples = math.ceil(scaled_width / _MLP_WIDTH_MULTIPLE)
        changes["intermediate_size"] = num_multiples * _MLP_WIDTH_MULTIPLE
    if fields.get("num_key_value_heads") is not None:
        changes["num_key_value_heads"] = _scale_key_value_heads(fields, old_heads, new_heads)
    if fields.get("head_dim") is not None and (new_width, new_heads) != (old_width, old_heads):
        changes["head_dim"] = new_width // new_heads
    if fields.get("layer_types") is not None and new_layers != old_layers:
        changes["layer_types"] = None  # transformers fills in one per layer
    return changes


def _choose_shape(options: ModelOptions, old_shape: Sequence[int]) -> list[int]:
    """Return layers, width and heads: each as a number gives it, else a size, else as before."""
    base_shape = old_shape if options.model_size is None else find_size(options.model_size)[:3]
    overrides = (options.num_layers, options.hidden_size, options.num_attention_heads)
    return [
        base if override is None else override
        for override, base in zip(overrides, base_shape, strict=True)
    ]


def find_size(name: str) -> ModelSize:
    """Return a size by its name.

    Raises:
        ConfigError: The size does not exist.
    """
    if name not in SIZES:
        raise ConfigError(f"--model_size {name} is none of {', '.join(SIZES)}.")
    return SIZES[name]


def gpt2_fields(model_size: str | None) -> dict[str, int]:
    """Return vocabulary and positions of a GPT-2 that is named only by its size."""
    shape = SIZES["124M"] if model_size is None else find_size(model_size)
    return {"vocab_size": shape.vocab_size, "n_positions": shape.max_positions}


def _scale_key_value_heads(fields: Mapping[str, Any], old_heads: int, new_heads: int) -> int:
    """Return the number of key-value heads that keeps their ratio to the query heads."""
    heads_per_group = old_heads // int(fields["num_key_value_heads"])
    if new_heads % heads_per_group:
        raise ConfigError(
            f"--num_attention_heads {new_heads} cannot be divided by the {heads_per_group} heads "
            "that share their keys and values in this model; choose a multiple of it."
        )
    return new_heads // heads_per_group


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the transformer blocks of a model, in order.

    The blocks are the list of modules with the most parameters, or the longer list if two are
    equal.

    Raises:
        ValueError: The model has no list of modules.
    """
    module_lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    module_lists = [m for m in module_lists if next(m.parameters(), None) is not None]
    if not module_lists:
        raise ValueError(f"{type(model).__name__} has no list of layers.")
    return max(module_lists, key=lambda m: (sum(p.numel() for p in m.parameters()), len(m)))


def parameter_counts(model: PreTrainedModel) -> dict[str, int]:
    """Count parameters by kind; tied parameters count once.

    Returns:
        Counts by kind: "total", "embedding" (tokens, positions, untied output head), "other",
        "trainable" and "frozen". "embedding" and "other" add up to "total", as do "trainable" and
        "frozen".
    """
    head = model.get_output_embeddings()
    embedding_modules = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    embedding_parameters = {p for module in embedding_modules for p in module.parameters()}
    num_total = sum(parameter.numel() for parameter in model.parameters())
    num_embedding = sum(parameter.numel() for parameter in embedding_parameters)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "total": num_total,
        "embedding": num_embedding,
        "other": num_total - num_embedding,
        "trainable": num_trainable,
        "frozen": num_total - num_trainable,
    }


def active_parameters(model: PreTrainedModel) -> int:
    """Count the parameters that a token uses: all but those of the experts it does not choose.

    Tied parameters count once, as in `parameter_counts`.
    """
    num_chosen = experts_per_token(model.config.get_text_config())
    num_active = parameter_counts(model)["total"]
    for module in model.modules():
        num_experts, stacks = _expert_stacks(module)
        if num_chosen and stacks:
            num_unused_experts = num_experts - num_chosen
            num_active -= sum(p.numel() for p in stacks) * num_unused_experts // num_experts
    return num_active


def _expert_stacks(module: nn.Module) -> tuple[int, list[nn.Parameter]]:
    """Return the number of experts in a module, and the weights that stack their matrices.

    A stack is [experts, rows, columns], or [experts * rows, columns] in DBRX. The router's matrix
    is not a stack.
    """
    matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
    num_experts = getattr(module, "num_experts", None)
    if num_experts:
        return int(num_experts), [p for p in matrices if p.ndim == 3]
    num_experts = getattr(module, "moe_num_experts", None)
    return (int(num_experts), matrices) if num_experts else (0, [])


def flops_per_token(model: PreTrainedModel, *, block_size: int) -> float:
    """Return the floating-point operations per token, forward and backward.

    Each weight in a matrix product counts six (PaLM, Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B): the output head counts, embedding lookups do not. Attention adds the products with
    keys and values, counted as if they were not causal. In a mixture of experts, only the experts
    used per token count.

    Args:
        model: The model; a tied output head counts once.
        block_size: Tokens of a sample.
    """
    config = model.config.get_text_config()
    num_chosen = experts_per_token(config)
    num_used_weights = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
        num_experts, stacks = _expert_stacks(module)
        used_fraction = num_chosen / num_experts if num_chosen and stacks else 1.0
        num_used_weights += used_fraction * sum(p.numel() for p in matrices)
    num_heads = int(getattr(config, "num_attention_heads", None) or 0)
    attention_width = num_heads * head_width(config) if num_heads else 0
    attention_flops = 12.0 * int(config.num_hidden_layers) * attention_width * block_size
    return 6.0 * num_used_weights + attention_flops


def experts_per_token(config: PreTrainedConfig) -> int | None:
    """Return the number of experts that a router chooses for each token; None without experts.

    Args:
        config: The text configuration of a model.
    """
    sources = config, getattr(config, "ffn_config", None)  # DBRX
    values = [getattr(source, name, None) for source in sources for name in EXPERTS_PER_TOKEN]
    return next((int(value) for value in values if value is not None), None)


def head_width(config: PreTrainedConfig) -> int:
    """Return the width of an attention head, from the text configuration of a model."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)
