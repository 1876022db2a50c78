"""SOAP: AdamW in the eigenbasis of Shampoo's factors, computed from gradients alone."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm.extensions.matrix_optim.eigenbases import eigenbasis, power_iteration, rotate, rotate_back
from llm.extensions.matrix_optim.fused import (
    Fusion,
    fused_weights,
    fusion_of,
    joint_state,
    matrix_state,
)
from llm.extensions.matrix_optim.matrix_owners import (
    MatrixOptimizer,
    MatrixOwners,
    Unit,
    batches,
    groups_of,
    stacked_state,
)
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings
from llm.optim.groups import embeddings_and_head, parameter_groups, split_groups
from llm.optim.optimizers import adamw_settings, adamw_state

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
        sides: For each parameter with a basis, its sides with a basis: 0 for the rows, 1 for the
            columns.
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
        sides: Mapping[nn.Parameter, Sequence[int]],
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
        self.units = []
        groups_and_numbers = enumerate(self.param_groups)
        number_of = {p: number for number, group in groups_and_numbers for p in group["params"]}
        for p, rotated_sides in sides.items():
            fusion = fusion_of(p, fusions or {})
            squares = [
                s[side] ** 2 for s in fusion.shapes(p.shape).values() for side in rotated_sides
            ]
            cost = 2 * p.numel() + 2 * sum(squares)
            self.units.append(
                Unit(
                    parameters=[p],
                    shapes=[p.shape],
                    fusion=fusion,
                    cost=cost,
                    kind=(number_of[p], *rotated_sides),
                )
            )
        self._matrix_owners.assign(self.units)
        names = [(unit, name) for unit in self.units for name in unit.fusion.sizes]
        offsets = spread_offsets(len(names), update_steps) if offsets is None else offsets
        self._offset_of = dict(zip(names, offsets, strict=True))
        # Created here instead of in the first step, so that a checkpoint can be loaded.
        for unit in self.units:
            p, shapes = unit.weight, unit.fusion.shapes(unit.shapes[0])
            local_shapes = shapes.items() if self._matrix_owners.owns(unit) else ()
            self.state[p] = joint_state(
                {k: _new_state(p, shape, sides[p]) for k, shape in local_shapes}
            )
        self._lay_state_together(batches([u for u in self.units if self._matrix_owners.owns(u)]))
        self._add_adamw_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported.
        """
        self._step_adamw()
        if not self.units:
            return
        # Only owners know this, and all ranks need it: weights decay from the first basis on.
        keep = self._matrix_owners.sum_over_shards(
            torch.stack([self._has_basis(unit) for unit in self.units])
        )
        if self.found_inf is not None:
            keep = keep * (1.0 - self.found_inf)
        groups = groups_of(self)

        def compute(units: Sequence[Unit], gradients: list[Tensor]) -> list[Tensor]:
            fusion = units[0].fusion
            updates = {
                name: self._step_matrices(
                    [matrix_state(self.state[unit.weight], name) for unit in units],
                    part,
                    groups[units[0].weight],
                    [self._offset_of[unit, name] for unit in units],
                )
                for name, part in fusion.split(gradients[0], fusion.dim + 1).items()
            }
            return [fusion.join(updates, fusion.dim + 1)]

        decay_factors = self._decay_factors(keep)
        for updates in self._matrix_owners.updates(self.units, compute):
            for unit, _ in updates:
                unit.weight.mul_(decay_factors[unit])
            if updates:
                weights: list[Tensor] = [unit.weight for unit, _ in updates]
                torch._foreach_sub_(weights, [update for _, (update,) in updates])

    def _decay_factors(self, keep: Tensor) -> dict[Unit, Tensor]:
        """Return the weight-decay factor of each unit's weight.

        Args:
            keep: 1.0 for each unit that decays, else 0.0.
        """
        groups = groups_of(self)
        decays = [groups[u.weight]["lr"] * groups[u.weight]["weight_decay"] for u in self.units]
        # One product for all units with equal decay.
        factors = {decay: (1 - decay * keep).unbind() for decay in dict.fromkeys(decays)}
        return {
            unit: factors[d][i] for i, (unit, d) in enumerate(zip(self.units, decays, strict=True))
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
            states: Of each, as `_new_state` returns it.
            gradients: [matrices, rows, columns].
            group: Their parameter group.
            offsets: The step in the interval that updates each matrix's bases.
        """
        gradients, keep = kept_gradient(gradients, self.found_inf)
        on_device = [{k: v for k, v in state.items() if k != "calls"} for state in states]
        with stacked_state(on_device) as joint:
            update = _adamw_direction(joint, gradients, group, keep=keep * joint["has_basis"])
            for side in _sides_with_basis(joint):
                g = gradients if side == 0 else gradients.mT
                joint[f"factor.{side}"].lerp_(g @ g.mT, (1 - group["betas"][1]) * keep)
        due = []
        for state, offset in zip(states, offsets, strict=True):
            state["calls"] += 1
            calls = int(state["calls"])  # On the host, so that nothing waits for the device.
            # With fp16 the first steps may be skipped, so there are several tries.
            if calls & (calls - 1) == 0 and not bool(state["has_basis"]):
                for side in _sides_with_basis(state):
                    factor = state[f"factor.{side}"]
                    state[f"basis.{side}"].copy_(eigenbasis(factor).basis)
                    state["has_basis"].copy_(factor.trace() > 0)
            elif (calls - 1 - offset) % self._update_steps == 0 and calls > 1:
                due.append(state)
        if due:
            _update_bases(due, keep)
        return update


def spread_offsets(total: int, update_steps: int) -> list[int]:
    """Assign each matrix the step in an interval that updates its bases."""
    return [number * update_steps // total for number in range(total)]


def _new_state(parameter: Tensor, shape: torch.Size, sides: Sequence[int]) -> dict[str, Tensor]:
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


def _adamw_direction(
    state: dict[str, Tensor], gradients: Tensor, group: dict[str, Any], *, keep: Tensor
) -> Tensor:
    """Return AdamW's step in the basis, multiplied by `keep`.

    Args:
        state: Stacked state of several matrices.
        gradients: [matrices, rows, columns].
        group: Their parameter group.
        keep: [matrices].
    """
    beta1, beta2 = group["betas"]
    bases = (state.get(f"basis.{side}") for side in (0, 1))
    row_bases, column_bases = (None if basis is None else [basis] for basis in bases)
    first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    step += keep
    keep = keep.view(-1, 1, 1)
    first.lerp_(gradients, (1 - beta1) * keep)
    second.lerp_(rotate(gradients, row_bases, column_bases).square(), (1 - beta2) * keep)
    ahead = first.lerp(gradients, 1 - beta1) if group["nesterov"] else first
    direction = rotate(ahead, row_bases, column_bases) / (second.sqrt() + group["eps"])
    direction = rotate_back(direction, row_bases, column_bases)
    corrected = bias_correction(beta2, step).sqrt()
    corrected = corrected / bias_correction(beta1, step + group["nesterov"])
    length: Tensor = group["lr"] * corrected.view(-1, 1, 1) * keep
    return direction * length


def _update_bases(states: Sequence[dict[str, Tensor]], keep: Tensor) -> None:
    """Update the bases of equal matrices from the factors.

    The second moments are sorted like the columns of the bases.
    """
    for side in _sides_with_basis(states[0]):
        keys = "exp_avg_sq", "has_basis", f"factor.{side}", f"basis.{side}"
        with stacked_state([{key: state[key] for key in keys} for state in states]) as joint:
            second, has_basis, factor, basis = (joint[key] for key in keys)
            updates_basis = (keep * has_basis > 0).view(-1, 1, 1)
            solution = power_iteration(factor, basis)
            assert solution.order is not None
            order = solution.order.unsqueeze(2 - side)
            in_order = torch.take_along_dim(second, order, side + 1)
            second.copy_(torch.where(updates_basis, in_order, second))
            basis.copy_(torch.where(updates_basis, solution.basis, basis))


def make_soap(
    options: MatrixSettings,
    model: nn.Module,
    *,
    matrix_owners: MatrixOwners | None = None,
    order: Sequence[str] | None = None,
    without: Collection[nn.Parameter] = (),
) -> SOAP:
    """Make SOAP for a model's matrices.

    Args:
        options: The rate, the betas and the interval between updates.
        model: The model, or this rank's stages.
        matrix_owners: Owners of matrices; by default every rank updates all.
        order: Result of `basis_order` for the whole model; by default `model` is whole.
        without: Parameters that another optimizer trains.
    """
    order = basis_order(options, model) if order is None else order
    update_steps = options.soap_update_steps or UPDATE_STEPS
    offsets = zip(order, spread_offsets(len(order), update_steps), strict=True)
    matrices = [matrix for matrix in _with_bases(options, model) if matrix[1] not in without]
    names = {name for name, *_ in matrices}
    return SOAP(
        split_groups(parameter_groups(options, model), set(without), None, {}),
        {p: sides for _, p, sides in matrices},
        update_steps=update_steps,
        fusions=fused_weights(model),
        offsets=[offset for name, offset in offsets if name in names],
        matrix_owners=matrix_owners,
        nesterov=options.nesterov,
        **adamw_settings(options),
    )


def basis_order(options: MatrixSettings, model: nn.Module) -> list[str]:
    """Return the parameter names of matrices with a basis, in the model's order."""
    fusions = fused_weights(model)
    matrices = _with_bases(options, model)
    return [name for name, p, _ in matrices for _ in fusion_of(p, fusions).sizes]


def _with_bases(
    options: MatrixSettings, model: nn.Module
) -> Iterator[tuple[str, nn.Parameter, list[int]]]:
    """Yield name, parameter and sides of all parameters with a basis.

    Sides wider than `MAX_DIM` have no basis. Embeddings and output heads never have one on the side
    of tokens or positions.
    """
    fusions, outside = fused_weights(model), embeddings_and_head(model)
    for name, p in model.named_parameters():
        if p.requires_grad and p.ndim == 2:
            shapes = fusion_of(p, fusions).shapes(p.shape).values()
            narrow = [side for side in (0, 1) if max(s[side] for s in shapes) <= MAX_DIM]
            sides = [side for side in narrow if side == 1 or p not in outside]
            if sides:
                yield name, p, sides


def kept_gradient(gradient: Tensor, found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient and 1.0, or zeros and 0.0 if the step is skipped."""
    keep = torch.ones((), dtype=torch.float32, device=gradient.device)
    if found_inf is not None:
        keep = keep - found_inf
        # Not multiplied by 0, because infinity times 0 is NaN.
        gradient = torch.where(keep > 0, gradient, torch.zeros_like(gradient))
    return gradient, keep


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step; for step 0, the value of step 1."""
    # Accurate in fp32, also for a beta close to 1 in the first steps.
    return -torch.expm1(step.clamp(min=1) * math.log(max(beta, 1e-30)))
