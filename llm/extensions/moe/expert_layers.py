"""The layers with experts in a model, through the interface of experts in transformers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from llm.models.mixtures import find_routed_experts, find_router_classes

_BIAS_NAMES = ("e_score_correction_bias", "expert_bias")
"""Names of the bias that chooses experts but does not weight them."""


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """The experts of a layer and their router.

    Attributes:
        name: Path of the experts' module in the model.
        experts: Called with hidden states, chosen experts [tokens, K] and their weights.
        router: Returns logits; None if they are not known, for example if a hash chooses experts.
        logits_index: Place of the logits among the router's outputs.
        bias: Added to the scores that choose experts, [experts] or [1, experts]; None without one.
        num_experts: Number of experts.
    """

    name: str
    experts: nn.Module
    router: nn.Module | None
    logits_index: int
    bias: Tensor | None
    num_experts: int

    @property
    def layer_index(self) -> int:
        """Number of the layer in the model."""
        return next(int(part) for part in re.findall(r"\d+", self.name))


def find_expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the layers of a model with the common interface of experts, in order.

    The router of a layer is the module with recorded logits in the smallest subtree around its
    experts that has no other experts.

    Args:
        model: A model, or the stages of a model that are on this rank.
    """
    modules = dict(model.named_modules())
    logits_index_by_class = find_router_classes(model)
    experts_by_name = find_routed_experts(model)
    layers = []
    for name, experts in experts_by_name.items():
        parent = name.rpartition(".")[0]
        router, logits_index = _find_router(name, modules, logits_index_by_class, experts_by_name)
        bias = _find_bias(modules[parent])
        if bias is None and router is not None:
            bias = _find_bias(router)
        if getattr(router, "num_router_classes", experts.num_experts) != experts.num_experts:
            continue  # it skips experts for some tokens, and records expert 0 as their choice
        layers.append(
            ExpertLayer(
                name=name,
                experts=experts,
                router=router,
                logits_index=logits_index,
                bias=bias,
                num_experts=int(experts.num_experts),
            )
        )
    return layers


def _find_router(
    experts_name: str,
    modules: Mapping[str, nn.Module],
    logits_index_by_class: Mapping[type, int],
    experts_names: Iterable[str],
) -> tuple[nn.Module | None, int]:
    """Return the router of some experts, and the index of the logits in its outputs.

    The result is (None, 0) if no router records its logits.
    """
    scope = experts_name.rpartition(".")[0]
    routers = _find_routers_inside(modules, scope, logits_index_by_class)
    while scope and not routers:
        scope = scope.rpartition(".")[0]
        if any(name != experts_name and name.startswith(f"{scope}.") for name in experts_names):
            break
        routers = _find_routers_inside(modules, scope, logits_index_by_class)
    return routers[0] if routers else (None, 0)


def _find_routers_inside(
    modules: Mapping[str, nn.Module], scope: str, logits_index_by_class: Mapping[type, int]
) -> list[tuple[nn.Module, int]]:
    """Return the routers inside a module, and the place of the logits in their outputs."""
    return [
        (module, logits_index)
        for name, module in modules.items()
        for router_class, logits_index in logits_index_by_class.items()
        if name.startswith(f"{scope}." if scope else "") and isinstance(module, router_class)
    ]


def _find_bias(module: nn.Module) -> Tensor | None:
    tensors = [*module.named_buffers(), *module.named_parameters()]
    return next((tensor for name, tensor in tensors if name.endswith(_BIAS_NAMES)), None)
