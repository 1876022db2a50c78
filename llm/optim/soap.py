"""SOAP: AdamW in the eigenbasis of Shampoo's factors, which are made of gradients alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm.optim.adamw import adamw_settings, adamw_state, adamw_step
from llm.optim.eigenbases import eigenbasis, power_iteration, rotate, rotate_back
from llm.optim.groups import embeddings_and_head, parameter_groups
from llm.optim.options import OptimizerOptions

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
    are spread over the interval, so that no step has all the work. Every rank computes everything.

    Like torch's fused optimizers it reads an attribute `found_inf` on the device, if there is
    one: where it is 1, weights, moments, factors and bases stay as they are. Only the
    decompositions, which are in the first steps, wait for the device.

    Args:
        groups: Parameter groups with their weight decay.
        sides: For each parameter that is a matrix, which of its two sides have a basis: 0 for the
            rows, 1 for the columns.
        lr: Learning rate.
        betas: Decay of first and second moments; the second one also that of factors.
        eps: Added to the root of the second moment.
        update_steps: Steps between two updates of a basis.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        sides: Mapping[nn.Parameter, Sequence[int]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        update_steps: int = UPDATE_STEPS,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._update_steps = update_steps
        self._sides = {p: tuple(its) for p, its in sides.items() if its}
        # The step in the interval at which a matrix's bases are updated.
        number = len(self._sides)
        self._offset = {p: i * update_steps // number for i, p in enumerate(self._sides)}
        # Created here and not in the first step, so that a checkpoint can be loaded before it.
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = adamw_state(p) | _factors(p, self._sides.get(p, ()))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            others = [p for p in group["params"] if p not in self._sides]
            adamw_step(group, others, self.state, found_inf)
            for p in group["params"]:
                if p in self._sides and p.grad is not None:
                    self._step_matrix(p, group, found_inf)

    def _step_matrix(
        self, p: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        assert p.grad is not None
        state, beta2 = self.state[p], group["betas"][1]
        keep = torch.ones_like(state["step"])
        gradient = p.grad
        if found_inf is not None:
            keep = keep - found_inf
            # Not multiplied by 0, since infinity times 0 is NaN.
            gradient = torch.where(keep > 0, gradient, torch.zeros_like(gradient))
        self._descend(p, gradient, group, keep=keep * state["has_basis"])
        for side in self._sides[p]:
            square = gradient @ gradient.T if side == 0 else gradient.T @ gradient
            state[f"factor.{side}"].lerp_(square, (1 - beta2) * keep)
        state["calls"] += 1
        calls = int(state["calls"])  # On the host, so that nothing waits for the device.
        # With fp16 the first steps may be skipped, so steps 1, 2, 4, 8, ... try until one succeeds.
        if calls & (calls - 1) == 0 and not bool(state["has_basis"]):
            for side in self._sides[p]:
                factor = state[f"factor.{side}"]
                state[f"basis.{side}"].copy_(eigenbasis(factor).basis)
                state["has_basis"].copy_(factor.trace() > 0)
        elif (calls - 1 - self._offset[p]) % self._update_steps == 0 and calls > 1:
            self._update_bases(p, keep * state["has_basis"] > 0)

    def _descend(
        self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any], *, keep: Tensor
    ) -> None:
        """Take AdamW's step in the basis where `keep` is 1, and none where it is 0."""
        state, lr = self.state[p], group["lr"]
        beta1, beta2 = group["betas"]
        left, right = (
            [state[f"basis.{side}"]] if side in self._sides[p] else None for side in (0, 1)
        )
        first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        step += keep
        first.lerp_(gradient, (1 - beta1) * keep)
        second.lerp_(rotate(gradient, left, right).square(), (1 - beta2) * keep)
        direction = rotate(first, left, right) / (second.sqrt() + group["eps"])
        direction = rotate_back(direction, left, right)
        corrected = _bias(beta2, step).sqrt() / _bias(beta1, step)
        p.mul_(1 - lr * group["weight_decay"] * keep)
        p.sub_(direction * (lr * corrected * keep))

    def _update_bases(self, p: nn.Parameter, keep: Tensor) -> None:
        """Let the bases follow the factors, and sort the second moment as their columns."""
        state = self.state[p]
        for side in self._sides[p]:
            basis, second = state[f"basis.{side}"], state["exp_avg_sq"]
            solution = power_iteration(state[f"factor.{side}"], basis)
            sorted_second = second.index_select(side, solution.order)
            second.copy_(torch.where(keep, sorted_second, second))
            basis.copy_(torch.where(keep, solution.basis, basis))


def _factors(p: Tensor, sides: Sequence[int]) -> dict[str, Tensor]:
    """Return new factors and bases of a matrix; nothing for a parameter without sides."""
    if not sides:
        return {}
    zero = torch.zeros((), dtype=torch.float32)
    # `calls` stays on the host, `has_basis` is on the device.
    state = {"calls": zero, "has_basis": zero.to(p.device, copy=True)}
    for side in sides:
        square = torch.zeros(p.shape[side], p.shape[side], dtype=p.dtype, device=p.device)
        state |= {f"factor.{side}": square, f"basis.{side}": square.clone()}
    return state


def _bias(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step, that of step 1 for step 0."""
    # Accurate in fp32, also for a beta close to 1 in the first steps.
    return -torch.expm1(step.clamp(min=1) * math.log(max(beta, 1e-30)))


def make_soap(options: OptimizerOptions, model: nn.Module) -> SOAP:
    """Make SOAP for a model's matrices.

    A side wider than `MAX_DIM` has no basis, and neither has the side of the tokens or positions
    of an embedding or an output head of any size.
    """
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    outside = embeddings_and_head(model)
    sides = {
        p: [
            side for side in (0, 1) if p.shape[side] <= MAX_DIM and not (side == 0 and p in outside)
        ]
        for group in groups
        for p in group["params"]
        if p.ndim == 2
    }
    update_steps = options.soap_update_steps or UPDATE_STEPS
    return SOAP(groups, sides, update_steps=update_steps, **adamw_settings(options))
