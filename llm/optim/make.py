"""The one place where an optimizer is chosen; `llm.optim.kfac.make_kfac` has K-FAC's."""

import torch

from llm.optim.accum_adamw import make_accum_adamw
from llm.optim.adamw import make_adamw
from llm.optim.muon import make_muon
from llm.optim.options import OptimizerOptions
from llm.optim.sgd import make_sgd
from llm.optim.soap import make_soap


def make_optimizer(
    options: OptimizerOptions, model: torch.nn.Module, *, accum_steps: int | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of a run without K-FAC.

    Args:
        options: Which optimizer, and its settings.
        model: What to train.
        accum_steps: Steps of a block of AccumAdamW; None for another optimizer.

    Raises:
        ConfigError: The optimizer finds nothing to train.
    """
    if options.optimizer == "sgd":
        return make_sgd(options, model)
    if options.optimizer == "soap":
        return make_soap(options, model)
    if options.optimizer == "muon":
        return make_muon(options, model)
    if accum_steps is not None:
        return make_accum_adamw(options, model, accum_steps=accum_steps)
    return make_adamw(options, model)
