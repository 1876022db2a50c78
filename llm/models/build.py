"""Builds Hugging Face causal language models.

`build_model` makes all changes to a model from outside, in a fixed order. They do not appear in the
model's configuration, which always describes the exported model.
"""

import contextlib
import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llm.errors import ConfigError, one_line
from llm.models.attention import disable_packing_detection
from llm.models.init import keyed_generator, materialize
from llm.models.options import ModelOptions
from llm.models.patches.experts import autocast_grouped_products
from llm.models.patches.gelu import fuse_gelu
from llm.models.patches.padding_token import train_padding_token
from llm.models.patches.recomputation import recompute_activations
from llm.models.patches.routers import route_in_float32
from llm.models.patches.tied_embedding import tie_gradients
from llm.models.transforms import Transform
from llm.runtime.offline import offline_if_unreachable

logger = logging.getLogger("llm.models")

# Attributes of a model class that tell whether it supports a kernel.
_KERNEL_FLAGS = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
_ATTENTION_WORDS = ("attention", "attn", "flash", "kernel")
_MIN_USED_FRACTION = 0.5
"""Tokens per row of the embedding; below it, the log suggests a smaller embedding."""


def build_model(
    options: ModelOptions,
    config: PreTrainedConfig,
    *,
    weights_from: str | None = None,
    seed: int,
    device: torch.device,
    vocab_size: int,
    tensor_parallel_size: int = 1,
    transforms: Sequence[Transform] = (),
) -> PreTrainedModel:
    """Build a causal language model in fp32, in training mode, ready to train.

    Args:
        options: Attention kernel, padding, patches.
        config: The model's configuration; not changed.
        weights_from: A Hub name or folder to load weights from; None initializes them.
        seed: Keys the initial weights, together with each parameter's name.
        device: Device of the model; initial weights never exist elsewhere. On the meta device, the
            model has no weights until `fill_model`.
        vocab_size: Tokens of the tokenizer; a smaller embedding is enlarged to this size.
        tensor_parallel_size: Number of ranks that will share each layer. If it is above 1, a tied
            embedding has two gradients.
        transforms: Changes by extensions.

    Raises:
        ConfigError: The architecture does not offer an option, or the weights do not fit.
    """
    config = copy.deepcopy(config)
    if weights_from is None or device.type == "meta":
        model = _build_from_config(options, config, vocab_size=vocab_size, seed=seed, device=device)
    else:
        model = _load_pretrained(options, config, weights_from, seed=seed, device=device)
        if vocab_size > _num_embedding_rows(model):
            _log_enlarged_embedding(_num_embedding_rows(model), vocab_size)
            _resize_vocabulary(model, vocab_size, seed=seed)
    for transform in transforms:
        if device.type != "meta":
            transform.change_initial_weights(model)
        transform.change_modules(model)
    if options.pad_vocab_to_multiple_of is not None:
        _pad_vocabulary(model, options.pad_vocab_to_multiple_of, seed=seed)
    if options.no_bias:
        _freeze_biases_at_zero(model)
    fuse_gelu(model)
    # Tensor parallelism replaces the lookup.
    if tensor_parallel_size == 1:
        tie_gradients(model)
    recompute_activations(model, options.activation_checkpointing)
    if options.router_dtype != "model":
        route_in_float32(model)
    disable_packing_detection()
    autocast_grouped_products()
    if weights_from is not None and device.type == "meta":
        _set_weights_source(model, weights_from)
    return model.train()


def set_special_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, is_pretrained: bool
) -> None:
    """Let a model's configuration and generation settings name the tokenizer's special tokens.

    An architecture's defaults are ids of another tokenizer: text would end at some other token.

    Args:
        model: The model; its layers, which may depend on these ids, do not change.
        tokenizer: The tokenizer that it is trained with.
        is_pretrained: Whether weights were loaded. Their ids, perhaps several that end a text, are
            kept if the tokenizer's are among them.
    """
    eos_token_id, generation_config = tokenizer.eos_token_id, model.generation_config
    if is_pretrained:
        model_eos_ids = generation_config.eos_token_id
        is_listed = isinstance(model_eos_ids, list) and eos_token_id in model_eos_ids
        if eos_token_id is None or eos_token_id == model_eos_ids or is_listed:
            return
        logger.info(
            f"The model's end of text was the id {model_eos_ids}, and is {eos_token_id} from now "
            "on, the end of text of the tokenizer."
        )
    for config in (model.config, model.config.get_text_config(), generation_config):
        config.eos_token_id = eos_token_id
        config.bos_token_id = tokenizer.bos_token_id
        config.pad_token_id = tokenizer.pad_token_id


def _set_weights_source(model: PreTrainedModel, weights_from: str) -> None:
    """Record where the weights come from, and load the generation settings from there.

    transformers does the same when it loads weights.
    """
    model.name_or_path = model.config.name_or_path = weights_from
    with contextlib.suppress(OSError):  # older folders lack this file
        model.generation_config = GenerationConfig.from_pretrained(weights_from)


def _build_from_config(
    options: ModelOptions,
    config: PreTrainedConfig,
    *,
    vocab_size: int,
    seed: int,
    device: torch.device,
) -> PreTrainedModel:
    """Build a model from its configuration; on the meta device, it has no weights.

    Raises:
        ConfigError: transformers cannot build the model.
    """
    _fit_vocabulary(config.get_text_config(), vocab_size)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **_transformers_arguments(options))
    except Exception as error:  # the library's model checks its configuration in its own ways
        raise _make_build_error(options, config, error) from error
    train_padding_token(model)  # first: the library initializes its row to zero
    if device.type != "meta":
        materialize(model, seed=seed, device=device)
    return model


def _fit_vocabulary(text_config: PreTrainedConfig, vocab_size: int) -> None:
    """Enlarge the vocabulary of a configuration, in place, to the tokens of the tokenizer."""
    if vocab_size > text_config.vocab_size:
        _log_enlarged_embedding(text_config.vocab_size, vocab_size)
        text_config.vocab_size = vocab_size
    elif vocab_size < _MIN_USED_FRACTION * text_config.vocab_size:
        logger.info(
            f"The tokenizer has {vocab_size} tokens and the embedding {text_config.vocab_size} "
            f"rows; most will never be used. --config_overrides vocab_size={vocab_size} makes the "
            "model smaller."
        )
    head_size = getattr(text_config, "unpadded_vocab_size", None)  # of Inkling
    if head_size is not None and not vocab_size <= head_size <= text_config.vocab_size:
        text_config.unpadded_vocab_size = text_config.vocab_size
    pad_token_id = getattr(text_config, "pad_token_id", None)
    if pad_token_id is not None and pad_token_id >= text_config.vocab_size:
        text_config.pad_token_id = None  # of another tokenizer; the library's embedding refuses it


def _load_pretrained(
    options: ModelOptions,
    config: PreTrainedConfig,
    weights_from: str,
    *,
    seed: int,
    device: torch.device,
) -> PreTrainedModel:
    """Load a model with its weights.

    Raises:
        ConfigError: The weights cannot be read, or do not fit the configuration.
    """
    try:
        # Keyed, because transformers draws weights that the files lack.
        generator = keyed_generator(seed, "missing", torch.device("cpu"))
        with generator, offline_if_unreachable(weights_from):
            model = AutoModelForCausalLM.from_pretrained(
                weights_from, config=config, **_transformers_arguments(options)
            )
    except OSError as error:
        raise ConfigError(
            f"--model_name_or_path {weights_from} has no readable weights: check the name and the "
            f"network, or name a local folder with weights ({one_line(error)})."
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"The weights of {weights_from} do not fit the {config.model_type} configuration: "
            f"leave out options that change its sizes, or start from scratch ({one_line(error)})."
        ) from error
    except Exception as error:  # the library's model may raise anything
        raise _make_build_error(options, config, error) from error
    train_padding_token(model)
    return model.to(device)


def _transformers_arguments(options: ModelOptions) -> dict[str, Any]:
    """Return the arguments of `from_config` and `from_pretrained`."""
    arguments: dict[str, Any] = {
        "dtype": torch.float32,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.attention_implementation is not None:
        arguments["attn_implementation"] = options.attention_implementation
    return arguments


def _make_build_error(
    options: ModelOptions, config: PreTrainedConfig, error: Exception
) -> ConfigError:
    """Return the error to raise for an error of transformers, with kernels that would work."""
    kernel = options.attention_implementation
    concerns_attention = any(word in str(error).lower() for word in _ATTENTION_WORDS)
    if kernel in (None, "eager") or not concerns_attention:
        return ConfigError(f"The {config.model_type} model cannot be built: {one_line(error)}.")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kernels = [name for name, flag in _KERNEL_FLAGS.items() if getattr(model_class, flag, False)]
    return ConfigError(
        f"--attention_implementation {kernel} cannot be used with {config.model_type}, which "
        f"offers {', '.join(['eager', *kernels])}: {one_line(error)}."
    )


def _num_embedding_rows(model: PreTrainedModel) -> int:
    rows: int = model.get_input_embeddings().weight.shape[0]
    return rows


def _log_enlarged_embedding(num_rows: int, num_tokens: int) -> None:
    logger.info(
        f"The tokenizer has {num_tokens} tokens and the embedding {num_rows} rows: enlarged to "
        f"{num_tokens}."
    )


def _resize_vocabulary(model: PreTrainedModel, num_rows: int, *, seed: int) -> None:
    with keyed_generator(seed, "vocabulary", model.device):
        model.resize_token_embeddings(num_rows, mean_resizing=False)


def _pad_vocabulary(model: PreTrainedModel, multiple: int, *, seed: int) -> None:
    """Pad the embedding and the output head with rows of zeros, to a multiple of a number."""
    num_rows = _num_embedding_rows(model)
    num_padded_rows = num_rows + -num_rows % multiple
    if num_padded_rows == num_rows:
        return
    _resize_vocabulary(model, num_padded_rows, seed=seed)
    # The configuration describes the export, which removes the padding.
    model.config.get_text_config().vocab_size = num_rows
    head = model.get_output_embeddings()
    with torch.no_grad():
        model.get_input_embeddings().weight[num_rows:] = 0
        for parameter in head.parameters():
            parameter[num_rows:] = 0


def find_biases(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Return the parameters that `no_bias` keeps at zero."""
    return [p for name, p in model.named_parameters() if name.endswith("bias")]


def _freeze_biases_at_zero(model: PreTrainedModel) -> None:
    """Set all biases to zero, and exclude them from training."""
    frozen_biases = find_biases(model)
    num_nonzero: int | str = "an unknown number"
    if model.device.type != "meta":
        num_nonzero = sum(bool(bias.any()) for bias in frozen_biases)
    for bias in frozen_biases:
        bias.requires_grad_(False)
        bias.zero_()
    logger.info(
        f"{len(frozen_biases)} biases are held at zero (--no_bias); {num_nonzero} of them were not "
        "zero."
    )
