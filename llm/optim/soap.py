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
"""The widest side that has a basis."""
UPDATE_STEPS = 10


class SOAP(torch.optim.Optimizer):
    """SOAP (Vyas et al. 2024, arXiv:2409.11321) for matrices, AdamW for all other parameters.

    With L and R the moving averages of g g^T and g^T g of a matrix's gradients g, and QL and QR
    their eigenvectors, AdamW divides in the basis QL^T g QR. The first moment is kept in the
    space of the weights, the second one in the basis. Every so many steps an iteration of QR lets
    the bases follow the factors. As in the paper's code, a matrix's first gradient only begins
    the factors, and a basis has seen the gradients before the one that it turns.

    Differences: decay comes before the step, as in torch, and matrices take turns, so that no
    step has all the work of a new basis. Every rank computes everything.

    Like torch's fused optimizers it reads an attribute `found_inf` on the device, if there is
    one: where it is 1, weights, moments, factors and bases stay as they are. Nothing waits for the
    device but decompositions, which are at the first steps.

    Args:
        groups: Parameter groups with their weight decay.
        sides: For each parameter that is a matrix, which of its two sides have a basis.
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
        number = len(self._sides)
        self._turn = {p: i * update_steps // number for i, p in enumerate(self._sides)}
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
            ready = [p for p in group["params"] if p.grad is not None]
            others = [p for p in ready if p not in self._sides]
            adamw_step(
                group,
                others,
                [p.grad for p in others],
                [self.state[p] for p in others],
                found_inf,
                decay=group["weight_decay"],
            )
            for p in ready:
                if p in self._sides:
                    self._step_matrix(p, group, found_inf)

    def _step_matrix(
        self, p: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        assert p.grad is not None
        state, beta2 = self.state[p], group["betas"][1]
        sound = torch.ones_like(state["step"])
        gradient = p.grad
        if found_inf is not None:
            sound = sound - found_inf
            # Times 0 would not do: infinity times 0 is no number.
            gradient = torch.where(sound > 0, gradient, torch.zeros_like(gradient))
        self._descend(p, gradient, group, taken=sound * state["has_basis"])
        for side in self._sides[p]:
            square = gradient @ gradient.T if side == 0 else gradient.T @ gradient
            state[f"factor.{side}"].lerp_(square, (1 - beta2) * sound)
        state["calls"] += 1
        # On the host, where it can be read at any time.
        calls = int(state["calls"])
        # With fp16, the first steps may have been skipped: then the next power of two tries again.
        if calls & (calls - 1) == 0 and not bool(state["has_basis"]):
            self._begin_bases(p)
        elif (calls - 1 - self._turn[p]) % self._update_steps == 0 and calls > 1:
            self._turn_bases(p, sound * state["has_basis"] > 0)

    def _descend(
        self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any], *, taken: Tensor
    ) -> None:
        """AdamW's step in the basis: `taken` is 1, or 0 for none."""
        state, lr = self.state[p], group["lr"]
        beta1, beta2 = group["betas"]
        left, right = (
            [state[f"basis.{side}"]] if side in self._sides[p] else None for side in (0, 1)
        )
        first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        step += taken
        first.lerp_(gradient, (1 - beta1) * taken)
        second.lerp_(rotate(gradient, left, right).square(), (1 - beta2) * taken)
        direction = rotate(first, left, right) / (second.sqrt() + group["eps"])
        direction = rotate_back(direction, left, right)
        corrected = _bias(beta2, step).sqrt() / _bias(beta1, step)
        p.mul_(1 - lr * group["weight_decay"] * taken)
        p.sub_(direction * (lr * corrected * taken))

    def _begin_bases(self, p: nn.Parameter) -> None:
        state = self.state[p]
        for side in self._sides[p]:
            factor = state[f"factor.{side}"]
            state[f"basis.{side}"].copy_(eigenbasis(factor).basis)
            state["has_basis"].copy_(factor.trace() > 0)

    def _turn_bases(self, p: nn.Parameter, wanted: Tensor) -> None:
        """Let the bases follow the factors; the second moment goes with its columns."""
        state = self.state[p]
        for side in self._sides[p]:
            basis, second = state[f"basis.{side}"], state["exp_avg_sq"]
            found = power_iteration(state[f"factor.{side}"], basis)
            sorted_second = second.index_select(side, found.order)
            second.copy_(torch.where(wanted, sorted_second, second))
            basis.copy_(torch.where(wanted, found.basis, basis))


def _factors(p: Tensor, sides: Sequence[int]) -> dict[str, Tensor]:
    """New factors and bases of a matrix; nothing for what is none."""
    if not sides:
        return {}
    zero = torch.zeros((), dtype=torch.float32)
    state = {"calls": zero, "has_basis": zero.to(p.device, copy=True)}
    for side in sides:
        square = torch.zeros(p.shape[side], p.shape[side], dtype=p.dtype, device=p.device)
        state |= {f"factor.{side}": square, f"basis.{side}": square.clone()}
    return state


def _bias(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step, exact also for small steps in fp32; that of step 1 before it."""
    return -torch.expm1(step.clamp(min=1) * math.log(max(beta, 1e-30)))


def make_soap(options: OptimizerOptions, model: nn.Module) -> SOAP:
    """Make SOAP for a model's matrices.

    A side of more than 10,000 has no basis, and neither has the side of the tokens or positions of
    an embedding or head, however few they are.
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
