"""SOAP: AdamW in the eigenbasis of Shampoo's factors, which are made of gradients alone."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llm.optim.adamw import adamw_settings, adamw_state, adamw_step, bias_correction
from llm.optim.eigenbases import eigenbasis, power_iteration, rotate, rotate_back
from llm.optim.fused import Fusion, fused_weights
from llm.optim.groups import embeddings_and_head, matrix_groups, split_groups
from llm.optim.options import OptimizerOptions
from llm.optim.whole import Unit, WholeMatrices, groups_of

MAX_DIM = 10_000
"""Width of the widest side that has a basis."""
UPDATE_STEPS = 10
"""Steps between two updates of a basis, unless the options say otherwise."""


class SOAP(torch.optim.Optimizer):
    """SOAP (Vyas et al. 2024, arXiv:2409.11321) for matrices, AdamW for all other parameters.

    With L and R the moving averages of g g^T and g^T g of a matrix's gradients g [rows, columns],
    and QL and QR their eigenvectors, AdamW divides in the basis QL^T g QR. The first moment is kept
    in the space of the weights, the second one in the basis. Every `update_steps` steps, one
    iteration of orthogonal iteration lets the bases follow the factors. As in the paper's code, a
    matrix's first gradient only initializes the factors, and a gradient is rotated into a basis of
    the gradients before it.

    Differences: decay comes before the step, as in torch, and the updates of the matrices' bases
    are spread over the interval, so that no step has all the work.

    Like torch's fused optimizers it reads an attribute `found_inf` on the device, if there is
    one: where it is 1, weights, moments, factors and bases stay as they are. Only the
    decompositions, which are in the first steps, wait for the device.

    Args:
        groups: Parameter groups with their weight decay.
        sides: For each parameter with a basis, which of its two sides have one: 0 for the rows, 1
            for the columns.
        lr: Learning rate.
        betas: Decay of first and second moments; the second one also that of factors.
        eps: Added to the root of the second moment.
        nesterov: Take the first moment of a step one gradient further than the one that is kept, as
            NAdam does (Dozat 2016).
        update_steps: Steps between two updates of a basis.
        fusions: How fused weights divide into matrices.
        numbers: The number of each matrix among those of the whole model, which spreads the
            updates of bases; by default the model has no others.
        total: Matrices of the whole model.
        whole: Who computes which update; by default every rank all of them.

    Attributes:
        units: The parameters with a basis.
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
        numbers: Sequence[int] = (),
        total: int = 0,
        whole: WholeMatrices | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults | {"nesterov": nesterov})
        self._update_steps = update_steps
        self._whole = whole or WholeMatrices()
        self._matrices: dict[Unit, list[_Matrix]] = {}
        for p, its in sides.items():
            fusion = (fusions or {}).get(p)
            matrices = [_Matrix(name, shape, its) for name, shape in _shapes(p, fusion).items()]
            cost = sum(matrix.num_elements() for matrix in matrices)
            unit = Unit(parameters=[p], shapes=[p.shape], cost=cost, fusion=fusion)
            self._matrices[unit] = matrices
        every = [matrix for matrices in self._matrices.values() for matrix in matrices]
        numbers, total = numbers or range(len(every)), total or len(every)
        # The step in the interval at which a matrix's bases are updated.
        steps = (number * update_steps // total for number in numbers)
        self._offset = dict(zip(every, steps, strict=True))
        self.units = list(self._matrices)
        self._whole.assign(self.units)
        # Created here and not in the first step, so that a checkpoint can be loaded before it.
        for unit, matrices in self._matrices.items():
            kept = matrices if self._whole.owns(unit) else []
            states = [matrix.new_state(unit.weight) for matrix in kept]
            self.state[unit.weight] = {key: t for state in states for key, t in state.items()}
        self.state.update({p: adamw_state(p) for p in groups_of(self) if p not in self.state})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        groups, matrices = groups_of(self), {unit.weight for unit in self.units}
        for group in self.param_groups:
            others = [p for p in group["params"] if p not in matrices]
            adamw_step(group, others, self.state, found_inf)
        if not self.units:
            return
        # Known to the owners alone, and all ranks need it: weights decay from the first basis on.
        started = self._whole.sum(torch.stack([self._has_basis(unit) for unit in self.units]))
        keep = started if found_inf is None else started * (1.0 - found_inf)
        keep_of = dict(zip(self.units, keep, strict=True))

        def compute(unit: Unit, gradients: list[Tensor]) -> list[Tensor]:
            return [self._update(unit, gradients[0], groups[unit.weight], found_inf)]

        for unit, (update,) in self._whole.updates(self.units, compute):
            p, group = unit.weight, groups[unit.weight]
            p.mul_(1 - group["lr"] * group["weight_decay"] * keep_of[unit])
            p.sub_(update)

    def _has_basis(self, unit: Unit) -> Tensor:
        """Return 1.0 if this rank owns a unit and its bases have begun, else 0.0."""
        if not self._whole.owns(unit):
            return torch.zeros((), device=unit.weight.device)
        return self._matrices[unit][0].state_in(self.state[unit.weight])["has_basis"]

    def _update(
        self, unit: Unit, gradient: Tensor, group: dict[str, Any], found_inf: Tensor | None
    ) -> Tensor:
        parts = [gradient] if unit.fusion is None else unit.fusion.split(gradient)
        updates = [
            self._step_matrix(matrix, self.state[unit.weight], part, group, found_inf)
            for matrix, part in zip(self._matrices[unit], parts, strict=True)
        ]
        return updates[0] if unit.fusion is None else unit.fusion.join(updates)

    def _step_matrix(
        self,
        matrix: "_Matrix",
        states: Mapping[str, Tensor],
        gradient: Tensor,
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> Tensor:
        """Update a matrix's state; return what is subtracted from it."""
        state, beta2 = matrix.state_in(states), group["betas"][1]
        keep = torch.ones_like(state["step"])
        if found_inf is not None:
            keep = keep - found_inf
            # Not multiplied by 0, since infinity times 0 is NaN.
            gradient = torch.where(keep > 0, gradient, torch.zeros_like(gradient))
        update = _descend(matrix, state, gradient, group, keep=keep * state["has_basis"])
        for side in matrix.sides:
            square = gradient @ gradient.T if side == 0 else gradient.T @ gradient
            state[f"factor.{side}"].lerp_(square, (1 - beta2) * keep)
        state["calls"] += 1
        calls = int(state["calls"])  # On the host, so that nothing waits for the device.
        # With fp16 the first steps may be skipped, so steps 1, 2, 4, 8, ... try until one succeeds.
        if calls & (calls - 1) == 0 and not bool(state["has_basis"]):
            for side in matrix.sides:
                factor = state[f"factor.{side}"]
                state[f"basis.{side}"].copy_(eigenbasis(factor).basis)
                state["has_basis"].copy_(factor.trace() > 0)
        elif (calls - 1 - self._offset[matrix]) % self._update_steps == 0 and calls > 1:
            _update_bases(matrix, state, keep * state["has_basis"] > 0)
        return update


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A matrix with bases: a parameter, or one of several in a fused one.

    Attributes:
        name: Its name in a fused parameter; empty for a whole one.
        shape: Rows and columns.
        sides: Those with a basis.
    """

    name: str
    shape: torch.Size
    sides: Sequence[int]

    @property
    def prefix(self) -> str:
        """Return what the keys of its state begin with."""
        return f"{self.name}." if self.name else ""

    def num_elements(self) -> int:
        """Return the number of elements of its state."""
        return 2 * self.shape.numel() + sum(2 * self.shape[side] ** 2 for side in self.sides)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return its state before the first step, by key in that of the parameter."""
        dtype, device = parameter.dtype, parameter.device
        state = adamw_state(torch.empty(self.shape, dtype=dtype, device=device))
        # `calls` stays on the host, `has_basis` is on the device.
        state |= {"calls": torch.zeros(()), "has_basis": torch.zeros((), device=device)}
        for side in self.sides:
            square = torch.zeros(self.shape[side], self.shape[side], dtype=dtype, device=device)
            state |= {f"factor.{side}": square, f"basis.{side}": square.clone()}
        return {self.prefix + key: tensor for key, tensor in state.items()}

    def state_in(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return its state, by key without the prefix, out of that of the parameter."""
        own = {key: tensor for key, tensor in states.items() if key.startswith(self.prefix)}
        return {key.removeprefix(self.prefix): tensor for key, tensor in own.items()}


def _descend(
    matrix: _Matrix,
    state: dict[str, Tensor],
    gradient: Tensor,
    group: dict[str, Any],
    *,
    keep: Tensor,
) -> Tensor:
    """Return AdamW's step in the basis where `keep` is 1, and zeros where it is 0."""
    beta1, beta2 = group["betas"]
    left, right = ([state[f"basis.{side}"]] if side in matrix.sides else None for side in (0, 1))
    first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    step += keep
    first.lerp_(gradient, (1 - beta1) * keep)
    second.lerp_(rotate(gradient, left, right).square(), (1 - beta2) * keep)
    ahead = first.lerp(gradient, 1 - beta1) if group["nesterov"] else first
    direction = rotate(ahead, left, right) / (second.sqrt() + group["eps"])
    direction = rotate_back(direction, left, right)
    corrected = bias_correction(beta2, step).sqrt()
    corrected = corrected / bias_correction(beta1, step + group["nesterov"])
    length: Tensor = group["lr"] * corrected * keep
    return direction * length


def _update_bases(matrix: _Matrix, state: dict[str, Tensor], keep: Tensor) -> None:
    """Let the bases follow the factors, and sort the second moment as their columns."""
    for side in matrix.sides:
        basis, second = state[f"basis.{side}"], state["exp_avg_sq"]
        solution = power_iteration(state[f"factor.{side}"], basis)
        assert solution.order is not None
        sorted_second = second.index_select(side, solution.order)
        second.copy_(torch.where(keep, sorted_second, second))
        basis.copy_(torch.where(keep, solution.basis, basis))


def make_soap(
    options: OptimizerOptions,
    model: nn.Module,
    *,
    whole: WholeMatrices | None = None,
    order: Sequence[str] | None = None,
    without: Collection[nn.Parameter] = (),
) -> SOAP:
    """Make SOAP for a model's matrices.

    Args:
        options: The rate, the betas and the interval between updates.
        model: The model, or the stages of it that this rank has.
        whole: Who updates which matrix; by default every rank updates all.
        order: What `basis_order` returns for the whole model; by default `model` is whole.
        without: Parameters that another optimizer trains.
    """
    order = basis_order(options, model) if order is None else order
    found = [each for each in _with_bases(options, model) if each[1] not in without]
    own = {name for name, *_ in found}
    groups = split_groups(matrix_groups(options, model), set(without), {}, {})
    return SOAP(
        [group for group in groups if group["params"][0] not in without],
        {p: sides for _, p, sides in found},
        update_steps=options.soap_update_steps or UPDATE_STEPS,
        fusions=fused_weights(options, model),
        numbers=[number for number, name in enumerate(order) if name in own],
        total=len(order),
        whole=whole,
        nesterov=options.nesterov,
        **adamw_settings(options),
    )


def basis_order(options: OptimizerOptions, model: nn.Module) -> list[str]:
    """Return the name of the parameter of each matrix with a basis, in the model's order."""
    fusions = fused_weights(options, model)
    found = _with_bases(options, model)
    return [name for name, p, _ in found for _ in _shapes(p, fusions.get(p))]


def _with_bases(
    options: OptimizerOptions, model: nn.Module
) -> Iterator[tuple[str, nn.Parameter, list[int]]]:
    """Yield name, parameter and sides of all that has a basis.

    A side wider than `MAX_DIM` has no basis, and neither has the side of the tokens or positions
    of an embedding or an output head of any size.
    """
    fusions, outside = fused_weights(options, model), embeddings_and_head(model)
    for name, p in model.named_parameters():
        if p.requires_grad and p.ndim == 2:
            shapes = _shapes(p, fusions.get(p)).values()
            narrow = [side for side in (0, 1) if max(s[side] for s in shapes) <= MAX_DIM]
            sides = [side for side in narrow if side == 1 or p not in outside]
            if sides:
                yield name, p, sides


def _shapes(parameter: Tensor, fusion: Fusion | None) -> dict[str, torch.Size]:
    """Return the shapes of the matrices in a parameter by name; a single one has none."""
    return {"": parameter.shape} if fusion is None else fusion.shapes(parameter.shape)
