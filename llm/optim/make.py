"""Creates a run's optimizer; with K-FAC, `llm.optim.kfac.make_kfac` creates it."""

from collections.abc import Sequence

import torch

from llm.errors import ConfigError
from llm.optim.adamw import make_adamw
from llm.optim.groups import parameter_groups
from llm.optim.muon import make_muon
from llm.optim.options import OptimizerOptions
from llm.optim.soap import make_soap
from llm.optim.whole import WholeMatrices


def make_optimizer(
    options: OptimizerOptions,
    model: torch.nn.Module,
    *,
    whole: WholeMatrices | None = None,
    order: Sequence[str] | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer of a run without K-FAC.

    Args:
        options: The optimizer and its settings.
        model: The model to train.
        whole: Owners of matrices, for optimizers that need whole ones; by default every rank
            updates all.
        order: For SOAP, the result of `basis_order` if the model is divided over ranks.

    Raises:
        ConfigError: The model has no parameter for the optimizer.
    """
    match options.optimizer:
        case "sgd":
            return make_sgd(options, model)
        case "soap":
            return make_soap(options, model, whole=whole, order=order)
        case "muon":
            return make_muon(options, model, whole)
        case "adamw" | None:
            return make_adamw(options, model)
        case "accumadamw":
            raise ConfigError("--optimizer accumadamw needs an extension that is not installed.")


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
