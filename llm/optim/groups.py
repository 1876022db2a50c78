"""Which parameters decay: every trainable parameter is in exactly one group; torch's AdamW, SGD."""

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


def make_adamw(
    model: torch.nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) in its fused form.

    The fused kernel also skips a step by a flag on the device (`found_inf`), so
    that a non-finite gradient needs no synchronisation.

    Its state is made at once, where torch waits for the first step: a checkpoint can be loaded
    into it, and moments do not settle in the memory that the first step's activations leave, and
    the next step's want.
    """
    groups = parameter_groups(model, weight_decay=weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = adamw_state(parameter)
    return optimizer


def adamw_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What AdamW knows of a parameter before its first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def make_sgd(
    model: torch.nn.Module, *, learning_rate: float, weight_decay: float, momentum: float
) -> torch.optim.SGD:
    """Gradient descent with momentum, fused as `make_adamw` has it.

    Its weight decay, on matrices only, is what torch's SGD has: a part of the gradient.
    """
    groups = parameter_groups(model, weight_decay=weight_decay)
    optimizer = torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, fused=True)
    if momentum:
        for group in groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer
