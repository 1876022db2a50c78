"""muP: initial weights and learning rates, so that one learning rate suits all widths.

The maximal update parametrization (Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 8),
relative to a base model; at its width nothing changes. With r = width / base width it asks for

- matrices inside the layers: deviation 1 / sqrt(r), learning rate 1 / r;
- embeddings, output head, gains and biases: deviation and learning rate of the base model;
- logits times 1 / r, and attention logits q k / d in place of q k / sqrt(d), d the width of a head.

completeP (Dey et al. 2025, arXiv:2505.01618, with alpha = 1) adds a factor 1 / (layers / base
layers) to the output of each attention and MLP.

The steps of AdamW and Muon do not depend on the scale of a gradient, so a constant factor in the
forward pass can be moved into the weights in front of it: into their initial values and their
learning rate. So the factor of the logits is in the last norm's gain, for tied and untied heads,
and completeP's factor is in the last matrix of each attention and MLP. The model's code does not
change, and neither do exported weights. Only the scale of attention cannot be moved, because
GPT-2's queries share a matrix with keys and values: it is set in the modules, and moved into the
queries' weights on export.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llm.models.transforms import Transform

_IN_BLOCK = re.compile(r"\.(h|layers)\.\d+\.")
_BRANCH_OUTPUT = re.compile(r"\.(c_proj|o_proj|down_proj|dense|dense_4h_to_h)\.(weight|bias)$")


@dataclass(frozen=True, kw_only=True)
class Scales(Transform):
    """What muP changes in a model, relative to its base model.

    Attributes:
        width_ratio: Width of the model divided by the base model's.
        depth_ratio: Layers of the model divided by the base model's.
        attention_factor: Factor of the attention logits.
        has_depth_scaled_init: Whether the library already divides the initial deviation of the
            weights under `depth_ratio` by the root of the layers, as for GPT-2.
    """

    width_ratio: float = 1.0
    depth_ratio: float = 1.0
    attention_factor: float = 1.0
    has_depth_scaled_init: bool = False

    def deviation_factor(self, name: str, ndim: int) -> float:
        """Return the factor of a parameter's initial values."""
        depth_ratio = (
            math.sqrt(self.depth_ratio) if self.has_depth_scaled_init else self.depth_ratio
        )
        return self._compute_factor(
            name, ndim, matrix_factor=1 / math.sqrt(self.width_ratio), depth_ratio=depth_ratio
        )

    def rate_factor(self, name: str, ndim: int, group: Mapping[str, Any]) -> float:
        """Return the factor of a parameter's learning rate.

        Muon's step is an orthogonal matrix of n x n times 0.2 sqrt(n), which changes the output of
        a layer by the order of sqrt(n): it has the factor of the deviation. NorMuon's has the same
        norm. Hyperball's step is relative to the weights, so it has the deviation's factor already.

        Args:
            name: The parameter's name in the whole model.
            ndim: Its number of dimensions.
            group: The settings of its group in the optimizer; Muon marks those that it trains.
        """
        root = math.sqrt(self.width_ratio)
        matrix_factor = 1 / (root if group.get("is_muon") else self.width_ratio)
        if group.get("on_sphere"):
            return matrix_factor * root
        return self._compute_factor(
            name, ndim, matrix_factor=matrix_factor, depth_ratio=self.depth_ratio
        )

    def _compute_factor(
        self, name: str, ndim: int, *, matrix_factor: float, depth_ratio: float
    ) -> float:
        """Return a parameter's factor from the factor of matrices in the layers.

        The depth ratio divides the factor of the last matrix of each attention and MLP.
        """
        if not _IN_BLOCK.search(name):  # the last norm; or embeddings and the head
            return 1 / self.width_ratio if ndim == 1 else 1.0
        factor = matrix_factor if ndim == 2 else 1.0
        return factor / depth_ratio if _BRANCH_OUTPUT.search(name) else factor

    @torch.no_grad()
    def change_initial_weights(self, model: nn.Module) -> None:
        """Multiply the library's initial weights, or this rank's shards of them, in place."""
        for name, parameter in model.named_parameters():
            factor = self.deviation_factor(name, parameter.ndim)
            if factor != 1:
                parameter.mul_(factor)

    def change_modules(self, model: nn.Module) -> None:
        """Multiply the scale that each attention passes to its kernel."""
        if self.attention_factor != 1:
            for module in model.modules():
                if "scaling" in vars(module):
                    vars(module)["scaling"] *= self.attention_factor

    def export_weights(
        self, state_dict: Mapping[str, Tensor], config: PreTrainedConfig
    ) -> Mapping[str, Tensor]:
        """Return weights with the queries multiplied by the attention factor."""
        if self.attention_factor == 1:
            return state_dict
        folded_weights = dict(state_dict)
        # Behind a norm, the scale of the queries' matrix has no effect.
        query_module = "q_norm" if any(".q_norm." in name for name in state_dict) else "q_proj"
        for name, tensor in state_dict.items():
            module_name = name.split(".")[-2]
            if module_name not in (query_module, "c_attn", "query_key_value"):
                continue
            folded_weights[name] = query_weights = tensor.clone()
            if module_name == "c_attn":  # queries, keys and values lie side by side in the columns
                query_weights = query_weights[..., : config.hidden_size]
            elif module_name == "query_key_value":  # ... of each head, in the rows
                head_shape = config.num_attention_heads, 3, -1
                query_weights = query_weights.unflatten(0, head_shape)[:, 0]
            query_weights *= self.attention_factor
        return folded_weights
