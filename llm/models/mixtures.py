"""The experts of a mixture: their stacked weights, and the weights of their routers."""

from typing import Any

from torch import nn

_LAYOUT = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
_ROUTERS = ("gate", "router")


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model's experts, by name.

    They have transformers' common interface: weights `gate_up_proj` (or `up_proj`) and `down_proj`
    with one matrix for each expert; `forward(hidden [tokens, width], top_k_index [tokens, k],
    top_k_weights [tokens, k])`; and attributes that describe the layout of the weights.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in _LAYOUT)
    }


def expert_weights(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights with a matrix for each expert, by name: [experts, rows, columns]."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


def router_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that score the experts of a model's mixtures: [experts, width]."""
    modules = dict(model.named_modules())
    weights: set[nn.Parameter] = set()
    for name in find_experts(model):
        mixture = modules[name.rpartition(".")[0]]
        for child, module in mixture.named_children():
            if child in _ROUTERS:
                weights |= {p for p in module.parameters() if p.ndim == 2}
    return weights
