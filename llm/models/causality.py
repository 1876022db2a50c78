"""Checks that tokens do not see later tokens.

transformers lists encoders such as BERT among the causal language models, but they are causal only
if they are configured as decoders. Others, such as XLNet, make their masks themselves.
"""

import copy
import inspect
import sys

import torch
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.attention import distance, evaluating, random_tokens, run_model
from llm.models.init import materialize
from llm.models.sizes import find_blocks
from llm.runtime.float32 import full_float32

_LENGTH = 4  # tokens that two windows share, and tokens after them
_ROUNDING = 1e-4
"""Largest rounding error of logits, relative to the effect of other tokens."""
_CAUSAL_FIELDS = {"is_decoder": True, "causal": True, "attn_type": "uni"}
"""Fields that make BERT, XLM and XLNet causal, with the value that does."""


@torch.no_grad()
@full_float32()
def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model with tokens that see later ones: it would learn to copy them.

    Args:
        model: A causal language model with weights; its mode is restored.

    Raises:
        ConfigError: The logits of a token depend on later tokens.
    """
    text = model.config.get_text_config()
    if getattr(text, "_attn_implementation", None) not in (None, "eager", "sdpa", "flex_attention"):
        return  # other kernels may refuse float32
    input_ids = random_tokens(model, 2, 2 * _LENGTH)
    input_ids[1, :_LENGTH] = input_ids[0, :_LENGTH]
    with evaluating(model):
        logits = run_model(model, input_ids, None, None).logits.float()
    earlier, later = (distance(*half) for half in logits.split(_LENGTH, dim=1))
    if earlier > _ROUNDING * later:
        remedy = "name another architecture"
        for field, causal in _CAUSAL_FIELDS.items():
            if getattr(text, field, causal) != causal:
                value = str(causal).lower()
                remedy = f"pass --config_overrides {field}={value}, or name another architecture"
        raise ConfigError(
            f"In this {model.config.model_type} model, tokens see later tokens, so it would learn "
            f"to copy instead of to predict: {remedy}."
        )


def check_outline_causal(model: PreTrainedModel) -> None:
    """Refuse a model without weights if it would not be causal with them.

    Models that only use transformers' causal mask are not checked. Of others, a copy with one block
    gets initial weights on the host.

    Args:
        model: A causal language model on the meta device; not changed.

    Raises:
        ConfigError: The logits of a token depend on later tokens.
    """
    source = inspect.getsource(sys.modules[type(model).__module__])
    if "create_causal_mask" in source and "create_bidirectional_mask" not in source:
        return
    outline = copy.deepcopy(model)
    del find_blocks(outline)[1:]
    try:
        materialize(outline, seed=0, device=torch.device("cpu"))
        check_causal(outline)
    except ConfigError:
        raise
    except Exception:  # of the library's model, which does not run with one block
        return
