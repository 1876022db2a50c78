"""torch's fused AdamW: its state made at once, and its step by itself, for other optimizers."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions


def make_adamw(options: OptimizerOptions, model: torch.nn.Module) -> torch.optim.AdamW:
    """Make AdamW (Loshchilov & Hutter 2019) in its fused form.

    The fused kernel also skips a step by a flag on the device (`found_inf`), so
    that a non-finite gradient needs no synchronisation.

    Its state is made at once, where torch waits for the first step: a checkpoint can be loaded
    into it, and moments do not settle in the memory that the first step's activations leave, and
    the next step's want.
    """
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    optimizer = torch.optim.AdamW(groups, **adamw_settings(options), fused=True)
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = adamw_state(parameter)
    return optimizer


def adamw_settings(options: OptimizerOptions) -> dict[str, Any]:
    """Return lr, betas and eps, which every optimizer that is a kind of AdamW takes."""
    beta1, beta2 = options.betas
    return {"lr": options.learning_rate, "betas": (beta1, beta2), "eps": options.eps}


def adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter before its first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def adamw_step(
    group: dict[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    found_inf: Tensor | None,
    *,
    decay: float,
) -> None:
    """Take a step of torch's fused AdamW with a group's settings and states of `adamw_state`."""
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=decay,
        eps=group["eps"],
        maximize=False,
    )
