"""Load the configuration of a Hugging Face causal language model, and locate its weights."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GPT2Config,
    PreTrainedConfig,
)

from llm.errors import ConfigError, one_line
from llm.models.options import ModelOptions, is_hub_kernel, shape_options
from llm.models.overrides import nearest_names, override_fields
from llm.models.shapes import gpt2_fields, shape_changes
from llm.models.sizes import EXPERTS_PER_TOKEN_NAMES
from llm.runtime.offline import offline_if_unreachable, offline_remark

logger = logging.getLogger("llm.models")

_POSITION_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_seq_length",
)
_SIZE_NAMES = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
)
_NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZE_REMEDY = "change config.json or --config_overrides."
_MAX_LAYERS = 1000
"""The deepest model trained so far (Wang et al. 2022); each layer takes time to build."""
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def load_config(options: ModelOptions) -> PreTrainedConfig:
    """Load the configuration of the causal language model that the options describe.

    `config_name` overrides `model_name_or_path`, and either overrides `model_type`; a size alone
    gives a GPT-2. `config_overrides` are applied last.

    Args:
        options: The model's name, type or size, and changes to it.

    Raises:
        ConfigError: No model is named, the name cannot be read, the model is not a causal language
            model, an override has an unknown field or a wrong type, or a size is impossible.
    """
    name = options.config_name or options.model_name_or_path
    config, explicit_fields = _load_base_config(options, name)
    # The constructor of the new object derives other fields from the changed ones.
    if shape_options(options):
        explicit_fields = {**explicit_fields, **shape_changes(options, config.to_dict())}
        config = type(config).from_dict(explicit_fields)
    if options.config_overrides:
        config = override_fields(config, options.config_overrides, explicit_fields=explicit_fields)
    auto_map = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in auto_map:
        raise ConfigError(
            f"{name or options.model_type} is a {config.model_type} model, not a causal language "
            "model: name one that predicts the next token, such as gpt2 or llama."
        )
    if not options.trust_remote_code:
        _check_no_hub_kernel(config, name)
    _check_sizes(config)
    return config


def _load_base_config(
    options: ModelOptions, name: str | None
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return a configuration before the options change it, and the fields that it was made from.

    Without changes, the fields are empty: to read them opens `config.json` again.

    Raises:
        ConfigError: No model is named, or the name or the type cannot be used.
    """
    if name is not None:
        named_config = _load_named_config(options, name)
        if not (options.config_overrides or shape_options(options)):
            return named_config, {}
        return named_config, type(named_config).get_config_dict(name)[0]
    model_type = options.model_type
    if model_type is not None:
        if model_type not in CONFIG_MAPPING:
            suggestion = nearest_names(model_type, CONFIG_MAPPING.keys())
            raise ConfigError(
                f"--model_type {model_type} is not a known architecture; {suggestion}."
            )
        return CONFIG_MAPPING[model_type](), {}
    if shape_options(options):
        explicit_fields = {"model_type": "gpt2", **gpt2_fields(options.model_size)}
        return GPT2Config.from_dict(explicit_fields), explicit_fields
    raise ConfigError(
        "No model is named: set --model_name_or_path, --config_name, --model_type or --model_size."
    )


def _check_no_hub_kernel(config: PreTrainedConfig, name: str | None) -> None:
    """Refuse a configuration with an attention kernel that transformers loads from the Hub."""
    kernel = next(filter(is_hub_kernel, _attention_kernels(config)), None)
    if kernel is not None:
        raise ConfigError(
            f"The config.json of {name} names the attention kernel {kernel}, which is code from "
            "the Hugging Face Hub: add --trust_remote_code to this command if you trust its "
            "authors, or remove the kernel from the file."
        )


def _attention_kernels(config: PreTrainedConfig) -> Iterator[str]:
    """Yield the attention kernels that a configuration and its inner ones name."""
    yield str(config._attn_implementation)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _attention_kernels(value)


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the model's maximum number of positions; None without a limit."""
    text_config = config.get_text_config()
    for name in _POSITION_NAMES:
        value = getattr(text_config, name, None)
        if isinstance(value, int):
            return value if value > 0 else None  # XLNet has -1
    return None


def check_no_layers_skipped(config: PreTrainedConfig) -> None:
    """Refuse a model that skips layers at random (LayerDrop), for a run on several ranks.

    Each rank would skip other layers, and wait for gradients that the others do not have.

    Raises:
        ConfigError: A field of the configuration lets the model skip layers.
    """
    text_config = config.get_text_config()
    for name in ("layerdrop", "decoder_layerdrop"):
        if getattr(text_config, name, 0):
            raise ConfigError(
                f"The {config.model_type} model skips layers at random ({name}="
                f"{getattr(text_config, name)}), which only one rank can train: pass "
                f"--config_overrides {name}=0, or use one device."
            )


def find_weights(options: ModelOptions) -> str | None:
    """Return the Hub name or folder to load pretrained weights from; None trains from scratch."""
    name = options.model_name_or_path
    if name is None or options.from_scratch or shape_options(options):
        return None
    if has_weights(name):
        return name
    logger.info(f"{name} holds no weights: the model is trained from scratch.")
    return None


def has_weights(model_name_or_path: str) -> bool:
    """Return whether a folder contains trained weights; for a Hub name, return True."""
    folder = Path(model_name_or_path)
    if not folder.exists():
        return True
    return any(
        (folder / filename).is_file() or (folder / f"{filename}.index.json").is_file()
        for filename in _WEIGHT_FILES
    )


def _load_named_config(options: ModelOptions, name: str) -> PreTrainedConfig:
    """Load the configuration with a Hub name or in a folder or file.

    Raises:
        ConfigError: The name cannot be read.
    """
    option = "--config_name" if options.config_name else "--model_name_or_path"
    is_local = Path(name).exists()
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ConfigError(f"{option} {name} is a folder without a config.json.")
    if not is_local:
        logger.info(f"asking the Hugging Face Hub for {name}")
    try:
        with offline_if_unreachable(name):
            return AutoConfig.from_pretrained(name, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # a model's code may raise anything
        reason = _describe_read_error(error, is_local=is_local)
        raise ConfigError(f"{option} {name} {reason}") from error


def _describe_read_error(error: Exception, *, is_local: bool) -> str:
    """Return why transformers cannot read a configuration, as the end of a sentence."""
    if "trust_remote_code" in str(error):
        return (
            "has its own Python code: add --trust_remote_code to this command if you trust its "
            "authors."
        )
    if is_local:
        return f"cannot be read as a model's configuration: {one_line(error)}."
    return (
        "is not a local folder, and the Hugging Face Hub does not provide it or cannot be reached"
        f"{offline_remark()}: check the name and the network, or name a local folder."
    )


def _check_sizes(config: PreTrainedConfig) -> None:
    """Refuse sizes that would fail later in the library, when the model is built or runs."""
    text_config = config.get_text_config()
    size_by_name = _select_integer_fields(text_config, _SIZE_NAMES)
    for name, size in size_by_name.items():
        if size < 1:
            raise ConfigError(
                f"The {config.model_type} model cannot have {name}={size}, which must be at least "
                f"1: {_SIZE_REMEDY}"
            )
    if size_by_name.get("num_hidden_layers", 0) > _MAX_LAYERS:
        raise ConfigError(
            f"The {config.model_type} model cannot have num_hidden_layers="
            f"{size_by_name['num_hidden_layers']}, more than {_MAX_LAYERS}: {_SIZE_REMEDY}"
        )
    num_heads = size_by_name.get("num_attention_heads", 1)
    num_key_value_heads = size_by_name.get("num_key_value_heads", num_heads)
    # Latent attention computes keys and values for every head, regardless of the configuration.
    if num_heads % num_key_value_heads and "kv_lora_rank" not in text_config.to_dict():
        raise ConfigError(
            f"The {config.model_type} model has num_attention_heads={num_heads} and "
            f"num_key_value_heads={num_key_value_heads}, and the first must be a multiple of the "
            f"second: {_SIZE_REMEDY}"
        )
    _check_expert_counts(config)


def _check_expert_counts(config: PreTrainedConfig) -> None:
    """Refuse a router that chooses no expert, or more experts than there are."""
    text_config = config.get_text_config()
    num_experts_by_name = _select_integer_fields(text_config, _NUM_EXPERTS_NAMES)
    num_experts = max(num_experts_by_name.values(), default=0)  # 0 in dense variants
    for name, num_chosen in _select_integer_fields(text_config, EXPERTS_PER_TOKEN_NAMES).items():
        if num_experts > 0 and not 1 <= num_chosen <= num_experts:
            raise ConfigError(
                f"The {config.model_type} model cannot have {name}={num_chosen}, which must be at "
                f"least 1 and at most {num_experts}, its number of experts: {_SIZE_REMEDY}"
            )


def _select_integer_fields(text_config: PreTrainedConfig, names: Iterable[str]) -> dict[str, int]:
    """Return the fields that are integers, by their common name; an architecture may rename one."""
    # Not from attributes, which raise if layers may differ.
    value_by_field = text_config.to_dict()
    integer_by_name = {}
    for name in names:
        value = value_by_field.get(text_config.attribute_map.get(name, name))
        if isinstance(value, int):
            integer_by_name[name] = value
    return integer_by_name
