"""Sizes of models by name or by Megatron's three numbers, for GPT-2- and Llama-shaped ones."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from llm.errors import ConfigError
from llm.models.options import ModelOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The shape of a GPT.

    Attributes:
        num_layers: Transformer blocks.
        hidden_size: Width of the hidden states.
        num_attention_heads: Heads of each block.
        vocab_size: Tokens, where no model is named beside the size.
        max_positions: Positions, likewise.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_positions: int


def _megatron(num_layers: int, hidden_size: int, num_attention_heads: int) -> ModelSize:
    return ModelSize(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        vocab_size=51200,
        max_positions=2048,
    )


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int) -> ModelSize:
    return ModelSize(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        vocab_size=50257,
        max_positions=1024,
    )


SIZES = {
    # Radford et al. 2019, table 2, with the counts of the released weights.
    "124M": _gpt2(12, 768, 12),
    "355M": _gpt2(24, 1024, 16),
    "774M": _gpt2(36, 1280, 20),
    "1.5B": _gpt2(48, 1600, 25),
    # Narayanan et al. 2021 (arXiv:2104.04473), table 1.
    "1.7B": _megatron(24, 2304, 24),
    "3.6B": _megatron(30, 3072, 32),
    "7.5B": _megatron(36, 4096, 32),
    "18.4B": _megatron(40, 6144, 48),
    "39.1B": _megatron(48, 8192, 64),
    "76.1B": _megatron(60, 10240, 80),
    "145.6B": _megatron(80, 12288, 96),
    "310.1B": _megatron(96, 16384, 128),
}

SHAPED = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
"""Architectures whose size these options can set."""

_MULTIPLE = 128  # to which the width of a gated MLP is rounded up


def shape_changes(options: ModelOptions, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What layers, width and heads that are asked for change in a Hugging Face configuration.

    Vocabulary and positions stay. The width of the MLP and the number of key and value heads
    keep their proportion to hidden size and heads: with GPT-2 the MLP is four times as wide, with
    Llama 2 it is 11008 / 4096 times (rounded up to a multiple of 128).

    Args:
        options: A size by name, numbers, or both; a number goes before that of the size.
        fields: The configuration, as its `to_dict` gives it.

    Returns:
        Fields by the library's own names.

    Raises:
        ConfigError: No such size, an architecture of another shape, or numbers that do not
            divide one another.
    """
    kind = str(fields["model_type"])
    if kind not in SHAPED:
        raise ConfigError(
            f"--model_size, --num_layers, --hidden_size and --num_attention_heads are for "
            f"{', '.join(SHAPED)}, and this is a {kind} model; set its own fields with "
            "--config_overrides."
        )
    size = None if options.model_size is None else find_size(options.model_size)
    names = ("n_layer", "n_embd", "n_head")
    if kind != "gpt2":
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    old = [int(fields[name]) for name in names]
    given = (options.num_layers, options.hidden_size, options.num_attention_heads)
    named = old
    if size is not None:
        named = [size.num_layers, size.hidden_size, size.num_attention_heads]
    new = [one if one is not None else other for one, other in zip(given, named, strict=True)]
    if new[1] % new[2]:
        raise ConfigError(
            f"--hidden_size {new[1]} cannot be divided by --num_attention_heads {new[2]}; change "
            "one of them."
        )
    changes: dict[str, Any] = dict(zip(names, new, strict=True))
    if kind == "gpt2":
        inner = fields.get("n_inner")
        # None is four times the width, and so it stays.
        return changes | ({} if inner is None else {"n_inner": inner * new[1] // old[1]})
    ratio = new[1] / old[1]
    width = math.ceil(fields["intermediate_size"] * ratio / _MULTIPLE) * _MULTIPLE
    same = new[1] == old[1]
    changes["intermediate_size"] = fields["intermediate_size"] if same else width
    if fields.get("num_key_value_heads") is not None:
        changes["num_key_value_heads"] = _key_value_heads(fields, old[2], new[2])
    if fields.get("head_dim") is not None and (new[1], new[2]) != (old[1], old[2]):
        changes["head_dim"] = new[1] // new[2]
    if fields.get("layer_types") is not None and new[0] != old[0]:
        changes["layer_types"] = None  # one for each layer: the library fills them in anew
    return changes


def find_size(name: str) -> ModelSize:
    """A size by its name.

    Raises:
        ConfigError: There is none of this name; the message lists those that there are.
    """
    if name not in SIZES:
        raise ConfigError(f"--model_size {name} is none of {', '.join(SIZES)}.")
    return SIZES[name]


def gpt2_fields(model_size: str | None) -> dict[str, int]:
    """Vocabulary and positions of a GPT-2 for which no model is named but a size."""
    size = SIZES["124M"] if model_size is None else find_size(model_size)
    return {"vocab_size": size.vocab_size, "n_positions": size.max_positions}


def _key_value_heads(fields: Mapping[str, Any], old: int, new: int) -> int:
    """As many query heads share a key as before."""
    shared = old // int(fields["num_key_value_heads"])
    if new % shared:
        raise ConfigError(
            f"--num_attention_heads {new} cannot be divided by the {shared} heads that share "
            "their keys and values in this model; choose a multiple of it."
        )
    return new // shared
