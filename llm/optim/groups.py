"""Which parameters decay: every trainable parameter is in exactly one group."""

from typing import Any

import torch


def decays(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether weight decay falls on a parameter: on matrices, embeddings included.

    A matrix is a `weight` of two or more dimensions, or a stack of matrices such as
    fused experts. Gains and biases are none, and neither are parameters that only look
    like one: Mamba's state matrix `A_log`, a stack of experts' biases.

    Args:
        name: The parameter's name in the model.
        parameter: The parameter.
    """
    if name.rpartition(".")[2] == "weight":
        return parameter.ndim >= 2
    return parameter.ndim >= 3 and min(parameter.shape) > 1


def parameter_groups(model: torch.nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of a model into decayed and undecayed ones.

    A tied parameter is counted once; an empty group is left out.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[0 if decays(name, parameter) else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def embeddings_and_head(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The matrices with a row for each token or position."""
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    found = [module.weight for module in (*modules, head) if module is not None]
    return {weight for weight in found if isinstance(weight, torch.nn.Parameter)}
