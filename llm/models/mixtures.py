"""The experts of a mixture, their stacked weights, and their routers."""

from typing import Any

from torch import nn

_EXPERT_ATTRIBUTES = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model's experts, by name.

    They have transformers' common interface: weights `gate_up_proj` (or `up_proj`) and `down_proj`
    with one matrix for each expert; `forward(hidden [tokens, width], top_k_index [tokens, k],
    top_k_weights [tokens, k])`; and attributes that describe the layout of the weights.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in _EXPERT_ATTRIBUTES)
    }


def expert_weights(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights with a matrix for each expert, by name: [experts, rows, columns]."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that transformers records as a model's routers, if they have one matrix.

    Not included are Doge and JetMoE's attention with experts, where it records a whole layer, and
    Zaya's routers, which have several layers.
    """
    router_types = tuple(router_classes(model))
    candidates = [module for module in model.modules() if isinstance(module, router_types)]
    return [module for module in candidates if sum(map(_is_matrix, module.parameters())) == 1]


def router_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that score the experts of a model's mixtures: [experts, width]."""
    return {p for router in find_routers(model) for p in router.parameters() if _is_matrix(p)}


def router_classes(model: nn.Module) -> dict[type[nn.Module], int]:
    """Return the classes of a model's routers, as transformers lists them to record their logits.

    Returns:
        Index of the logits among the outputs of a module, by class.
    """
    logits_index_by_class = {}
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            router_class = getattr(recorder, "target_class", recorder)
            if isinstance(router_class, type):
                logits_index_by_class[router_class] = getattr(recorder, "index", 0)
    return logits_index_by_class


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices.

    A router's biases may be [1, experts], which is not a matrix here.
    """
    return parameter.ndim >= 2 and min(parameter.shape) > 1
