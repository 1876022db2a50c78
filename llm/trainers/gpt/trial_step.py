"""A forward and backward pass without an update, to measure its memory."""

from collections.abc import Sequence

import torch

from llm.data.loader import MicroBatch
from llm.parallel.base import AcceleratedStrategy


def run_trial_step(
    strategy: AcceleratedStrategy, micro_batches: Sequence[MicroBatch], *, num_tokens: int
) -> None:
    """Compute the gradient of a step as in training, and drop it; every rank calls it.

    Neither weights nor the optimizer's state nor the loss scale change. K-FAC records the tokens,
    and discards them when the next step begins. Random generators advance; each step seeds them.
    An update would need no more memory: the optimizer's state exists, and activations are freed.

    Args:
        strategy: The prepared model.
        micro_batches: This rank's slice of the step.
        num_tokens: As for `forward_backward`.
    """
    # A scaler allows one unscaling for each update, so the gradient is not scaled.
    scaler, strategy.scaler = strategy.scaler, None
    try:
        strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        if strategy.device.type != "cpu":
            torch.accelerator.synchronize(strategy.device)
    finally:
        strategy.scaler = scaler
    strategy.optimizer.zero_grad(set_to_none=True)
    for parameter in strategy.parameters:  # not the optimizer's tensors, which may be shards
        parameter.grad = None
