"""The experts of a mixture, their stacked weights, and their routers."""

from typing import Any

from torch import nn

_LAYOUT = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")


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


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that transformers names as a model's routers, with one matrix each.

    It names a whole layer of Doge and JetMoE's attention with experts, and Zaya's router has
    several layers: these are not included.
    """
    classes = tuple(router_classes(model))
    named = [module for module in model.modules() if isinstance(module, classes)]
    return [module for module in named if sum(map(_is_matrix, module.parameters())) == 1]


def router_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that score the experts of a model's mixtures: [experts, width]."""
    return {p for router in find_routers(model) for p in router.parameters() if _is_matrix(p)}


def router_classes(model: nn.Module) -> dict[type[nn.Module], int]:
    """Return the classes that transformers names as a model's routers, to record their logits.

    Returns:
        For each class, the place of the logits among its outputs.
    """
    indices = {}
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type):
                indices[kind] = getattr(recorder, "index", 0)
    return indices


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether it is a matrix, or a stack of them; a router's biases may be [1, experts]."""
    return parameter.ndim >= 2 and min(parameter.shape) > 1
