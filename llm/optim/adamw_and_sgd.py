"""The optimizers of the core: torch's fused AdamW, its state and step for variants, and SGD."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions


def make_adamw(options: OptimizerOptions, model: torch.nn.Module) -> torch.optim.AdamW:
    """Make AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) in its fused form.

    The fused kernel also skips a step by a flag on the device (`found_inf`), so
    that a non-finite gradient needs no synchronization.

    torch creates the state in the first step; here it is created at once. A checkpoint can then be
    loaded into it, and the moments do not fragment the memory that the first step's activations
    leave for the next step.
    """
    groups = parameter_groups(options, model)
    optimizer = torch.optim.AdamW(groups, **adamw_settings(options), fused=True)
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = adamw_state(parameter)
    return optimizer


def adamw_settings(options: OptimizerOptions) -> dict[str, Any]:
    """Return lr, betas and eps, the common arguments of AdamW's variants."""
    beta1, beta2 = options.betas
    return {"lr": options.learning_rate, "betas": (beta1, beta2), "eps": options.eps}


def adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter before its first step."""
    return {
        # In float32 on the device: a skipped step does not count.
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def adamw_step(
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    state: Mapping[Tensor, dict[str, Tensor]],
    found_inf: Tensor | None,
) -> None:
    """Update the parameters that have a gradient by torch's fused AdamW, in place.

    Args:
        group: lr, betas, eps and weight_decay.
        parameters: Tensors with a gradient or None in `grad`.
        state: State of each tensor, as `adamw_state` returns it; changed in place.
        found_inf: 1.0 where the step is skipped; read on the device.
    """
    updated_params = [param for param in parameters if param.grad is not None]
    param_states = [state[param] for param in updated_params]
    beta1, beta2 = group["betas"]
    adamw(
        updated_params,
        [param.grad for param in updated_params if param.grad is not None],
        [param_state["exp_avg"] for param_state in param_states],
        [param_state["exp_avg_sq"] for param_state in param_states],
        [],
        [param_state["step"] for param_state in param_states],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def make_optimizer(options: OptimizerOptions, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make AdamW or SGD."""
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
