"""Muon or NorMuon for the matrices inside a model, and AdamW for the rest, as one optimizer."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.extensions.matrix_optim.fused import (
    Fusion,
    find_expert_fusions,
    find_fused_weights,
    fusion_of,
)
from llm.extensions.matrix_optim.matrix_owners import (
    MatrixOptimizer,
    MatrixOwners,
    Unit,
    groups_of,
    min_batch_cost,
    stacked_state,
)
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings
from llm.models.mixtures import router_weights
from llm.optim.adamw_and_sgd import adamw_settings
from llm.optim.groups import inner_matrices, parameter_groups, split_groups
from llm.runtime.float32 import has_half_products


class Iteration(NamedTuple):
    """A Newton-Schulz iteration, which brings the singular values of a matrix close to 1.

    Attributes:
        margin: The matrix is divided by its norm times this, because bf16 rounds.
        coefficients: The a, b and c of each step X <- a X + b (X X^T) X + c (X X^T)^2 X.
    """

    margin: float
    coefficients: Sequence[tuple[float, float, float]]


QUINTIC = Iteration(1.0, [(3.4445, -4.7750, 2.0315)] * 5)
"""The five equal steps of Jordan et al. 2024."""

POLAR_EXPRESS = Iteration(
    1.01,
    [
        (a / 1.01, b / 1.01**3, c / 1.01**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        )
    ],
)
"""Each step is the best polynomial for the singular values that the previous steps leave, with a
margin of 1 % (Amsel et al. 2025, arXiv:2505.16932, algorithm 1)."""


class MuonAndAdamW(MatrixOptimizer):
    """Muon (Jordan et al. 2024) for some matrices, torch's fused AdamW for the rest.

    A step of Muon is the orthogonalized momentum with Nesterov's look-ahead, as in torch's Muon.
    Its length is scaled as in Liu et al. 2025 (arXiv:2502.16982), so that AdamW's learning rate and
    weight decay apply.

    NorMuon (Li et al. 2025, arXiv:2510.05491) divides each row of the orthogonalized momentum, the
    weights of one output, by the root of the moving average of its mean square, and scales the
    result back to the length of Muon's step. As in its authors' code, the momentum looks ahead.

    Args:
        groups: Parameter groups with their weight decay.
        matrices: The parameters that Muon trains: matrices, and stacks of the matrices of experts
            [experts, rows, columns].
        lr: Learning rate of both.
        momentum: Momentum of Muon.
        row_beta: Decay of NorMuon's second moments of rows; None for Muon, which has none.
        iteration: Orthogonalizes the momentum.
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
        row_beta: float | None = None,
        iteration: Iteration = QUINTIC,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fusions: Mapping[nn.Parameter, Fusion] | None = None,
        matrix_owners: MatrixOwners | None = None,
    ) -> None:
        param_groups = split_groups(
            groups,
            set(matrices),
            chosen_settings={"is_muon": True},
            other_settings={"is_muon": False},
        )
        super().__init__(param_groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})
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
        self._row_beta, self._iteration = row_beta, iteration
        self._matrix_owners = matrix_owners or MatrixOwners()
        self._matrix_owners.assign(self.units)
        # Created here instead of in the first step, so that a checkpoint can be loaded.
        for unit in self.units:
            self.state[unit.weight] = self._make_unit_state(unit)
        self._make_state_adjacent(self._matrix_owners)
        self._add_adamw_state()

    def _make_unit_state(self, unit: Unit) -> dict[str, Tensor]:
        """Return the state of a matrix before the first step; empty if another rank keeps it."""
        if not self._matrix_owners.owns(unit):
            return {}
        weight = unit.weight
        # An owner keeps the state of the whole matrix; without one, the state of its shard.
        has_whole_matrix = unit.owner is not None
        zeros = (
            torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
            if has_whole_matrix
            else torch.zeros_like(weight)
        )
        state = {"momentum_buffer": zeros}
        if self._row_beta is not None:
            state["row_second_moment"] = zeros.sum(_input_dim(unit), keepdim=True)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._step_adamw()
        group_by_param = groups_of(self)
        compute_directions = partial(self._compute_directions, group_by_param=group_by_param)
        update_factor = partial(_update_factor, group_by_param=group_by_param)
        for updates in self._matrix_owners.compute_updates(
            self.units, compute_directions, dtype=torch.bfloat16
        ):
            self._add_updates(updates, update_factor)

    def _compute_directions(
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
        lookahead = self._update_momentum(units, gradients[0], momentum)
        fusion, length_by_matrix = units[0].fusion, _update_lengths(units[0])
        lookahead_by_matrix = fusion.split(lookahead, fusion.dim + 1)
        orthogonal_parts = orthogonalize_all([*lookahead_by_matrix.values()], self._iteration)
        directions = dict(zip(lookahead_by_matrix, orthogonal_parts, strict=True))
        if self._row_beta is not None:
            directions = self._normalize_rows(units, directions, self._row_beta)
        # `_update_factor` has the length of the first matrix.
        first_length, *_ = length_by_matrix.values()
        directions = {
            name: direction
            if length_by_matrix[name] == first_length
            else direction * (length_by_matrix[name] / first_length)
            for name, direction in directions.items()
        }
        return [fusion.join(directions, fusion.dim + 1)]

    def _update_momentum(self, units: Sequence[Unit], gradients: Tensor, momentum: float) -> Tensor:
        """Update the momentum of equal units; return it with Nesterov's look-ahead.

        Args:
            units: Equal units.
            gradients: [units, ...].
            momentum: Decay of the momentum.

        Returns:
            [units, ...]; zeros if the step is skipped.
        """
        with stacked_state([self.state[unit.weight] for unit in units]) as state:
            momentum_buffer = state["momentum_buffer"]
            new_momentum = torch.lerp(momentum_buffer, gradients, 1 - momentum)
            lookahead = gradients.lerp(new_momentum, momentum)
            self._overwrite_state(momentum_buffer, new_momentum)
        if self.found_inf is not None:
            lookahead = lookahead.masked_fill(self.found_inf > 0, 0.0)
        return lookahead

    def _normalize_rows(
        self, units: Sequence[Unit], directions: dict[str, Tensor], row_beta: float
    ) -> dict[str, Tensor]:
        """Update the second moments of rows; return directions with rows of equal length, in bf16.

        Args:
            units: Equal units.
            directions: Orthogonal matrices [units, ...] by the matrix's name.
            row_beta: Decay of the second moments.
        """
        fusion, input_dim = units[0].fusion, _input_dim(units[0]) + 1
        dtype = units[0].weight.dtype
        matrices = {name: direction.to(dtype) for name, direction in directions.items()}
        squares = {
            name: matrix.square().mean(input_dim, keepdim=True) for name, matrix in matrices.items()
        }
        with stacked_state([self.state[unit.weight] for unit in units]) as state:
            second_moment = state["row_second_moment"]
            new_second_moment = second_moment.lerp(
                fusion.join(squares, fusion.dim + 1), 1 - row_beta
            )
            self._overwrite_state(second_moment, new_second_moment)
        for name, row_second_moment in fusion.split(new_second_moment, fusion.dim + 1).items():
            normalized = matrices[name] / (row_second_moment.sqrt() + 1e-10)
            norm = torch.linalg.vector_norm(normalized, dim=(-2, -1), keepdim=True)
            # The norm of an orthogonal matrix is the root of its shorter side.
            length = math.sqrt(min(normalized.shape[-2:]))
            # In bf16 like orthogonal matrices, so that it does not matter whether it is sent.
            matrices[name] = (normalized * (length / norm.clamp(min=1e-10))).bfloat16()
        return matrices


def _input_dim(unit: Unit) -> int:
    """Return the dimension of a weight's inputs; it is next to the dimension of the outputs."""
    last_dims = len(unit.shapes[0]) - 2, len(unit.shapes[0]) - 1
    return sum(last_dims) - unit.fusion.dim


def _update_factor(unit: Unit, *, group_by_param: Mapping[Tensor, dict[str, Any]]) -> float:
    """Return the factor on a unit's update: minus its rate, times its first matrix's length."""
    length_factor, *_ = _update_lengths(unit).values()
    return -float(group_by_param[unit.weight]["lr"]) * length_factor


def _update_lengths(unit: Unit) -> dict[str, float]:
    """Return the factors on orthogonal matrices, by the matrix's name, for AdamW's rate."""
    shapes = unit.fusion.shapes(unit.shapes[0])
    return {name: 0.2 * math.sqrt(max(shape[-2:])) for name, shape in shapes.items()}


def orthogonalize_all(stacks: Sequence[Tensor], iteration: Iteration) -> list[Tensor]:
    """Orthogonalize matrices in stacks [..., rows, columns]; equal stacks are computed as one."""
    if not min_batch_cost(stacks[0].device):  # on a CPU, one at a time is faster
        return [_orthogonalize_one_by_one(stack, iteration) for stack in stacks]
    directions_by_index: dict[int, Tensor] = {}
    for shape in dict.fromkeys(stack.shape for stack in stacks):
        equal_indices = [index for index, stack in enumerate(stacks) if stack.shape == shape]
        equal_stacks = torch.stack([stacks[index] for index in equal_indices])
        directions = orthogonalize(equal_stacks.flatten(0, -3), iteration).view_as(equal_stacks)
        directions_by_index |= zip(equal_indices, directions, strict=True)
    return [directions_by_index[index] for index in range(len(stacks))]


def _orthogonalize_one_by_one(stack: Tensor, iteration: Iteration) -> Tensor:
    """Orthogonalize each matrix of a stack [..., rows, columns] in a product of its own size."""
    matrices = stack.flatten(0, -3).split(1)
    return torch.cat([orthogonalize(matrix, iteration) for matrix in matrices]).view_as(stack)


def orthogonalize(matrices: Tensor, iteration: Iteration) -> Tensor:
    """Return U V^T of matrices U S V^T, roughly, in bf16.

    Runs a Newton-Schulz iteration as torch's Muon does, but in float32 if the device is slow in
    bf16. With `QUINTIC`, singular values become 0.7 to 1.2; with `POLAR_EXPRESS` close to 1.

    Args:
        matrices: [number, rows, columns].
        iteration: Its margin and coefficients.
    """
    wide_matrices = matrices.bfloat16() if has_half_products(matrices.device) else matrices.float()
    is_tall = matrices.shape[1] > matrices.shape[2]
    if is_tall:
        wide_matrices = wide_matrices.mT
    # So that no singular value is above 1.
    norms = torch.linalg.vector_norm(wide_matrices, dim=(1, 2), keepdim=True)
    wide_matrices = wide_matrices / (norms * iteration.margin).clamp(min=1e-7)
    for a, b, c in iteration.coefficients:
        gram = wide_matrices @ wide_matrices.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide_matrices = torch.baddbmm(wide_matrices, factor, wide_matrices, beta=a)
    orthogonal = wide_matrices.bfloat16()
    return orthogonal.mT if is_tall else orthogonal


def make_muon(
    options: MatrixSettings, model: nn.Module, matrix_owners: MatrixOwners | None = None
) -> MuonAndAdamW:
    """Make Muon or NorMuon for the matrices inside a model.

    Each matrix of each expert is one by itself. AdamW trains the rest: embeddings, the output head,
    and the routers of a mixture, which score experts as the head scores tokens.

    Args:
        options: The rates, and the settings of both optimizers.
        model: The model, or this rank's stages and shards of it.
        matrix_owners: Owners of matrices; by default every rank updates all.

    Raises:
        ConfigError: The model has no such matrix.
    """
    groups = parameter_groups(options, model)
    fusion_by_matrix = find_layer_matrices(model)
    if not fusion_by_matrix:
        raise ConfigError(
            f"--optimizer {options.optimizer} found no matrix to train between the embedding and "
            "the output head of this model; use --optimizer adamw."
        )
    momentum = 0.95 if options.momentum is None else options.momentum
    return MuonAndAdamW(
        groups,
        fusion_by_matrix,
        momentum=momentum,
        row_beta=options.normuon_beta2 if options.optimizer == "normuon" else None,
        iteration=POLAR_EXPRESS if options.muon_coefficients == "polar_express" else QUINTIC,
        fusions=fusion_by_matrix,
        matrix_owners=matrix_owners,
        **adamw_settings(options),
    )


def find_layer_matrices(model: nn.Module) -> dict[nn.Parameter, Fusion]:
    """Return the trained weights of a model's layers that are matrices, and how they divide.

    These are the weights between embeddings and output head, and stacks of experts; but not the
    routers.
    """
    expert_fusions, router_params = find_expert_fusions(model), router_weights(model)
    # Hugging Face's Conv1D has weights [inputs, outputs].
    conv1d_weights = [module.weight for module in model.modules() if hasattr(module, "nf")]
    conv1d_fusions = {
        weight: Fusion(sizes={"": weight.shape[1]}, dim=1)
        for weight in conv1d_weights
        if isinstance(weight, nn.Parameter)
    }
    fusions = conv1d_fusions | find_fused_weights(model) | expert_fusions
    return {
        p: fusion_of(p, fusions)
        for p in inner_matrices(model)
        if p in expert_fusions or (p.ndim == 2 and p not in router_params)
    }
