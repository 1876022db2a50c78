"""Weights that get no gradient, whatever their values and the tokens are."""

import logging

import torch
from transformers import PreTrainedModel

from llm.errors import one_line
from llm.models.attention import run_model
from llm.models.init import keyed_generator, without_weights
from llm.models.patches.experts import experts_on_meta

logger = logging.getLogger("llm.models")


def find_unused_weights(model: PreTrainedModel, *, length: int) -> list[str] | None:
    """Return the names of trained weights that a backward pass does not reach.

    Sparse attention chooses keys with such weights (DeepSeek-V3.2's indexer), and decoders of
    translation models have them in their cross-attention. The passes run on the meta device.

    Args:
        model: A causal language model; not changed.
        length: Tokens of a sample. Some weights take part only in long samples, such as those that
            compress the keys of DeepSeek-V4.

    Returns:
        The names, in the model's order; None if the passes cannot run without values.
    """
    outline = without_weights(model)
    trained = {name: p for name, p in outline.named_parameters() if p.requires_grad}
    unused = list(trained)
    try:
        outline.set_attn_implementation("eager")  # fused kernels may refuse the meta device
        with experts_on_meta(outline), keyed_generator(0, "unused weights", outline.device):
            for training in (False, True):  # in evaluation mode no model skips layers at random
                if unused:
                    outline.train(training)
                    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
                    run_model(outline, ids, None, None).logits.sum().backward()
                    unused = [name for name in unused if trained[name].grad is None]
    except Exception as error:  # the library's model may raise anything
        logger.debug(f"The passes of {model.config.model_type} need values: {one_line(error)}.")
        return None
    return unused
