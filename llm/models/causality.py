"""Checks that tokens do not see later tokens.

transformers lists encoders such as BERT among the causal language models, but they are causal only
if they are configured as decoders. Others, such as XLNet, make their masks themselves.
"""

import copy
import inspect
import logging
import sys

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from llm.errors import ConfigError, one_line
from llm.models.attention import evaluation_mode, max_difference, random_tokens, run_model
from llm.models.init import materialize
from llm.models.sizes import find_blocks
from llm.runtime.float32 import full_float32

_HALF_LENGTH = 4
"""Tokens in each half of a window. The first halves of the two windows are equal."""
_MAX_RELATIVE_ERROR = 1e-4
"""Largest rounding error of logits, relative to the effect of other tokens."""
_CAUSAL_FIELDS = {"is_decoder": True, "causal": True, "attn_type": "uni"}
"""Configuration fields that make BERT, XLM and XLNet causal, and their value in causal models."""

logger = logging.getLogger("llm.models")


@torch.no_grad()
@full_float32()
def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model whose tokens see later tokens, which it would learn to copy.

    Args:
        model: A causal language model with weights; its mode is restored.

    Raises:
        ConfigError: The logits of a token depend on later tokens.
    """
    text_config = model.config.get_text_config()
    kernel = getattr(text_config, "_attn_implementation", None)
    if kernel not in (None, "eager", "sdpa", "flex_attention"):
        return  # other kernels may refuse float32
    input_ids = random_tokens(model, 2, 2 * _HALF_LENGTH)
    input_ids[1, :_HALF_LENGTH] = input_ids[0, :_HALF_LENGTH]
    with evaluation_mode(model):
        logits = run_model(model, input_ids, positions=None, documents=None).logits.float()
    first_half, second_half = logits.split(_HALF_LENGTH, dim=1)
    # Causal models have the same logits for equal first halves.
    largest_rounding_error = _MAX_RELATIVE_ERROR * max_difference(*second_half)
    if max_difference(*first_half) > largest_rounding_error:
        raise ConfigError(
            f"In this {model.config.model_type} model, tokens see later tokens, so it would learn "
            f"to copy instead of to predict: {_find_causal_remedy(text_config)}."
        )


def _find_causal_remedy(text_config: PreTrainedConfig) -> str:
    """Return what to do about a model that is not causal: set a field, or take another model."""
    remedy = "name another architecture"
    for field, causal_value in _CAUSAL_FIELDS.items():
        if getattr(text_config, field, causal_value) != causal_value:
            value = str(causal_value).lower()
            remedy = f"pass --config_overrides {field}={value}, or name another architecture"
    return remedy


def check_meta_model_causal(meta_model: PreTrainedModel) -> None:
    """Refuse a model on the meta device whose tokens see later tokens.

    If the code of the architecture only makes transformers' causal mask, nothing is computed.
    Otherwise, a copy with one block gets initial weights on the host and is checked. If this copy
    does not run, the check is skipped, with a line in the log.

    Args:
        meta_model: A causal language model on the meta device; not changed.

    Raises:
        ConfigError: The logits of a token depend on later tokens.
    """
    source = inspect.getsource(sys.modules[type(meta_model).__module__])
    if "create_causal_mask" in source and "create_bidirectional_mask" not in source:
        return
    one_block_model = copy.deepcopy(meta_model)
    del find_blocks(one_block_model)[1:]
    try:
        materialize(one_block_model, seed=0, device=torch.device("cpu"))
        check_causal(one_block_model)
    except ConfigError:
        raise
    except Exception as error:  # the library's model may not run with one block
        logger.info(
            f"Whether tokens see later tokens in this {meta_model.config.model_type} model was not "
            f"checked, because a copy with one block does not run: {one_line(error)}."
        )
