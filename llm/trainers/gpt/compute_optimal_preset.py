"""`--preset compute_optimal`: length, batch and rates from the size of the model.

The options are known before torch is imported, so the parameters are counted from the fields of the
configuration (`llm/models/shapes.py`).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llm.config.duration import Duration
from llm.config.options import fields
from llm.errors import ConfigError
from llm.models.options import ModelOptions, parse_literal, shape_options
from llm.models.shapes import (
    DEFAULT_FIELDS,
    SHAPED,
    ParameterCount,
    count_parameters,
    gpt2_fields,
    shape_changes,
)
from llm.optim.compute_optimal import (
    optimal_batch_tokens,
    optimal_learning_rate,
    optimal_weight_decay,
    round_batch_size,
    warmup_tokens,
)

COMPUTE_OPTIMAL = "compute_optimal"
"""The name of the preset."""

_FLAG = f"--preset {COMPUTE_OPTIMAL}"

DEFAULT_LENGTH = Duration("20 tokens per parameter")
"""Hoffmann et al. 2022, arXiv:2203.15556."""

_GPT2_ALIASES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


class Budget(NamedTuple):
    """Size of a model and length of its training.

    Attributes:
        parameters: Parameters of the model.
        num_tokens: Tokens of the training.
        block_size: Tokens of a sample.
    """

    parameters: ParameterCount
    num_tokens: int
    block_size: int


def compute_optimal_values(user_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the preset sets, whether the user overrides them or not.

    Each follows from the options before it, with the user's value if there is one: a batch that the
    user names changes the rate and the weight decay.

    Args:
        user_options: The user's options, by name.

    Raises:
        ConfigError: The size of the model or the length in tokens are unknown, or the batch grows.
    """
    budget = read_budget(user_options)
    num_tokens = budget.num_tokens
    for_muon = user_options.get("optimizer") in ("muon", "normuon")
    num_samples = optimal_batch_tokens(num_tokens, for_muon=for_muon) / budget.block_size
    preset: dict[str, Any] = {
        "max_duration": DEFAULT_LENGTH,
        "global_batch_size": round_batch_size(num_samples),
    }
    global_batch_size = user_options.get("global_batch_size") or preset["global_batch_size"]
    if not isinstance(global_batch_size, int):
        raise ConfigError(
            f"{_FLAG} computes the rates of one batch, and --global_batch_size "
            f"{global_batch_size} grows; give a number, or leave it out."
        )
    batch_tokens = global_batch_size * budget.block_size
    preset["learning_rate"] = optimal_learning_rate(
        num_parameters=budget.parameters.other, num_tokens=num_tokens, batch_tokens=batch_tokens
    )
    preset["lr_scheduler_type"] = "linear"
    preset["warmup"] = Duration(f"{warmup_tokens(num_tokens)} tokens")
    preset["weight_decay"] = optimal_weight_decay(
        num_parameters=budget.parameters.total,
        num_tokens=num_tokens,
        batch_tokens=batch_tokens,
        learning_rate=user_options.get("learning_rate") or preset["learning_rate"],
    )
    preset["betas"] = (0.9, 0.95)  # of both papers
    return preset


def read_budget(user_options: Mapping[str, Any]) -> Budget:
    """Return the parameters and the tokens of a training from its options.

    Raises:
        ConfigError: The model or its size are unknown, or the length is not in tokens.
    """
    config_fields = read_model_fields(user_options)
    parameters = count_parameters(config_fields)
    max_positions = config_fields.get("n_positions") or config_fields["max_position_embeddings"]
    num_tokens = _count_tokens(user_options.get("max_duration") or DEFAULT_LENGTH, parameters)
    block_size = user_options.get("block_size") or min(1024, max_positions)
    return Budget(parameters, num_tokens, block_size)


def _count_tokens(length: Duration, parameters: ParameterCount) -> int:
    """Return the tokens of a training of this length, which must be in tokens."""
    if length.unit == "tokens per parameter":
        num_tokens = math.ceil(length.value * parameters.total)
    elif length.unit == "tokens":
        num_tokens = int(length.value)
    else:
        raise ConfigError(
            f"{_FLAG} needs the length in tokens, and --max_duration {length} is in {length.unit}; "
            "give tokens or tokens per parameter, or leave it out for 20 tokens per parameter."
        )
    if num_tokens < 1:
        raise ConfigError(f"--max_duration must be greater than 0, not {length}.")
    return num_tokens


def describe_uncounted_tokens(values: Mapping[str, Any], num_tokens: int) -> str | None:
    """Return a sentence if a tokenizer enlarges the model whose parameters the preset counts.

    Args:
        values: The options of the run, by name.
        num_tokens: Tokens of its tokenizer, which is read after the preset.
    """
    config_fields = read_model_fields(values)
    if num_tokens <= config_fields["vocab_size"]:
        return None
    counted = count_parameters(config_fields).total
    trained = count_parameters({**config_fields, "vocab_size": num_tokens}).total
    return (
        f"{_FLAG} counted {counted:,} parameters, with the model's vocabulary of "
        f"{config_fields['vocab_size']:,} tokens; the tokenizer has {num_tokens:,}, so "
        f"{trained:,} are trained. To count them, add vocab_size={num_tokens} to "
        "--config_overrides."
    )


def read_model_fields(user_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the model's configuration that decide its number of parameters.

    Raises:
        ConfigError: The configuration is not on this machine, or is of another architecture.
    """
    names = {field.name for field in fields(ModelOptions)}
    options = ModelOptions(**{name: user_options[name] for name in names & user_options.keys()})
    explicit_fields = _read_explicit_fields(options)
    if shape_options(options):
        explicit_fields |= shape_changes(options, _complete_fields(explicit_fields))
    model_type = explicit_fields["model_type"]
    explicit_fields |= _name_fields(model_type, _parse_overrides(options.config_overrides or ""))
    return _complete_fields(explicit_fields)


def _read_explicit_fields(options: ModelOptions) -> dict[str, Any]:
    """Return the fields that are in the model's file, or that its type or size decide."""
    name = options.config_name or options.model_name_or_path
    if name is not None:
        config_fields = _read_config_file(name)
    elif options.model_type is not None:
        config_fields = {"model_type": options.model_type}
    elif shape_options(options):
        config_fields = {"model_type": "gpt2", **gpt2_fields(options.model_size)}
    else:
        raise ConfigError(f"{_FLAG} needs the size of the model; give --model_size.")
    model_type = str(config_fields.get("model_type"))
    if model_type not in SHAPED:
        raise ConfigError(
            f"{_FLAG} has been tried with {', '.join(SHAPED)}, and this model is {model_type}; set "
            "the length, the batch and the rates yourself."
        )
    return _name_fields(model_type, config_fields)


def _name_fields(model_type: str, config_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields by the architecture's names of them."""
    aliases = _GPT2_ALIASES if model_type == "gpt2" else {}
    return {aliases.get(name, name): value for name, value in config_fields.items()}


def _complete_fields(explicit_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields that decide the number of parameters, as transformers completes them.

    Raises:
        ConfigError: A size is not a positive whole number.
    """
    model_type = explicit_fields["model_type"]
    config_fields = {**DEFAULT_FIELDS[model_type], **explicit_fields}
    if model_type == "llama" and explicit_fields.get("num_key_value_heads") is None:
        config_fields["num_key_value_heads"] = config_fields["num_attention_heads"]
    _check_whole_numbers(config_fields)
    return config_fields


def _check_whole_numbers(config_fields: Mapping[str, Any]) -> None:
    """Refuse a size, such as the number of layers, that is not a positive whole number."""
    defaults = {"head_dim": None, **DEFAULT_FIELDS[config_fields["model_type"]]}
    for name, default in defaults.items():
        value = config_fields.get(name)
        is_size = type(default) is int or (default is None and value is not None)
        if is_size and (type(value) is not int or value < 1):
            raise ConfigError(
                f"{_FLAG} counts parameters, and {name} is {value!r}, which is not a positive "
                "whole number; change config.json or --config_overrides."
            )


def _read_config_file(name: str) -> dict[str, Any]:
    """Return the fields of a config.json, from its path or its folder."""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{_FLAG} needs the size of the model before anything is downloaded, and {name} has no "
            "config.json on this machine; fetch it with llm-trainers fetch, or give --model_type."
        )
    try:
        config_fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(config_fields, dict):
        raise ConfigError(f"{path} is not a model's configuration: it holds no JSON object.")
    return config_fields


def _parse_overrides(text: str) -> dict[str, Any]:
    """Return the fields of `--config_overrides`, which is `name=value,name=value`."""
    text_by_name = dict(item.partition("=")[::2] for item in text.split(",") if item)
    return {name.strip(): parse_literal(value.strip()) for name, value in text_by_name.items()}
