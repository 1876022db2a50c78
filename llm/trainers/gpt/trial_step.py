"""A forward and backward pass without an update, to see whether they fit into memory."""

from collections.abc import Sequence

import torch
from torch import nn

from llm.data.loader import MicroBatch
from llm.models.patches.tied_embedding import TiedEmbedding
from llm.parallel.base import AcceleratedStrategy


def trial_step(strategy: AcceleratedStrategy, micro_batches: Sequence[MicroBatch]) -> None:
    """Run forward and backward without a collective, and drop the gradient.

    DistributedDataParallel is left out: it cannot be used again after a backward pass that failed.
    An update would need no more memory: the optimizer's state exists, and activations are freed.

    Args:
        strategy: A strategy with the whole model on every rank: otherwise a rank that runs out of
            memory would leave the others waiting in a collective.
        micro_batches: On the device; two, if gradients will accumulate.
    """
    strategy.loss.train()
    try:
        with strategy._weight_casts(len(micro_batches)):
            for micro_batch in micro_batches:
                with strategy.autocast():
                    objective, _ = strategy.loss(*micro_batch)
                objective.backward()
        if strategy.device.type != "cpu":
            torch.accelerator.synchronize(strategy.device)
    finally:
        strategy.optimizer.zero_grad(set_to_none=True)
        _drop_head_gradient(strategy.loss)


def _drop_head_gradient(module: nn.Module) -> None:
    """Drop the head's gradient, which a backward pass that failed did not give to the lookup."""
    for child in module.modules():
        if isinstance(child, TiedEmbedding):
            child.head_gradient = None
