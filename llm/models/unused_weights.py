"""Weights that never get a gradient, for any values and tokens."""

import logging

import torch
from transformers import PreTrainedModel

from llm.errors import one_line
from llm.models.attention import run_model
from llm.models.init import copy_to_meta, keyed_generator
from llm.models.patches.experts import experts_on_meta

logger = logging.getLogger("llm.models")


def find_unused_weights(model: PreTrainedModel, *, length: int) -> list[str] | None:
    """Return the names of trainable weights that a backward pass does not reach.

    Sparse attention chooses keys with such weights (DeepSeek-V3.2's indexer), and decoders of
    translation models have them in their cross-attention. The passes run on the meta device.

    Args:
        model: A causal language model; not changed.
        length: Tokens of a sample. Some weights take part only in long samples, such as those that
            compress the keys of DeepSeek-V4.

    Returns:
        The names, in the model's order; None if the passes cannot run without values.
    """
    meta_model = copy_to_meta(model)
    weights = {name: p for name, p in meta_model.named_parameters() if p.requires_grad}
    unused_names = list(weights)
    try:
        meta_model.set_attn_implementation("eager")  # fused kernels may refuse the meta device
        with experts_on_meta(meta_model), keyed_generator(0, "unused weights", meta_model.device):
            for is_training in (False, True):  # in evaluation mode no model skips layers at random
                if not unused_names:
                    break
                meta_model.train(is_training)
                _run_meta_backward(meta_model, length)
                unused_names = [name for name in unused_names if weights[name].grad is None]
    except Exception as error:  # the library's model may raise anything
        logger.debug(f"The passes of {model.config.model_type} need values: {one_line(error)}.")
        return None
    return unused_names


def _run_meta_backward(meta_model: PreTrainedModel, length: int) -> None:
    """Run a forward and a backward pass of one sample through a model on the meta device."""
    input_ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    logits = run_model(meta_model, input_ids, positions=None, documents=None).logits
    logits.sum().backward()
