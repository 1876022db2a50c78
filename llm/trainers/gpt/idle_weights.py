"""Weights that are trained but do not take part in the loss."""

import logging

from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather

_MOST_NAMED = 3
"""Weights that the log names."""

logger = logging.getLogger("llm")


def log_idle_weights(strategy: AcceleratedStrategy) -> None:
    """Log how many weights got no gradient in the last step; every rank calls it.

    Whether a weight has a gradient is known on the host, so this does not wait for the device.

    Args:
        strategy: The model, with the gradients of a step.
    """
    trained = set(strategy.parameters)
    weights = {name: p for name, p in strategy.model.named_parameters() if p in trained}
    idle = {name: p.numel() for name, p in weights.items() if p.grad is None}
    if len(idle) == len(weights):  # an optimizer has taken the gradients
        idle = {}
    # Stages of a pipeline have different weights.
    idle_of_ranks = gather((list(weights), idle))
    num_weights = len({name for names, _ in idle_of_ranks for name in names})
    sizes = {name: size for _, sizes in idle_of_ranks for name, size in sizes.items()}
    if not sizes:
        return
    names = ", ".join([*sizes][:_MOST_NAMED])
    if len(sizes) > _MOST_NAMED:
        names += f" and {len(sizes) - _MOST_NAMED:,} more"
    logger.info(
        f"{len(sizes):,} of {num_weights:,} trained weights ({sum(sizes.values()):,} parameters) "
        f"got no gradient in the first step, and keep their values if that stays so: {names}."
    )
