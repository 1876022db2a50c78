"""Weights that hold several matrices side by side, such as GPT-2's query, key and value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llm.models.mixtures import expert_weights, find_experts


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Division of the outputs of a weight among its matrices.

    Attributes:
        sizes: Outputs of each matrix in a group, by the matrix's name. A weight that is a single
            matrix, or a stack of matrices, has one entry, without a name.
        groups: Number of consecutive groups; each has a share of every matrix. 1 if each matrix is
            in one piece; the number of heads if each head's matrices are side by side.
        dim: The weight's dimension of outputs: 0, or 1 in Hugging Face's Conv1D; in a stack of
            experts one more.
    """

    sizes: dict[str, int]
    groups: int = 1
    dim: int = 0

    def split(self, tensor: Tensor, dim: int | None = None) -> dict[str, Tensor]:
        """Return the matrices in a tensor with the outputs; views if there is only one group.

        Args:
            tensor: The weight, a tensor of its shape, or one with the outputs in another dimension.
            dim: The dimension of outputs, from 0; by default the weight's.
        """
        if len(self.sizes) == 1:
            return dict.fromkeys(self.sizes, tensor)
        dim = self.dim if dim is None else dim
        grouped = tensor.unflatten(dim, (self.groups, -1)).split([*self.sizes.values()], dim + 1)
        parts = (part.flatten(dim, dim + 1) for part in grouped)
        return dict(zip(self.sizes, parts, strict=True))

    def join(self, parts: Mapping[str, Tensor], dim: int | None = None) -> Tensor:
        """Undo `split`."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        dim = self.dim if dim is None else dim
        grouped = [parts[name].unflatten(dim, (self.groups, -1)) for name in self.sizes]
        return torch.cat(grouped, dim + 1).flatten(dim, dim + 1)

    def shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        """Return the shapes of the matrices of a weight, by name."""
        shape_by_name = {name: list(shape) for name in self.sizes}
        for name, size in self.sizes.items():
            shape_by_name[name][self.dim] = self.groups * size
        return {name: torch.Size(matrix_shape) for name, matrix_shape in shape_by_name.items()}


def fusion_of(weight: nn.Parameter, fusions: Mapping[nn.Parameter, Fusion]) -> Fusion:
    """Return how a weight divides into matrices; a weight that is not fused is one matrix."""
    return fusions.get(weight, Fusion(sizes={"": weight.shape[0]}))


def join_states(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a weight's optimizer state: its matrices' states, with their names before the keys.

    Args:
        states: By the name of the matrix.
    """
    return {
        f"{name}.{key}" if name else key: tensor
        for name, state in states.items()
        for key, tensor in state.items()
    }


def matrix_state(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the state of a matrix from the state of its weight; undoes `join_states`."""
    prefix = f"{name}." if name else ""
    entries = {key: tensor for key, tensor in state.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): tensor for key, tensor in entries.items()}


def find_fused_weights(model: nn.Module) -> dict[nn.Parameter, Fusion]:
    """Return the fused weights of a model, for optimizers to divide into matrices.

    The architectures of transformers in `_FUSED_MODEL_TYPES` are known.
    """
    config = getattr(model, "config", None)
    if config is None:
        return {}
    fusions = _find_fused_modules(config)
    return {
        module.weight: Fusion(sizes=sizes, groups=num_groups, dim=int(hasattr(module, "nf")))
        for name, module in model.named_modules()
        for module_name, (num_groups, sizes) in fusions.items()
        if name.rpartition(".")[2] == module_name
    }


def find_expert_fusions(model: nn.Module) -> dict[nn.Parameter, Fusion]:
    """Return how the stacks of a model's experts divide: gate and up projections are matrices.

    Stacks are [experts, outputs, inputs], or [experts, inputs, outputs] in a few classes. Gates and
    ups are two halves of the outputs, or alternate.
    """
    fusions = {}
    for experts in find_experts(model).values():
        dim = 2 if experts.is_transposed else 1
        for name, stack in expert_weights(experts).items():
            num_outputs = stack.shape[dim]
            if name != "gate_up_proj":
                fusions[stack] = Fusion(sizes={"": num_outputs}, dim=dim)
            elif experts.is_concatenated:
                fusions[stack] = Fusion(
                    sizes=dict.fromkeys(("gate", "up"), num_outputs // 2), dim=dim
                )
            else:
                pair_sizes = dict.fromkeys(("gate", "up"), 1)
                fusions[stack] = Fusion(sizes=pair_sizes, groups=num_outputs // 2, dim=dim)
    return fusions


def _find_fused_modules(config: Any) -> dict[str, tuple[int, dict[str, int]]]:
    """Return the fused modules of an architecture by the last part of their name.

    Returns:
        For each, the number of groups, and the outputs of each matrix in a group.
    """
    model_type = config.model_type
    if model_type not in _FUSED_MODEL_TYPES:
        return {}
    width, num_heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // num_heads
    grouped_by_head = num_heads, _qkv_sizes(head_dim, head_dim)
    multi_query = 1, _qkv_sizes(width, head_dim)
    if model_type in ("gpt2", "openai-gpt"):
        return {"c_attn": (1, _qkv_sizes(width, width))}
    if model_type == "mpt":
        return {"Wqkv": (1, _qkv_sizes(width, width))}
    if model_type == "gpt_bigcode":
        return {"c_attn": multi_query if config.multi_query else grouped_by_head}
    if model_type == "codegen":  # a layout for four cores of a TPU
        return {"qkv_proj": (4, dict.fromkeys(("query", "value", "key"), width // 4))}
    if model_type == "falcon" and config.new_decoder_architecture:
        num_groups = config.num_kv_heads
        query_width = num_heads // num_groups * head_dim
        return {"query_key_value": (num_groups, _qkv_sizes(query_width, head_dim))}
    if model_type == "falcon" and config.multi_query:
        return {"query_key_value": multi_query}
    if model_type in ("phi3", "glm", "glm4"):
        mlp_width = config.intermediate_size
        key_width = config.num_key_value_heads * head_dim
        fusions = {"gate_up_proj": (1, {"gate": mlp_width, "up": mlp_width})}
        if model_type == "phi3":
            fusions |= {"qkv_proj": (1, _qkv_sizes(num_heads * head_dim, key_width))}
        return fusions
    return {"query_key_value": grouped_by_head}


_FUSED_MODEL_TYPES = (
    *("gpt2", "openai-gpt", "mpt", "gpt_bigcode", "codegen", "falcon", "phi3", "glm", "glm4"),
    *("bloom", "gpt_neox", "gpt_neox_japanese", "persimmon"),
)


def _qkv_sizes(query_width: int, key_width: int) -> dict[str, int]:
    return {"query": query_width, "key": key_width, "value": key_width}
