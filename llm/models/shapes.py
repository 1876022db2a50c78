"""Shapes of GPT-2- and Llama-shaped models: by name, by numbers, or by parameters.

This module does not import torch: presets need the size of a model before torch is imported.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llm.config.duration import Tokens
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

DEFAULT_FIELDS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_embd": 768, "n_head": 12},
        **{"n_inner": None, "tie_word_embeddings": True},
    },
    "gpt_neox": {
        **{"vocab_size": 50432, "max_position_embeddings": 2048, "num_hidden_layers": 44},
        **{"hidden_size": 6144, "num_attention_heads": 64, "intermediate_size": 24576},
        **{"attention_bias": True, "tie_word_embeddings": False},
    },
    "llama": {
        **{"vocab_size": 32000, "max_position_embeddings": 2048, "num_hidden_layers": 32},
        **{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"intermediate_size": 11008, "attention_bias": False, "mlp_bias": False},
        **{"tie_word_embeddings": False},
    },
    "mistral": {
        **{"vocab_size": 32000, "max_position_embeddings": 131072, "num_hidden_layers": 32},
        **{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 14336, "tie_word_embeddings": False},
    },
    "qwen2": {
        **{"vocab_size": 151936, "max_position_embeddings": 32768, "num_hidden_layers": 32},
        **{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"intermediate_size": 22016, "tie_word_embeddings": False},
    },
    "qwen3": {
        **{"vocab_size": 151936, "max_position_embeddings": 32768, "num_hidden_layers": 32},
        **{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"head_dim": 128, "intermediate_size": 22016, "attention_bias": False},
        **{"tie_word_embeddings": False},
    },
}
"""Fields of transformers' default configurations that decide the number of parameters."""

SHAPED = tuple(DEFAULT_FIELDS)
"""Architectures with sizes that the options can set."""

SIZE_TOLERANCE = 0.05
"""Largest difference between a size's name and the number of parameters, as a fraction."""

_MLP_WIDTH_MULTIPLE = 128
"""The width of a gated MLP becomes a multiple of this number."""

_MAX_FITTED_LAYERS = 200
_MAX_PARAMETERS = 10**15


class ParameterCount(NamedTuple):
    """Numbers of parameters; tied ones count once.

    Attributes:
        total: All parameters.
        embedding: Parameters of token embeddings, positions and an untied output head.
    """

    total: int
    embedding: int

    @property
    def other(self) -> int:
        """The parameters outside embeddings and output head."""
        return self.total - self.embedding


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
        ConfigError: No shape has the size, the architecture has another shape, or the numbers do
            not divide each other.
    """
    model_type = str(fields["model_type"])
    if model_type not in SHAPED:
        raise ConfigError(
            f"--model_size, --num_layers, --hidden_size and --num_attention_heads are for "
            f"{', '.join(SHAPED)}, and this model is {model_type}; set its fields with "
            "--config_overrides."
        )
    num_heads = int(fields[_shape_names(model_type)[2]])
    num_key_value_heads = fields.get("num_key_value_heads", num_heads)
    if num_key_value_heads < 1 or num_heads % num_key_value_heads:
        raise ConfigError(
            f"The {model_type} model has {num_heads} attention heads and num_key_value_heads="
            f"{num_key_value_heads}, which must divide them: change config.json."
        )
    return _resize_fields(fields, _choose_shape(options, fields))


def _shape_names(model_type: str) -> tuple[str, str, str]:
    """Return an architecture's names of its layers, its width and its heads."""
    if model_type == "gpt2":
        return "n_layer", "n_embd", "n_head"
    return "num_hidden_layers", "hidden_size", "num_attention_heads"


def read_shape(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the layers, the width and the heads of a model."""
    num_layers, width, num_heads = (
        int(fields[name]) for name in _shape_names(fields["model_type"])
    )
    return num_layers, width, num_heads


def _resize_fields(fields: Mapping[str, Any], new_shape: Sequence[int]) -> dict[str, Any]:
    """Return the fields that change if a model has other layers, another width and other heads."""
    old_layers, old_width, old_heads = read_shape(fields)
    new_layers, new_width, new_heads = new_shape
    if new_width % new_heads:
        raise ConfigError(
            f"--hidden_size {new_width} cannot be divided by --num_attention_heads {new_heads}; "
            "change one of them."
        )
    field_names = _shape_names(fields["model_type"])
    changes: dict[str, Any] = dict(zip(field_names, new_shape, strict=True))
    if fields["model_type"] == "gpt2":
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


def _choose_shape(options: ModelOptions, fields: Mapping[str, Any]) -> Sequence[int]:
    """Return layers, width and heads: options override the size, and the size the configuration."""
    base_shape: Sequence[int] = read_shape(fields)
    if options.model_size in SIZES:
        base_shape = SIZES[options.model_size][:3]
    elif options.model_size is not None:
        base_shape = fit_shape(options.model_size, fields)
    base_layers, base_width, base_heads = base_shape
    return (
        base_layers if options.num_layers is None else options.num_layers,
        base_width if options.hidden_size is None else options.hidden_size,
        base_heads if options.num_attention_heads is None else options.num_attention_heads,
    )


def gpt2_fields(model_size: str | None) -> dict[str, int]:
    """Return vocabulary and positions of a GPT-2 that is named only by its size.

    A size outside the table has the values of the nearest paper: the second one begins at 1.7B.
    """
    shape = SIZES.get(model_size or "124M")
    if shape is None:
        shape = SIZES["1.7B" if Tokens(str(model_size)) >= Tokens("1.7B") else "124M"]
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


def count_parameters(fields: Mapping[str, Any]) -> ParameterCount:
    """Count the parameters of a model from the fields of its configuration.

    Args:
        fields: The fields in `DEFAULT_FIELDS` and `model_type`, which is one of `SHAPED`.
    """
    num_layers, width, num_heads = read_shape(fields)
    num_embedding = int(fields["vocab_size"]) * width * (1 if fields["tie_word_embeddings"] else 2)
    if fields["model_type"] == "gpt2":
        num_embedding += int(fields["n_positions"]) * width
        mlp_width = int(fields["n_inner"] or 4 * width)
        num_block = _count_biased_block(width, mlp_width, attention_bias=True)
        return ParameterCount(num_embedding + num_layers * num_block + 2 * width, num_embedding)
    if fields["model_type"] == "gpt_neox":
        mlp_width = int(fields["intermediate_size"])
        num_block = _count_biased_block(width, mlp_width, attention_bias=fields["attention_bias"])
        return ParameterCount(num_embedding + num_layers * num_block + 2 * width, num_embedding)
    num_block = _count_gated_block(fields, width, num_heads)
    return ParameterCount(num_embedding + num_layers * num_block + width, num_embedding)


def _count_gated_block(fields: Mapping[str, Any], width: int, num_heads: int) -> int:
    """Count the parameters of a block with a gated MLP and RMS norms, as in Llama and Qwen."""
    mlp_width = int(fields["intermediate_size"])
    head_width = int(fields.get("head_dim") or width // num_heads)
    query_width = num_heads * head_width
    key_value_width = 2 * int(fields["num_key_value_heads"]) * head_width
    num_params = width * (2 * query_width + key_value_width) + 3 * width * mlp_width + 2 * width
    if fields["model_type"] == "qwen2":
        num_params += query_width + key_value_width
    elif fields.get("attention_bias"):
        num_params += query_width + key_value_width + width
    if fields["model_type"] == "qwen3":
        num_params += 2 * head_width  # norms of queries and keys
    if fields.get("mlp_bias"):
        num_params += 2 * mlp_width + width
    return num_params


def _count_biased_block(width: int, mlp_width: int, *, attention_bias: bool) -> int:
    """Return the parameters of a block of GPT-2 or GPT-NeoX, where norms and MLP have biases."""
    num_attention = 4 * width**2 + (4 * width if attention_bias else 0)
    return num_attention + 2 * width * mlp_width + mlp_width + width + 4 * width


def fit_shape(size: str, fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return layers, width and heads of a model with a number of parameters.

    A size in the table has the table's shape if it fits. Other shapes have heads of 64, or of 128
    from a width of 2,048 on, and about sqrt(width) / 2 layers: 32 at the width of 4,096 of Llama
    7B, 23 at 2,048, 14 at 768.

    Args:
        size: The number of parameters, such as 60M.
        fields: The fields of the model's configuration, which give its vocabulary and its ratios.

    Raises:
        ConfigError: No shape has this number of parameters within `SIZE_TOLERANCE`.
    """
    num_parameters = Tokens(size)
    if not 0 < num_parameters < _MAX_PARAMETERS:
        raise ConfigError(f"{size} is not a number of parameters such as 60M or 1.3B.")
    error_by_shape = {
        shape: abs(_count_resized(fields, shape) / num_parameters - 1)
        for shape in _propose_shapes(fields, size)
    }
    fitting_shapes = [shape for shape, error in error_by_shape.items() if error <= SIZE_TOLERANCE]
    if size in SIZES and SIZES[size][:3] in fitting_shapes:
        return SIZES[size][:3]
    if not fitting_shapes:
        nearest_shape = min(error_by_shape, key=error_by_shape.__getitem__)
        raise ConfigError(
            f"No {fields['model_type']} with a vocabulary of {fields['vocab_size']:,} tokens has "
            f"{size} parameters within {SIZE_TOLERANCE:.0%}; the nearest has "
            f"{_count_resized(fields, nearest_shape):,}. Choose another size, or a smaller "
            "vocabulary with --config_overrides vocab_size=N."
        )
    return min(fitting_shapes, key=lambda shape: _rate_misfit(shape, error_by_shape[shape]))


def _rate_misfit(shape: tuple[int, int, int], error: float) -> float:
    """Return how far a shape is from the size and from sqrt(width) / 2 layers; 0 is best."""
    num_layers, width, _ = shape
    return 20 * error + abs(math.log(num_layers / (math.sqrt(width) / 2)))


def _propose_shapes(fields: Mapping[str, Any], size: str) -> Iterator[tuple[int, int, int]]:
    """Yield the size's shape in the table, and for each width the nearest number of layers."""
    heads_per_group = 1
    if fields.get("num_key_value_heads") is not None:
        num_heads = int(fields[_shape_names(fields["model_type"])[2]])
        heads_per_group = num_heads // int(fields["num_key_value_heads"])
    if size in SIZES and SIZES[size].num_attention_heads % heads_per_group == 0:
        yield SIZES[size][:3]
    for width in (*range(64, 512, 64), *range(512, 2048, 128), *range(2048, 32768, 256)):
        num_heads = width // (64 if width < 2048 else 128)
        if num_heads % heads_per_group:
            continue
        params_with_one_block = _count_resized(fields, (1, width, num_heads))
        params_per_block = _count_resized(fields, (2, width, num_heads)) - params_with_one_block
        num_layers = 1 + round((Tokens(size) - params_with_one_block) / params_per_block)
        yield min(max(num_layers, 1), _MAX_FITTED_LAYERS), width, num_heads


def _count_resized(fields: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Return the parameters of a model with another shape."""
    return count_parameters({**fields, **_resize_fields(fields, shape)}).total
