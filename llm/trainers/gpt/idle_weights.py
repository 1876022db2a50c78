"""Weights that are trained but do not take part in the loss."""

import logging

from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather

_MAX_LISTED_WEIGHTS = 3
"""Maximum number of weights that the log names."""

logger = logging.getLogger("llm")


def log_idle_weights(strategy: AcceleratedStrategy) -> None:
    """Log how many weights got no gradient in the last step; every rank calls it.

    Whether a weight has a gradient is known on the host, so this does not wait for the device.

    Args:
        strategy: The model, with the gradients of a step.
    """
    trained_weights = set(strategy.parameters)
    local_weights = {
        name: weight
        for name, weight in strategy.model.named_parameters()
        if weight in trained_weights
    }
    local_sizes = {
        name: weight.numel() for name, weight in local_weights.items() if weight.grad is None
    }
    if len(local_sizes) == len(local_weights):  # an optimizer has taken the gradients
        local_sizes = {}
    # Stages of a pipeline have different weights.
    weights_by_rank = gather((list(local_weights), local_sizes))
    num_weights = len({name for names, _ in weights_by_rank for name in names})
    idle_sizes = {
        name: size for _, rank_sizes in weights_by_rank for name, size in rank_sizes.items()
    }
    if not idle_sizes:
        return
    name_list = ", ".join([*idle_sizes][:_MAX_LISTED_WEIGHTS])
    if len(idle_sizes) > _MAX_LISTED_WEIGHTS:
        name_list += f" and {len(idle_sizes) - _MAX_LISTED_WEIGHTS:,} more"
    logger.info(
        f"{len(idle_sizes):,} of {num_weights:,} trained weights "
        f"({sum(idle_sizes.values()):,} parameters) got no gradient in the first step, and keep "
        f"their values if that stays so: {name_list}."
    )
