"""The experts of a mixture, their stacked weights, and their routers."""

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from llm.models.sizes import active_parameters, experts_per_token, parameter_counts
from llm.runtime.logging import counted

_EXPERT_ATTRIBUTES = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")


class MixtureSize(NamedTuple):
    """The size of a mixture of experts.

    Attributes:
        num_layers: Number of layers with experts.
        num_experts: Numbers of experts of a layer that occur, in rising order.
        experts_per_token: Experts that the router of a layer chooses for a token.
        active: Number of parameters that a token uses.
        total: Number of all parameters.
    """

    num_layers: int
    num_experts: tuple[int, ...]
    experts_per_token: int | None
    active: int
    total: int

    def describe(self) -> str:
        """Return layers, experts and top-k: `48 layers of 128, 8 per token`."""
        layers = counted(self.num_layers, "layer")
        numbers = " or ".join(f"{number:,}" for number in self.num_experts)
        return f"{layers} of {numbers}, {self.experts_per_token} per token"

    def describe_active(self) -> str:
        """Return the active parameters: `3.4B of 30.5B parameters are active`."""
        return f"{_short(self.active)} of {_short(self.total)} parameters are active"


def mixture_size(model: PreTrainedModel) -> MixtureSize | None:
    """Return the size of a mixture of experts; None if no layer has the interface of experts.

    Args:
        model: The whole model, perhaps without weights.
    """
    experts = find_routed_experts(model).values()
    if not experts:
        return None
    return MixtureSize(
        num_layers=len(experts),
        num_experts=tuple(sorted({int(module.num_experts) for module in experts})),
        experts_per_token=experts_per_token(model.config.get_text_config()),
        active=active_parameters(model),
        total=parameter_counts(model)["total"],
    )


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


def find_routed_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules that are called as in `find_experts`, with weights of any kind, by name.

    DBRX keeps its weights in another module, as one matrix for all experts.
    """
    return find_experts(model) | {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "DbrxExperts"
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
    router_types = tuple(find_router_classes(model))
    candidates = [module for module in model.modules() if isinstance(module, router_types)]
    return [module for module in candidates if sum(map(_is_matrix, module.parameters())) == 1]


def router_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that score the experts of a model's mixtures: [experts, width]."""
    return {p for router in find_routers(model) for p in router.parameters() if _is_matrix(p)}


def find_router_classes(model: nn.Module) -> dict[type[nn.Module], int]:
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


def _short(number: int) -> str:
    """Return a number of parameters such as 30.5B or 524,288."""
    for size, suffix in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:,}"


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices.

    A router's biases may be [1, experts], which is not a matrix here.
    """
    return parameter.ndim >= 2 and min(parameter.shape) > 1
