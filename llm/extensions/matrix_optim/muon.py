"""Muon for the matrices inside a model, and AdamW for the rest, as one optimizer."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.extensions.matrix_optim.fused import Fusion, fused_experts, fused_weights, fusion_of
from llm.extensions.matrix_optim.matrix_owners import (
    MatrixOptimizer,
    MatrixOwners,
    Unit,
    batch_cost,
    batches,
    groups_of,
    stacked_state,
)
from llm.models.mixtures import router_weights
from llm.optim.groups import inner_matrices, parameter_groups, split_groups
from llm.optim.optimizers import adamw_settings
from llm.optim.options import OptimizerOptions
from llm.runtime.float32 import has_half_products


class MuonAndAdamW(MatrixOptimizer):
    """Muon (Jordan et al. 2024) for some matrices, torch's fused AdamW for the rest.

    A step of Muon is the orthogonalized momentum with Nesterov's look-ahead, as in torch's Muon.
    Its length is scaled as in Liu et al. 2025 (arXiv:2502.16982), so that AdamW's learning rate and
    weight decay apply.

    Args:
        groups: Parameter groups with their weight decay.
        matrices: The parameters that Muon trains: matrices, and stacks of the matrices of experts
            [experts, rows, columns].
        lr: Learning rate of both.
        momentum: Momentum of Muon.
        betas: Decay of AdamW's first and second moments.
        eps: Added to the root of AdamW's second moment.
        fusions: How fused weights divide into matrices.
        matrix_owners: Owners of matrices; by default every rank computes all updates.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: Collection[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fusions: Mapping[nn.Parameter, Fusion] | None = None,
        matrix_owners: MatrixOwners | None = None,
    ) -> None:
        split = split_groups(groups, set(matrices), {"is_muon": True}, {"is_muon": False})
        super().__init__(split, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})
        self.units = [
            Unit(
                parameters=[p],
                shapes=[p.shape],
                fusion=fusion_of(p, fusions or {}),
                cost=p.numel(),
                # A stack is a batch by itself.
                kind=(group_index, param_index) if p.ndim == 3 else group_index,
                is_divisible=p.ndim == 3,
            )
            for group_index, group in enumerate(self.param_groups)
            for param_index, p in enumerate(group["params"])
            if group["is_muon"]
        ]
        self._matrix_owners = matrix_owners or MatrixOwners()
        self._matrix_owners.assign(self.units)
        # Created here instead of in the first step, so that a checkpoint can be loaded.
        for unit in self.units:
            p = unit.weight
            self.state[p] = {}
            if unit.owner is None:  # if the weight is a shard, so is its momentum
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            elif self._matrix_owners.owns(unit):
                zeros = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                self.state[p]["momentum_buffer"] = zeros
        self._make_state_adjacent(batches([u for u in self.units if self._matrix_owners.owns(u)]))
        self._add_adamw_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported.
        """
        self._step_adamw()
        group_by_param = groups_of(self)
        step_units = partial(self._step_units, group_by_param=group_by_param)
        update_factor = partial(_update_factor, group_by_param=group_by_param)
        for updates in self._matrix_owners.updates(self.units, step_units, dtype=torch.bfloat16):
            self._add_updates(updates, update_factor)

    def _step_units(
        self,
        units: Sequence[Unit],
        gradients: list[Tensor],
        *,
        group_by_param: Mapping[Tensor, dict[str, Any]],
    ) -> list[Tensor]:
        """Update the momentum of equal units; return their unscaled steps in a list of one stack.

        Args:
            units: Equal units.
            gradients: One stack of gradients [units, ...].
            group_by_param: Parameter group of each parameter.
        """
        momentum = group_by_param[units[0].weight]["momentum"]
        return [self._update_directions(units, gradients[0], momentum)]

    def _update_directions(
        self, units: Sequence[Unit], gradients: Tensor, momentum: float
    ) -> Tensor:
        """Update the momentum of units; return their unscaled steps.

        Args:
            units: Equal units.
            gradients: [units, ...].
            momentum: Of all.
        """
        with stacked_state([self.state[unit.weight] for unit in units]) as state:
            buffer = state["momentum_buffer"]
            updated = torch.lerp(buffer, gradients, 1 - momentum)
            lookahead = gradients.lerp(updated, momentum)
            self._overwrite_state(buffer, updated)
        if self.found_inf is not None:
            lookahead = lookahead.masked_fill(self.found_inf > 0, 0.0)  # their direction is zero
        fusion, length_by_matrix = units[0].fusion, _update_lengths(units[0])
        parts = fusion.split(lookahead, fusion.dim + 1)
        first_length, *_ = length_by_matrix.values()
        directions = {
            name: direction
            if length_by_matrix[name] == first_length
            else direction * (length_by_matrix[name] / first_length)
            for name, direction in zip(parts, orthogonalize_all([*parts.values()]), strict=True)
        }
        return fusion.join(directions, fusion.dim + 1)


def _update_factor(unit: Unit, *, group_by_param: Mapping[Tensor, dict[str, Any]]) -> float:
    """Return the factor on a unit's update: minus its rate, times its first matrix's length."""
    length_factor, *_ = _update_lengths(unit).values()
    return -float(group_by_param[unit.weight]["lr"]) * length_factor


def _update_lengths(unit: Unit) -> dict[str, float]:
    """Return the factors on orthogonal matrices, by the matrix's name, for AdamW's rate."""
    shapes = unit.fusion.shapes(unit.shapes[0])
    return {name: 0.2 * math.sqrt(max(shape[-2:])) for name, shape in shapes.items()}


def orthogonalize_all(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalize matrices in stacks [..., rows, columns]; equal stacks are computed as one."""
    if not batch_cost(stacks[0].device):  # on a CPU, one at a time is faster
        matrices = [stack.flatten(0, -3).split(1) for stack in stacks]
        results = [torch.cat([orthogonalize(matrix) for matrix in stack]) for stack in matrices]
        return [result.view_as(stack) for result, stack in zip(results, stacks, strict=True)]
    direction_by_stack: dict[int, Tensor] = {}
    for shape in dict.fromkeys(stack.shape for stack in stacks):
        stack_indices = [
            stack_index for stack_index, stack in enumerate(stacks) if stack.shape == shape
        ]
        joint = torch.stack([stacks[stack_index] for stack_index in stack_indices])
        directions = orthogonalize(joint.flatten(0, -3)).view_as(joint)
        direction_by_stack |= zip(stack_indices, directions, strict=True)
    return [direction_by_stack[stack_index] for stack_index in range(len(stacks))]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return U V^T of matrices U S V^T, roughly, in bf16: the singular values are 0.7 to 1.2.

    Runs five steps of the quintic Newton-Schulz iteration of Jordan et al. 2024, as in torch's
    Muon, but in float32 if the device is slow in bf16.

    Args:
        matrices: [number, rows, columns].
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices.bfloat16() if has_half_products(matrices.device) else matrices.float()
    is_tall = matrices.shape[1] > matrices.shape[2]
    if is_tall:
        wide = wide.mT
    # So that no singular value is above 1.
    wide = wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, factor, wide, beta=a)
    orthogonal = wide.bfloat16()
    return orthogonal.mT if is_tall else orthogonal


def make_muon(
    options: OptimizerOptions, model: nn.Module, matrix_owners: MatrixOwners | None = None
) -> MuonAndAdamW:
    """Make Muon for the matrices inside a model.

    Each matrix of each expert is one by itself. AdamW trains the rest: embeddings, the output head,
    and the routers of a mixture, which score experts as the head scores tokens.

    Raises:
        ConfigError: The model has no such matrix.
    """
    groups = parameter_groups(options, model)
    expert_fusions, router_params = fused_experts(model), router_weights(model)
    matrices = [
        p
        for p in inner_matrices(model)
        if p in expert_fusions or (p.ndim == 2 and p not in router_params)
    ]
    if not matrices:
        raise ConfigError(
            "--optimizer muon found no matrix to train between the embedding and the output head "
            "of this model; use --optimizer adamw."
        )
    momentum = 0.95 if options.momentum is None else options.momentum
    return MuonAndAdamW(
        groups,
        matrices,
        momentum=momentum,
        fusions=fused_weights(model) | expert_fusions,
        matrix_owners=matrix_owners,
        **adamw_settings(options),
    )
