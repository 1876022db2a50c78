"""Gradient descent with momentum."""

import torch

from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions


def make_sgd(options: OptimizerOptions, model: torch.nn.Module) -> torch.optim.SGD:
    """Make torch's SGD with momentum, fused as `make_adamw` has it.

    Its weight decay, on matrices only, is what torch's SGD has: a part of the gradient.
    """
    momentum = 0.9 if options.momentum is None else options.momentum
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=options.learning_rate, momentum=momentum, fused=True)
    if momentum:
        for group in groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer
