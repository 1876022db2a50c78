"""Activation checkpointing: the backward pass recomputes activations to save memory.

Full recomputes all of a block (Chen et al. 2016, arXiv:1604.06174). Selective recomputes all but
the matrix products and attention, which take most of the time (Korthikanti et al. 2022,
arXiv:2205.05198).
"""

import functools
from collections.abc import Set
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.mixtures import find_experts
from llm.models.options import Recomputation

_SAVED_OPERATIONS = {
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
}
"""Selective recomputation saves the results of these operations.

bmm is not included: it computes the scores of eager attention, with memory quadratic in the length.
"""


def recompute_activations(model: PreTrainedModel, mode: Recomputation) -> None:
    """Keep fewer activations of each block for the backward pass.

    Args:
        model: Changed in place.
        mode: none keeps all activations; full keeps the input of each block; selective also keeps
            the results of its matrix products and its attention.

    Raises:
        ConfigError: The model does not support activation checkpointing.
    """
    if mode == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"--activation_checkpointing {mode} is not offered by {model.config.model_type}: "
            "leave it out."
        )
    # Newer versions of transformers have another name for this method.
    enable_checkpointing = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )
    checkpoint_options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        saved_operations = _SAVED_OPERATIONS
        if any(experts.has_bias for experts in find_experts(model).values()):
            # transformers adds the biases of experts to the result in place.
            saved_operations = saved_operations - {"aten::_grouped_mm"}
        policy = functools.partial(_checkpoint_policy, saved_operations)
        checkpoint_options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, policy
        )
    enable_checkpointing(checkpoint_options)


def _checkpoint_policy(
    saved_operations: Set[str], _: Any, func: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return the policy of an operation: save its result if its name is in `saved_operations`."""
    if isinstance(func, torch._ops.OpOverload) and func._schema.name in saved_operations:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.name == "dropout_p" and value > 0:
                # If its result were saved, the recomputation would skip its random numbers, and the
                # next dropout would draw different ones than in the forward pass.
                return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
