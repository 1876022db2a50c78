"""Weights that are trained but do not take part in the loss."""

import logging

from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather
from llm.runtime.logging import list_first

_MAX_LISTED_WEIGHTS = 3
"""Maximum number of weights that the log names."""

logger = logging.getLogger("llm")


def log_idle_weights(strategy: AcceleratedStrategy) -> None:
    """Log how many weights got no gradient in the last step; every rank calls it.

    Whether a weight has a gradient is known on the host, so this does not wait for the device.

    Args:
        strategy: The model, with the gradients of a step.
    """
    # The stages of a pipeline have different weights, so each rank adds those that it trains.
    num_parameters_by_weight: dict[str, int] = {}
    idle_weights: list[str] = []
    for num_parameters_of_rank, idle_weights_of_rank in gather(_list_local_weights(strategy)):
        num_parameters_by_weight |= num_parameters_of_rank
        idle_weights += idle_weights_of_rank
    idle_weights = list(dict.fromkeys(idle_weights))
    if not idle_weights:
        return

    num_idle_parameters = sum(num_parameters_by_weight[name] for name in idle_weights)
    logger.info(
        f"{len(idle_weights):,} of {len(num_parameters_by_weight):,} trained weights "
        f"({num_idle_parameters:,} parameters) got no gradient in the first step, and keep "
        f"their values if that stays so: {list_first(idle_weights, _MAX_LISTED_WEIGHTS)}."
    )


def _list_local_weights(strategy: AcceleratedStrategy) -> tuple[dict[str, int], list[str]]:
    """Return the parameters in each trained weight of this rank, and the names of idle weights."""
    trained_parameters = set(strategy.parameters)
    weights = {
        name: weight
        for name, weight in strategy.model.named_parameters()
        if weight in trained_parameters
    }
    idle_weights = [name for name, weight in weights.items() if weight.grad is None]
    if len(idle_weights) == len(weights):  # an optimizer has taken the gradients
        idle_weights = []
    return {name: weight.numel() for name, weight in weights.items()}, idle_weights
