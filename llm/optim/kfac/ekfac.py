"""EKFAC for language models: AdamW in the eigenbasis of the Kronecker factors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llm.optim.adamw import adamw_state, adamw_step
from llm.optim.eigenbases import Blocks, rotate, rotate_back
from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.layers import Layer

NOISE = 1e-6
"""Entries of a rotated matrix that are smaller, against its norm, count as zero."""


class EKFAC(torch.optim.Optimizer):
    """AdamW whose moments live in the K-FAC eigenbasis; ordinary AdamW outside covered layers.

    With A = QA diag(.) QA^T and G = QG diag(.) QG^T, the gradient of a layer becomes
    QG^T dW QA, in which its entries are nearly uncorrelated, so that AdamW's division by the
    root of each entry's second moment there is close to a natural gradient step (George et al.
    2018, arXiv:1806.03884, with the moving averages and the step rule of AdamW). That needs no
    damping and takes AdamW's learning rate. SOAP (Vyas et al. 2024, arXiv:2409.11321) does the
    same in the eigenbasis of Shampoo's factors, which are made of gradients instead of inputs
    and output gradients.

    Rotations are orthogonal, so the first moment kept in the basis is that of the weights, turned
    when the basis turns. The second moment is carried over as if entries were uncorrelated: by
    the squares of the turn.

    Like torch's fused optimizers it reads an attribute `found_inf` on the device, if there is
    one: where it is 1, weights, moments, statistics and step counts stay as they are.

    Args:
        groups: Parameter groups, or parameters; a covered weight may be in any of them.
        curvature: The covered layers' factors; `capture_stats` must surround each forward and
            backward.
        lr: Learning rate.
        betas: Decay of first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay of groups that name none.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        curvature: Curvature,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        self.curvature = curvature
        # By number: torch's load_state_dict puts new groups in the place of these.
        number_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self._numbers = {
            layer.name: [number_of[p] for p in layer.parameters] for layer in curvature.layers
        }
        covered = {p for layer in curvature.layers for p in layer.parameters}
        self._others = [
            [p for p in group["params"] if p not in covered] for group in self.param_groups
        ]
        self._make_state()

    def _make_state(self) -> None:
        """Create all state at once, so that a checkpoint can be loaded before the first step."""
        for parameters in self._others:
            for parameter in parameters:
                self.state[parameter] = adamw_state(parameter)
        for layer in self.curvature.layers:
            if self.curvature.works_on(layer):
                self.state.update(_layer_state(layer))

    def gathered_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of all parameters, the same on all ranks, which must all call it.

        Where every rank has all of it already these are the live tensors, else copies.
        """
        found = {p: self.state[p] for others in self._others for p in others}
        columns: dict[int, list[Tensor]] = {}
        for layer in self.curvature.layers:
            if self.curvature.assignment.num_columns == 1:
                found.update({p: self.state[p] for p in layer.parameters})
                continue
            whole = _layer_state(layer)
            if self.curvature.works_on(layer):
                for key, tensor in whole[layer.weight].items():
                    tensor.copy_(self.state[layer.weight][key])
            found.update(whole)
            column = self.curvature.assignment.column_of[layer.input_name]
            columns.setdefault(column, []).extend(whole[layer.weight].values())
        self.curvature.exchange.share_updates(columns)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        turns = self.curvature.update(found_inf)
        changes = {}
        for layer in self.curvature.layers:
            gradient = layer.gradient()
            if self.curvature.works_on(layer):
                self._turn_moments(layer, turns, found_inf)
                if gradient is not None:
                    changes[layer.name] = self._change(layer, gradient, found_inf)
            elif gradient is not None:
                changes[layer.name] = torch.empty_like(gradient)
        self.curvature.share_updates(changes)
        for layer in self.curvature.layers:
            if layer.name in changes:
                self._apply(layer, changes[layer.name], found_inf)
        for group, parameters in zip(self.param_groups, self._others, strict=True):
            ready = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in ready if p.grad is not None]
            states = [self.state[p] for p in ready]
            adamw_step(group, ready, gradients, states, found_inf, decay=group["weight_decay"])
        return loss

    def _turn_moments(
        self, layer: Layer, turns: dict[str, list[Tensor]], found_inf: Tensor | None
    ) -> None:
        """Express the moments in a basis that has just been renewed."""
        inputs, outputs = self.curvature.factors_of(layer)
        if inputs.name not in turns and outputs.name not in turns:
            return
        left, right = turns.get(outputs.name), turns.get(inputs.name)
        state = self.state[layer.weight]
        first = _without_noise(rotate(state["exp_avg"], left, right))
        second = rotate(state["exp_avg_sq"], _squares(left), _squares(right))
        if found_inf is not None:
            first = torch.where(found_inf > 0, state["exp_avg"], first)
            second = torch.where(found_inf > 0, state["exp_avg_sq"], second)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)

    def _change(self, layer: Layer, gradient: Tensor, found_inf: Tensor | None) -> Tensor:
        """What AdamW in the eigenbasis adds to a layer, but for weight decay."""
        inputs, outputs = self.curvature.factors_of(layer)
        rotated = _without_noise(rotate(gradient, outputs.bases, inputs.bases))
        # AdamW on a weight of zero leaves its step there, or zero where the step is skipped.
        change = torch.zeros_like(rotated)
        group = self.param_groups[self._numbers[layer.name][0]]
        adamw_step(group, [change], [rotated], [self.state[layer.weight]], found_inf, decay=0.0)
        return rotate_back(change, outputs.bases, inputs.bases)

    def _apply(self, layer: Layer, change: Tensor, found_inf: Tensor | None) -> None:
        keep = 1.0 if found_inf is None else 1.0 - found_inf
        for parameter, number, part in zip(
            layer.parameters, self._numbers[layer.name], layer.parts(change), strict=True
        ):
            group = self.param_groups[number]
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"] * keep)
            parameter.add_(part)


def _without_noise(rotated: Tensor) -> Tensor:
    """Set to zero, in place, what is rounding error alone.

    AdamW would blow it up to a full step. Layers in front of a LayerNorm or a softmax have
    directions in which the gradient is zero. Each matrix of a stack is judged by itself.
    """
    floor = NOISE * torch.linalg.vector_norm(rotated, dim=(-2, -1), keepdim=True)
    # Ones and zeros as numbers: on a CPU four times as fast as a mask.
    return rotated.mul_(rotated.abs().ge_(floor))


def _squares(blocks: Blocks) -> Blocks:
    return None if blocks is None else [block.square() for block in blocks]


def _layer_state(layer: Layer) -> dict[Tensor, dict[str, Tensor]]:
    """New state of a covered layer; the bias' moments are the last column of the weight's."""
    weight = layer.weight
    shape = (*weight.shape[:-2], layer.rows, layer.columns)
    dtype = weight.dtype if shape == weight.shape else torch.float32
    state = adamw_state(torch.empty(shape, dtype=dtype, device=weight.device))
    return {p: state if p is weight else {"step": state["step"]} for p in layer.parameters}
