"""Hugging Face causal language models: their construction, their size, a sample.

What we change about a model is done here from outside, in one order (`build_model`), and none of
it shows in the model's configuration: that one always describes the model that will be exported.
"""

import copy
import itertools
import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llm.errors import ConfigError, DivergedError
from llm.models.configuration import max_positions, one_line
from llm.models.init import keyed_generator, materialize
from llm.models.masking import disable_packing_detection
from llm.models.patches.gelu import fuse_gelu
from llm.models.patches.recomputation import Recomputation, recompute_activations
from llm.models.patches.tied_embedding import tie_gradients

logger = logging.getLogger("llm.models")

_FEW_TOKENS = 0.5  # of the embedding's rows


def build_model(
    *,
    config: PreTrainedConfig,
    weights_from: str | None,
    seed: int,
    device: torch.device,
    vocab_size: int,
    attention_implementation: str | None,
    activation_checkpointing: Recomputation,
    no_bias: bool,
    pad_vocab_to_multiple_of: int | None,
    fused_gelu: bool,
    tied_gradients: bool,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Build a causal language model in fp32, in training mode, ready to train.

    Args:
        config: What to build; not changed.
        weights_from: A Hub name or folder whose weights to go on from; None starts afresh.
        seed: Keys the initial weights, together with each parameter's name.
        device: Where the model will live; a fresh one never exists anywhere else. On the meta
            device it has no weights until `piecewise.fill_model`. Pretrained ones are loaded whole.
        vocab_size: Tokens of the tokenizer; a smaller embedding is enlarged to it.
        attention_implementation: "eager", "sdpa", "flash_attention_2" ...; None is the library's
            choice.
        activation_checkpointing: What the backward pass computes again; see
            `recompute_activations`.
        no_bias: Hold every bias at zero.
        pad_vocab_to_multiple_of: Round the rows of embedding and output head up; the rows added
            are zero. The model's configuration keeps the unpadded size.
        fused_gelu: Compute GELU's tanh forms in one kernel.
        tied_gradients: Make one gradient for an embedding that is also the output head.
        trust_remote_code: Run the Python code that the model brings along.

    Raises:
        ConfigError: The model does not offer what was asked, or the weights do not fit.
    """
    config = copy.deepcopy(config)
    kwargs: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if attention_implementation is not None:
        kwargs["attn_implementation"] = attention_implementation
    if weights_from is None:
        model = _fresh_model(config, vocab_size=vocab_size, seed=seed, device=device, **kwargs)
    else:
        model = _loaded_model(config, weights_from, seed=seed, device=device, **kwargs)
        if vocab_size > _rows(model):
            _say_enlarged(_rows(model), vocab_size)
            _resize_vocabulary(model, vocab_size, seed=seed)
    if pad_vocab_to_multiple_of is not None:
        _pad_vocabulary(model, pad_vocab_to_multiple_of, seed=seed)
    if no_bias:
        _hold_biases_at_zero(model)
    if fused_gelu:
        fuse_gelu(model)
    if tied_gradients:
        tie_gradients(model)
    recompute_activations(model, activation_checkpointing)
    disable_packing_detection()
    return model.train()


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model on the meta device, which tells sizes and names and takes no memory."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    bare: dict[int, Any] = {}
    for _, tensor in tensors:
        meta = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        bare[id(tensor)] = meta
    # What the memo has already is not copied, and stays one where it is tied.
    return copy.deepcopy(model, bare)


def parameter_counts(model: PreTrainedModel) -> dict[str, int]:
    """Parameters by kind, tied ones once.

    Returns:
        "total" = "embedding" (tokens, positions, untied output head) + "other", and
        "total" = "trainable" + "frozen".
    """
    head = model.get_output_embeddings()
    owners = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    embedding = {parameter for module in owners for parameter in module.parameters()}
    total = sum(parameter.numel() for parameter in model.parameters())
    embedded = sum(parameter.numel() for parameter in embedding)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "total": total,
        "embedding": embedded,
        "other": total - embedded,
        "trainable": trainable,
        "frozen": total - trainable,
    }


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    **generation: Any,
) -> str:
    """Let the model continue a text.

    Args:
        model: A causal language model; its mode is restored.
        tokenizer: The tokenizer that it was trained with.
        prompt: How the text begins; may be empty.
        max_new_tokens: Tokens to add, at most; fewer where the model's positions end.
        seed: Keys the draws: the same seed gives the same text.
        generation: More for the library's `generate`, such as temperature, top_p or a streamer.

    Returns:
        The prompt and its continuation.

    Raises:
        DivergedError: The model's logits are not finite.
    """
    start = tokenizer(prompt)["input_ids"] if prompt else []
    end = tokenizer.eos_token_id
    if not start:
        start = [end if end is not None else 0]
    limit = max_positions(model.config)
    if limit is not None:
        # A long prompt makes room for what follows, but keeps half of the positions.
        start = start[-max(1, limit // 2, limit - max_new_tokens) :]
        max_new_tokens = min(max_new_tokens, limit - len(start))
    input_ids = torch.tensor([start], device=model.device)
    # Padded rows of the head, and rows that no token has, must not be drawn.
    nameless = list(range(len(tokenizer), _rows(model)))
    training = model.training
    model.eval()
    try:
        with keyed_generator(seed, "sample", model.device):
            output = model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_new_tokens,
                pad_token_id=end if end is not None else 0,
                eos_token_id=end,
                suppress_tokens=nameless or None,
                logits_processor=[partial(_check_logits, model)],
                **{"do_sample": True, **generation},
            )
    finally:
        model.train(training)
    text: str = tokenizer.decode(output[0], skip_special_tokens=True)
    return text


def _check_logits(model: PreTrainedModel, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Give the logits back, if a token can be drawn from them."""
    # A model may rule tokens out by -inf; NaN and inf are passed on by the maximum.
    if bool(logits.amax(dim=-1).isfinite().all()):
        return logits
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    what = "logits are not finite, although its weights are" if finite else "weights are not finite"
    raise DivergedError(f"The model cannot write: its {what}.")


def _fresh_model(
    config: PreTrainedConfig, *, vocab_size: int, seed: int, device: torch.device, **kwargs: Any
) -> PreTrainedModel:
    text_config = config.get_text_config()
    if vocab_size > text_config.vocab_size:
        _say_enlarged(text_config.vocab_size, vocab_size)
        text_config.vocab_size = vocab_size
    elif vocab_size < _FEW_TOKENS * text_config.vocab_size:
        logger.info(
            "The tokenizer has %d tokens and the embedding %d rows; most will never be used. "
            "--config_overrides vocab_size=%d makes the model smaller.",
            vocab_size,
            text_config.vocab_size,
            vocab_size,
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **kwargs)
    except (ValueError, ImportError, RuntimeError, TypeError) as error:
        raise _refusal(config, error, **kwargs) from error
    if device.type != "meta":
        materialize(model, seed=seed, device=device)
    return model


def _loaded_model(
    config: PreTrainedConfig, weights_from: str, *, seed: int, device: torch.device, **kwargs: Any
) -> PreTrainedModel:
    try:
        # Weights that the files lack are drawn; these draws must not depend on the caller.
        with keyed_generator(seed, "missing", torch.device("cpu")):
            model = AutoModelForCausalLM.from_pretrained(weights_from, config=config, **kwargs)
    except OSError as error:
        raise ConfigError(
            f"--model_name_or_path {weights_from} has no weights that can be read: check the name "
            f"and the network, or name a local folder with weights ({one_line(error)})"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"The weights of {weights_from} do not fit the {config.model_type} configuration: "
            f"leave out what changes its sizes, or start from scratch ({one_line(error)})"
        ) from error
    except (ValueError, ImportError, TypeError) as error:
        raise _refusal(config, error, **kwargs) from error
    return model.to(device)


def _refusal(config: PreTrainedConfig, error: Exception, **kwargs: Any) -> ConfigError:
    asked = kwargs.get("attn_implementation")
    if asked is not None and asked != "eager" and _mentions_attention(error):
        return ConfigError(
            f"--attention_implementation {asked} cannot be used with {config.model_type}, which "
            f"offers {', '.join(_attention_implementations(config))}: {one_line(error)}"
        )
    return ConfigError(f"The {config.model_type} model cannot be built: {one_line(error)}")


def _mentions_attention(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("attention", "attn", "flash", "kernel"))


def _attention_implementations(config: PreTrainedConfig) -> list[str]:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    flags = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    return ["eager", *(name for name, flag in flags.items() if getattr(model_class, flag, False))]


def _rows(model: PreTrainedModel) -> int:
    rows: int = model.get_input_embeddings().weight.shape[0]
    return rows


def _say_enlarged(before: int, after: int) -> None:
    logger.info(
        "The tokenizer has %d tokens and the embedding %d rows: enlarged to %d.",
        after,
        before,
        after,
    )


def _resize_vocabulary(model: PreTrainedModel, rows: int, *, seed: int) -> None:
    with keyed_generator(seed, "vocabulary", model.device):
        model.resize_token_embeddings(rows, mean_resizing=False)


def _pad_vocabulary(model: PreTrainedModel, multiple: int, *, seed: int) -> None:
    rows = _rows(model)
    padded = -(-rows // multiple) * multiple
    if padded == rows:
        return
    _resize_vocabulary(model, padded, seed=seed)
    model.config.get_text_config().vocab_size = rows
    head = model.get_output_embeddings()
    with torch.no_grad():
        model.get_input_embeddings().weight[rows:] = 0
        for parameter in head.parameters():
            parameter[rows:] = 0


def _biases(model: PreTrainedModel) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("bias")]


def _hold_biases_at_zero(model: PreTrainedModel) -> None:
    biases = _biases(model)
    nonzero = "an unknown number"
    if model.device.type != "meta":
        nonzero = str(sum(bool(bias.any()) for bias in biases))
    for bias in biases:
        bias.requires_grad_(False)
        bias.zero_()
    logger.info(
        "%d biases are held at zero (--no_bias); %s of them were not zero.", len(biases), nonzero
    )
