"""SOAP: AdamW in the eigenbasis of Shampoo's factors, computed from gradients alone."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llm.extensions.matrix_optim.eigenbases import (
    compute_eigenbasis,
    rotate,
    rotate_back,
    take_power_iteration,
)
from llm.extensions.matrix_optim.fused import (
    Fusion,
    find_fused_weights,
    fusion_of,
    join_states,
    matrix_state,
)
from llm.extensions.matrix_optim.matrix_owners import (
    MatrixOptimizer,
    MatrixOwners,
    Unit,
    groups_of,
    stacked_state,
)
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings
from llm.optim.adamw_and_sgd import adamw_settings, adamw_state
from llm.optim.groups import embeddings_and_head, parameter_groups, split_groups

MAX_DIM = 10_000
"""Maximum width of a side with a basis."""
UPDATE_STEPS = 10
"""Steps between two updates of a basis, unless the options say otherwise."""


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al. 2024, arXiv:2409.11321) for matrices, AdamW for all other parameters.

    L and R are the moving averages of g g^T and g^T g for a matrix's gradients g [rows, columns],
    and QL and QR their eigenvectors. AdamW divides in the basis QL^T g QR. The first moment is kept
    in the space of the weights, the second one in the basis. Every `update_steps` steps, one step
    of orthogonal iteration updates the bases. As in the paper's code, a matrix's first gradient
    only initializes the factors, and gradients are rotated into a basis of the earlier gradients.

    Differences from the paper: decay comes before the step, as in torch, and the updates of the
    bases are spread over the interval, so that no step has all the work.

    The host waits for the device in steps 1, 2, 4, 8, ... only: there it reads whether a matrix has
    a basis, and decomposes the factors of one that has none.

    Args:
        groups: Parameter groups with their weight decay.
        sides_by_param: For each parameter with a basis, its sides with a basis: 0 for the rows, 1
            for the columns.
        lr: Learning rate.
        betas: Decay of first and second moments; the second value also applies to the factors.
        eps: Added to the root of the second moment.
        nesterov: Use a first moment one gradient ahead of the stored one, like NAdam (Dozat 2016).
        update_steps: Steps between two updates of a basis.
        fusions: How fused weights divide into matrices.
        offsets: The step in the interval that updates each matrix's bases; by default spread over
            the interval.
        matrix_owners: Owners of matrices; by default every rank computes all updates.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        sides_by_param: Mapping[nn.Parameter, Sequence[int]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        nesterov: bool = False,
        update_steps: int = UPDATE_STEPS,
        fusions: Mapping[nn.Parameter, Fusion] | None = None,
        offsets: Sequence[int] | None = None,
        matrix_owners: MatrixOwners | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults | {"nesterov": nesterov})
        self._update_steps = update_steps
        self._matrix_owners = matrix_owners or MatrixOwners()
        self.units = self._make_units(sides_by_param, fusions or {})
        self._matrix_owners.assign(self.units)
        unit_matrices = [(unit, name) for unit in self.units for name in unit.fusion.sizes]
        offsets = spread_offsets(len(unit_matrices), update_steps) if offsets is None else offsets
        self._offset_by_matrix = dict(zip(unit_matrices, offsets, strict=True))
        # Created here instead of in the first step, so that a checkpoint can be loaded.
        for unit in self.units:
            p, shapes = unit.weight, unit.fusion.shapes(unit.shapes[0])
            local_shapes = shapes.items() if self._matrix_owners.owns(unit) else ()
            self.state[p] = join_states(
                {
                    name: _make_matrix_state(p, shape, sides_by_param[p])
                    for name, shape in local_shapes
                }
            )
        self._make_state_adjacent(self._matrix_owners)
        self._add_adamw_state()

    def _make_units(
        self,
        sides_by_param: Mapping[nn.Parameter, Sequence[int]],
        fusions: Mapping[nn.Parameter, Fusion],
    ) -> list[Unit]:
        """Return a unit for each weight with a basis; its cost is the elements of its state."""
        group_index_by_param = {
            p: group_index
            for group_index, group in enumerate(self.param_groups)
            for p in group["params"]
        }
        units = []
        for p, rotated_sides in sides_by_param.items():
            fusion = fusion_of(p, fusions)
            squared_widths = [
                matrix_shape[side] ** 2
                for matrix_shape in fusion.shapes(p.shape).values()
                for side in rotated_sides
            ]
            unit = Unit(
                parameters=[p],
                shapes=[p.shape],
                fusion=fusion,
                cost=2 * p.numel() + 2 * sum(squared_widths),
                kind=(group_index_by_param[p], *rotated_sides),
            )
            units.append(unit)
        return units

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._step_adamw()
        if not self.units:
            return
        decay_factors = self._compute_decay_factors(self._compute_update_mask())
        step_units = partial(self._step_units, group_by_param=groups_of(self))
        for updates in self._matrix_owners.compute_updates(self.units, step_units):
            for unit, _ in updates:
                unit.weight.mul_(decay_factors[unit])
            if updates:
                weights: list[Tensor] = [unit.weight for unit, _ in updates]
                torch._foreach_sub_(weights, [update for _, (update,) in updates])

    def _compute_update_mask(self) -> Tensor:
        """Return 1.0 for each unit with a basis, 0.0 for the others or if the step is skipped.

        Only owners know whether a unit has a basis. All ranks need it: weights decay from the first
        basis on.
        """
        update_mask = self._matrix_owners.sum_over_shards(
            torch.stack([self._has_basis(unit) for unit in self.units])
        )
        if self.found_inf is not None:
            update_mask = update_mask * (1.0 - self.found_inf)
        return update_mask

    def _step_units(
        self,
        units: Sequence[Unit],
        gradients: list[Tensor],
        *,
        group_by_param: Mapping[Tensor, dict[str, Any]],
    ) -> list[Tensor]:
        """Update the state of equal units; return the steps to subtract, in a list of one stack.

        Args:
            units: Equal units.
            gradients: One stack of gradients [units, rows, columns].
            group_by_param: Parameter group of each parameter.
        """
        fusion, group = units[0].fusion, group_by_param[units[0].weight]
        gradients_by_name = fusion.split(gradients[0], fusion.dim + 1)
        updates = {}
        for name, matrix_gradients in gradients_by_name.items():
            states = [matrix_state(self.state[unit.weight], name) for unit in units]
            offsets = [self._offset_by_matrix[unit, name] for unit in units]
            updates[name] = self._step_matrices(states, matrix_gradients, group, offsets)
        return [fusion.join(updates, fusion.dim + 1)]

    def _compute_decay_factors(self, update_mask: Tensor) -> dict[Unit, Tensor]:
        """Return the weight-decay factor of each unit's weight.

        Args:
            update_mask: 1.0 for each unit that decays, else 0.0.
        """
        groups = groups_of(self)
        decays = [
            groups[unit.weight]["lr"] * groups[unit.weight]["weight_decay"] for unit in self.units
        ]
        # One product for all units with equal decay.
        factors_by_decay = {
            decay: (1 - decay * update_mask).unbind() for decay in dict.fromkeys(decays)
        }
        return {
            unit: factors_by_decay[decay][unit_index]
            for unit_index, (unit, decay) in enumerate(zip(self.units, decays, strict=True))
        }

    def _has_basis(self, unit: Unit) -> Tensor:
        """Return 1.0 if this rank owns a unit and its bases have begun, else 0.0."""
        if not self._matrix_owners.owns(unit):
            return torch.zeros((), device=unit.weight.device)
        return matrix_state(self.state[unit.weight], next(iter(unit.fusion.sizes)))["has_basis"]

    def _step_matrices(
        self,
        states: Sequence[dict[str, Tensor]],
        gradients: Tensor,
        group: dict[str, Any],
        offsets: Sequence[int],
    ) -> Tensor:
        """Update the state of equal matrices; return the steps to subtract.

        Args:
            states: State of each matrix, as `_make_matrix_state` returns it.
            gradients: [matrices, rows, columns].
            group: Parameter group of the matrices.
            offsets: The step in the interval that updates each matrix's bases.
        """
        gradients, update_mask = mask_skipped_gradient(gradients, self.found_inf)
        device_states = [
            {key: tensor for key, tensor in state.items() if key != "calls"} for state in states
        ]
        with stacked_state(device_states) as joint_state:
            update = _compute_adamw_step(
                joint_state, gradients, group, update_mask=update_mask * joint_state["has_basis"]
            )
            for side in _sides_with_basis(joint_state):
                side_gradients = gradients if side == 0 else gradients.mT
                joint_state[f"factor.{side}"].lerp_(
                    side_gradients @ side_gradients.mT, (1 - group["betas"][1]) * update_mask
                )
        self._update_due_bases(states, offsets, update_mask)
        return update

    def _update_due_bases(
        self, states: Sequence[dict[str, Tensor]], offsets: Sequence[int], update_mask: Tensor
    ) -> None:
        """Count a call for each matrix, and begin or update the bases that are due.

        Args:
            states: State of each matrix, as `_make_matrix_state` returns it.
            offsets: The step in the interval that updates each matrix's bases.
            update_mask: 1.0, or 0.0 to leave the bases unchanged.
        """
        due_states = []
        for state, offset in zip(states, offsets, strict=True):
            state["calls"] += 1
            num_calls = int(state["calls"])  # On the host, so that nothing waits for the device.
            # With fp16 the first steps may be skipped, so bases begin at call 1, 2, 4, 8, ...
            is_power_of_two = num_calls & (num_calls - 1) == 0
            if is_power_of_two and not bool(state["has_basis"]):
                _initialize_bases(state)
            elif (num_calls - 1 - offset) % self._update_steps == 0 and num_calls > 1:
                due_states.append(state)
        if due_states:
            _update_bases(due_states, update_mask)


def spread_offsets(num_matrices: int, update_steps: int) -> list[int]:
    """Return the step in an interval that updates the bases of each matrix."""
    return [matrix_index * update_steps // num_matrices for matrix_index in range(num_matrices)]


def _make_matrix_state(
    parameter: Tensor, shape: torch.Size, sides: Sequence[int]
) -> dict[str, Tensor]:
    """Return the state of a matrix in a parameter before the first step."""
    dtype, device = parameter.dtype, parameter.device
    state = adamw_state(torch.empty(shape, dtype=dtype, device=device))
    # `calls` stays on the host, `has_basis` is on the device.
    state |= {"calls": torch.zeros(()), "has_basis": torch.zeros((), device=device)}
    for side in sides:
        square = torch.zeros(shape[side], shape[side], dtype=dtype, device=device)
        state |= {f"factor.{side}": square, f"basis.{side}": square.clone()}
    return state


def _sides_with_basis(state: Mapping[str, Tensor]) -> list[int]:
    """Return the sides of a matrix that have a basis, from its state."""
    return [side for side in (0, 1) if f"basis.{side}" in state]


def _compute_adamw_step(
    state: dict[str, Tensor], gradients: Tensor, group: dict[str, Any], *, update_mask: Tensor
) -> Tensor:
    """Return AdamW's step in the basis, multiplied by `update_mask`.

    Args:
        state: Stacked state of several matrices.
        gradients: [matrices, rows, columns].
        group: Parameter group of the matrices.
        update_mask: 1.0 for each matrix that is updated, else 0.0, [matrices].
    """
    beta1, beta2 = group["betas"]
    bases = (state.get(f"basis.{side}") for side in (0, 1))
    row_bases, column_bases = (None if basis is None else [basis] for basis in bases)
    first_moment, second_moment, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    step += update_mask
    update_mask = update_mask.view(-1, 1, 1)
    first_moment.lerp_(gradients, (1 - beta1) * update_mask)
    second_moment.lerp_(
        rotate(gradients, row_bases, column_bases).square(), (1 - beta2) * update_mask
    )
    momentum = first_moment.lerp(gradients, 1 - beta1) if group["nesterov"] else first_moment
    direction = rotate(momentum, row_bases, column_bases) / (second_moment.sqrt() + group["eps"])
    direction = rotate_back(direction, row_bases, column_bases)
    correction = bias_correction(beta2, step).sqrt()
    correction = correction / bias_correction(beta1, step + group["nesterov"])
    step_length: Tensor = group["lr"] * correction.view(-1, 1, 1) * update_mask
    return direction * step_length


def _initialize_bases(state: Mapping[str, Tensor]) -> None:
    """Decompose the factors of a matrix; `has_basis` stays 0.0 if they are still zero."""
    for side in _sides_with_basis(state):
        factor = state[f"factor.{side}"]
        state[f"basis.{side}"].copy_(compute_eigenbasis(factor).basis)
        state["has_basis"].copy_(factor.trace() > 0)


def _update_bases(states: Sequence[dict[str, Tensor]], update_mask: Tensor) -> None:
    """Update the bases of equal matrices from the factors.

    The second moments are sorted like the columns of the bases.

    Args:
        states: State of each matrix, as `_make_matrix_state` returns it.
        update_mask: 1.0, or 0.0 to leave the bases unchanged.
    """
    for side in _sides_with_basis(states[0]):
        keys = "exp_avg_sq", "has_basis", f"factor.{side}", f"basis.{side}"
        with stacked_state([{key: state[key] for key in keys} for state in states]) as joint_state:
            second_moment, has_basis, factor, basis = (joint_state[key] for key in keys)
            is_updated = (update_mask * has_basis > 0).view(-1, 1, 1)
            solution = take_power_iteration(factor, basis)
            assert solution.order is not None
            order = solution.order.unsqueeze(2 - side)
            sorted_second_moment = torch.take_along_dim(second_moment, order, side + 1)
            second_moment.copy_(torch.where(is_updated, sorted_second_moment, second_moment))
            basis.copy_(torch.where(is_updated, solution.basis, basis))


def make_soap(
    options: MatrixSettings,
    model: nn.Module,
    *,
    matrix_owners: MatrixOwners | None = None,
    basis_weights: Sequence[str] | None = None,
    excluded_params: Collection[nn.Parameter] = (),
) -> SOAP:
    """Make SOAP for a model's matrices.

    Args:
        options: The rate, the betas and the interval between updates.
        model: The model, or this rank's stages.
        matrix_owners: Owners of matrices; by default every rank updates all.
        basis_weights: Result of `list_basis_weights` for the whole model; None if `model` is whole.
        excluded_params: Parameters that another optimizer trains.
    """
    if basis_weights is None:
        basis_weights = list_basis_weights(model)
    update_steps = options.soap_update_steps or UPDATE_STEPS
    offsets = spread_offsets(len(basis_weights), update_steps)
    rotated_weights = [
        rotated for rotated in _find_rotated_weights(model) if rotated.weight not in excluded_params
    ]
    local_names = {rotated.name for rotated in rotated_weights}
    local_offsets = [
        offset for name, offset in zip(basis_weights, offsets, strict=True) if name in local_names
    ]
    groups = split_groups(
        parameter_groups(options, model),
        set(excluded_params),
        chosen_settings=None,
        other_settings={},
    )
    return SOAP(
        groups,
        {rotated.weight: rotated.sides for rotated in rotated_weights},
        update_steps=update_steps,
        fusions=find_fused_weights(model),
        offsets=local_offsets,
        matrix_owners=matrix_owners,
        nesterov=options.nesterov,
        **adamw_settings(options),
    )


def list_basis_weights(model: nn.Module) -> list[str]:
    """Return the weight's name for each matrix with a basis, in the model's order."""
    fusions = find_fused_weights(model)
    return [
        name
        for name, weight, _ in _find_rotated_weights(model)
        for _ in fusion_of(weight, fusions).sizes
    ]


class _RotatedWeight(NamedTuple):
    """A weight with a basis.

    Attributes:
        name: Name in the model.
        weight: The parameter.
        sides: The sides with a basis: 0 for the rows, 1 for the columns.
    """

    name: str
    weight: nn.Parameter
    sides: list[int]


def _find_rotated_weights(model: nn.Module) -> Iterator[_RotatedWeight]:
    """Yield the weights of a model that have a basis.

    Sides wider than `MAX_DIM` have no basis. Embeddings and output heads never have one on the side
    of tokens or positions.
    """
    fusions, token_weights = find_fused_weights(model), embeddings_and_head(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.ndim == 2:
            shapes = fusion_of(parameter, fusions).shapes(parameter.shape).values()
            narrow_sides = [
                side for side in (0, 1) if max(shape[side] for shape in shapes) <= MAX_DIM
            ]
            sides = [side for side in narrow_sides if side == 1 or parameter not in token_weights]
            if sides:
                yield _RotatedWeight(name, parameter, sides)


def mask_skipped_gradient(gradient: Tensor, found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient and 1.0, or zeros and 0.0 if the step is skipped."""
    update_mask = torch.ones((), dtype=torch.float32, device=gradient.device)
    if found_inf is not None:
        update_mask = update_mask - found_inf
        # Not multiplied by 0, because infinity times 0 is NaN.
        gradient = torch.where(update_mask > 0, gradient, torch.zeros_like(gradient))
    return gradient, update_mask


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step; for step 0, the value of step 1."""
    # Accurate in fp32, also for a beta close to 1 in the first steps.
    return -torch.expm1(step.clamp(min=1) * math.log(max(beta, 1e-30)))
