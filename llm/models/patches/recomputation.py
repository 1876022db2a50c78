"""Activations that the backward pass computes once more instead of finding them kept.

All of a block's (Chen et al. 2016, arXiv:1604.06174), or all but the results of its matrix
products and its attention, which are what takes time (Korthikanti et al. 2022, arXiv:2205.05198,
call that selective).
"""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.options import Recomputation

_KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
}
"""Products of batches (bmm) are not among them: those are the scores of eager attention, whose
memory grows with the square of the length."""


def recompute_activations(model: PreTrainedModel, which: Recomputation) -> None:
    """Keep fewer activations of each block for the backward pass.

    Args:
        model: Changed in place.
        which: none keeps all; full keeps a block's input; selective also the results of its
            matrix products and of its attention.

    Raises:
        ConfigError: The model has no blocks that can be computed again.
    """
    if which == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"--activation_checkpointing {which} is not offered by {model.config.model_type}: "
            "leave it out."
        )
    # The newer of the library's two names for it, where there are two.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    options: dict[str, Any] = {"use_reentrant": False}
    if which == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    enable(options)


def _policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the result of an operation is kept."""
    if isinstance(func, torch._ops.OpOverload) and func._schema.name in _KEPT:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.name == "dropout_p" and value > 0:
                # Left out the second time, its mask would be drawn by the next dropout.
                return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
