"""The optimizers of the core."""

import torch

from llm.optim.adamw import make_adamw
from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions


def make_optimizer(options: OptimizerOptions, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make AdamW or SGD.

    Args:
        options: Which optimizer, and its settings.
        model: The model to train.
    """
    if options.optimizer == "sgd":
        return make_sgd(options, model)
    assert options.optimizer in (None, "adamw"), "an extension makes all others"
    return make_adamw(options, model)


def make_sgd(options: OptimizerOptions, model: torch.nn.Module) -> torch.optim.SGD:
    """Make torch's SGD with momentum, in its fused form for the reasons of `make_adamw`.

    Weight decay, on matrices only, is added to the gradient, as torch's SGD does.
    """
    momentum = 0.9 if options.momentum is None else options.momentum
    groups = parameter_groups(options, model)
    optimizer = torch.optim.SGD(groups, lr=options.learning_rate, momentum=momentum, fused=True)
    if momentum:
        for group in groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer
