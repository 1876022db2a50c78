"""EKFAC for language models: AdamW in the eigenbasis of the Kronecker factors."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.layers import Layer
from llm.extensions.kfac.units import CoveredUnits, stack_bases
from llm.extensions.matrix_optim.eigenbases import Blocks, rotate, rotate_back
from llm.extensions.matrix_optim.fused import join_states, matrix_state
from llm.extensions.matrix_optim.matrix_owners import (
    MatrixOptimizer,
    MatrixOwners,
    Updates,
    groups_of,
    make_adjacent,
    stacked_state,
)
from llm.extensions.matrix_optim.soap import SOAP, bias_correction, mask_skipped_gradient
from llm.optim.adamw_and_sgd import adamw_state, adamw_step

NOISE_FLOOR = 3e-6
"""Fraction of a rotated matrix' root mean square below which entries are set to zero.

A float32 rotation has an error of 3e-7 of the matrix' norm, spread evenly over its entries: a tenth
of this limit. A limit relative to the norm would grow with the width, and freeze the flat
directions that the basis is meant to find.
"""


class EKFAC(MatrixOptimizer):
    """AdamW with moments in the K-FAC eigenbasis; AdamW or SOAP outside covered layers.

    With A = QA diag(.) QA^T and G = QG diag(.) QG^T, the gradient of a layer becomes
    QG^T dW QA [rows, columns]. There its entries are nearly uncorrelated, and AdamW divides each by
    the root of its second moment. This is the rule of SOAP (Vyas et al. 2024, arXiv:2409.11321) in
    the basis of K-FAC: SOAP takes its basis from Shampoo's factors, computed from gradients instead
    of inputs and output gradients. The basis is the same as in George et al. 2018
    (arXiv:1806.03884), the moments differ: they use means over samples of squared gradients, EKFAC
    moving averages of the squared gradient of the batch. G and the moments use the labels in the
    data (the empirical Fisher), and the power is -1/2; a natural gradient step has -1. So it needs
    no damping, and its steps are as long as AdamW's; its best learning rate was two to four times
    AdamW's.

    Rotations are orthogonal, so the first moment is rotated exactly when the basis changes. The
    second moment is transformed as if entries were uncorrelated: by the squares of the rotation.

    Args:
        groups: Parameter groups, or parameters; a covered weight may be in any of them.
        curvature: The covered layers' factors; `capture_stats` must surround each forward and
            backward.
        lr: Learning rate.
        betas: Decay of first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: Default decoupled weight decay of groups.
        nesterov: In covered layers, use a first moment one gradient ahead of the stored one, like
            NAdam (Dozat 2016).
        make_soap: Creates SOAP for the parameters outside of covered layers, which are only in its
            groups; by default AdamW trains them. Called when the covered layers have owners, so
            that ranks with fewer of them get more of SOAP's matrices.
        matrix_owners: As for `CoveredUnits`.

    Attributes:
        units: The weights of covered layers, and weights with a SOAP basis.
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
        nesterov: bool = False,
        make_soap: Callable[[], SOAP] | None = None,
        matrix_owners: MatrixOwners | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        self.curvature = curvature
        self._nesterov = nesterov
        self._covered_units = CoveredUnits(curvature, matrix_owners)
        self.units = list(self._covered_units.layers_by_unit)
        self._unit_by_layer = {
            layer: unit
            for unit, layers in self._covered_units.layers_by_unit.items()
            for layer in layers
        }
        self._distinguish_groups()
        # Created here instead of in the first step, so that a checkpoint can be loaded.
        for unit, layers in self._covered_units.layers_by_unit.items():
            # Empty for moments on other ranks: a checkpoint has the names of all.
            has_moments = self._covered_units.computes_update(unit)
            self.state.update(
                _make_layer_state(layers) if has_moments else {p: {} for p in unit.parameters}
            )
        self._make_moments_adjacent()
        self._soap = make_soap() if make_soap else None
        if self._soap is not None:
            for group in self._soap.param_groups:
                self.add_param_group(group)
            self.state.update(self._soap.state)
            self.units += self._soap.units
        self._add_adamw_state()

    def _distinguish_groups(self) -> None:
        """Make units of different parameter groups unequal, so that no batch joins them."""
        for group_index, group in enumerate(self.param_groups):
            group_parameters = set(group["params"])
            for unit in self.units:
                if unit.weight in group_parameters:
                    unit.kind = unit.kind, group_index

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        rotations, group_by_param = self.curvature.update(self.found_inf), groups_of(self)
        for unit, layers in self._covered_units.layers_by_unit.items():
            if self._covered_units.computes_update(unit):
                for layer in layers:
                    self._rotate_moments(layer, rotations)
        compute_updates = partial(self._compute_adamw_updates, group_by_param=group_by_param)
        update_mask = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        for updates in self._covered_units.compute_updates(compute_updates):
            _apply_updates(updates, group_by_param, update_mask)
        if self._soap is None:
            self._step_adamw()
        else:
            self._step_soap(self._soap)

    def _step_soap(self, soap: SOAP) -> None:
        """Update the parameters outside of covered layers by SOAP."""
        covered = {p for unit in self._covered_units.layers_by_unit for p in unit.parameters}
        # Look these up in each step: a strategy that shards weights has replaced both.
        soap.state = self.state
        soap.param_groups = [g for g in self.param_groups if covered.isdisjoint(g["params"])]
        soap.found_inf = self.found_inf
        soap.step()

    def _make_moments_adjacent(self) -> None:
        """Make the moments and bases of equal layers adjacent in memory, as stacks."""
        for units in self._covered_units.batches():
            make_adjacent([self.state[unit.weight] for unit in units])
            for unit in units:  # The bias's state has the first part's step.
                layer = self._covered_units.layers_by_unit[unit][0]
                for parameter in unit.parameters[1:]:
                    self.state[parameter]["step"] = self._layer_state(layer)["step"]
        self._covered_units.make_bases_adjacent()

    def _layer_state(self, layer: Layer) -> dict[str, Tensor]:
        return matrix_state(self.state[self._unit_by_layer[layer].weight], layer.part)

    def _rotate_moments(self, layer: Layer, rotations: dict[str, list[Tensor]]) -> None:
        """Express the moments in a basis that has just changed."""
        input_factor, output_factor = self.curvature.factors_of(layer)
        row_rotation = rotations.get(output_factor.name)
        column_rotation = rotations.get(input_factor.name)
        if row_rotation is None and column_rotation is None:
            return
        state = self._layer_state(layer)
        first_moment, second_moment = state["exp_avg"], state["exp_avg_sq"]
        self._overwrite_state(
            first_moment, _zero_rounding_errors(rotate(first_moment, row_rotation, column_rotation))
        )
        self._overwrite_state(
            second_moment,
            rotate(second_moment, _square_blocks(row_rotation), _square_blocks(column_rotation)),
        )

    def _compute_adamw_updates(
        self,
        layers: Sequence[Layer],
        gradients: Tensor,
        *,
        group_by_param: Mapping[Tensor, dict[str, Any]],
    ) -> Tensor:
        """Return AdamW's updates in the eigenbasis, without weight decay.

        Args:
            layers: Equal layers.
            gradients: As `Layer.make_gradient_matrix` returns them, stacked.
            group_by_param: Parameter group of each parameter.
        """
        weight = self._unit_by_layer[layers[0]].weight
        group = group_by_param[weight] | {"weight_decay": 0.0}
        input_factors, output_factors = zip(*map(self.curvature.factors_of, layers), strict=True)
        row_bases, column_bases = stack_bases(output_factors), stack_bases(input_factors)
        rotated_gradients = _zero_rounding_errors(rotate(gradients, row_bases, column_bases))
        states = [self._layer_state(layer) for layer in layers]
        if self._nesterov:
            with stacked_state(states) as stacked_tensors:
                # One per matrix, broadcast over rows and columns.
                state = stacked_tensors | {"step": stacked_tensors["step"].view(-1, 1, 1)}
                updates = compute_nesterov_step(group, rotated_gradients, state, self.found_inf)
        else:
            # AdamW applied to a zero weight gives its step, or zero if the step is skipped.
            updates = torch.zeros_like(rotated_gradients)
            state_by_update = dict(zip(updates.unbind(), states, strict=True))
            for update, gradient in zip(state_by_update, rotated_gradients.unbind(), strict=True):
                update.grad = gradient
            adamw_step(group, list(state_by_update), state_by_update, self.found_inf)
        return rotate_back(updates, row_bases, column_bases)


def _apply_updates(
    updates: Updates, group_by_param: Mapping[Tensor, dict[str, Any]], update_mask: Tensor | float
) -> None:
    """Decay the parameters of units, and add their updates.

    Args:
        updates: The updates; zero if the step is skipped.
        group_by_param: Parameter group of each parameter.
        update_mask: 1.0, or 0.0 if the step is skipped; a tensor is read on the device.
    """
    parameters: list[Tensor] = []
    parameter_updates: list[Tensor] = []
    for unit, unit_updates in updates:
        parameters += unit.parameters
        parameter_updates += unit_updates
    parameters_by_decay: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        group = group_by_param[parameter]
        decay = group["lr"] * group["weight_decay"]
        parameters_by_decay.setdefault(decay, []).append(parameter)
    for decay, decayed_parameters in parameters_by_decay.items():
        if decay:
            torch._foreach_mul_(decayed_parameters, 1 - decay * update_mask)
    if parameters:
        torch._foreach_add_(parameters, parameter_updates)


def compute_nesterov_step(
    group: Mapping[str, Any],
    gradient: Tensor,
    state: Mapping[str, Tensor],
    found_inf: Tensor | None,
) -> Tensor:
    """Update AdamW's moments; return its step with Nesterov's momentum (Dozat 2016, NAdam).

    The first moment in the step is one gradient ahead of the stored one.

    Args:
        group: lr, betas and eps; the caller applies weight decay.
        gradient: Gradient of one tensor.
        state: As `adamw_state` returns it.
        found_inf: 1.0 where the step is skipped, and zeros are returned; read on the device.
    """
    beta1, beta2 = group["betas"]
    first_moment, second_moment, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    gradient, update_mask = mask_skipped_gradient(gradient, found_inf)
    step += update_mask
    first_moment.lerp_(gradient, (1 - beta1) * update_mask)
    second_moment.lerp_(gradient.square(), (1 - beta2) * update_mask)
    momentum = first_moment.lerp(gradient, 1 - beta1) / bias_correction(beta1, step + 1)
    denominator = (second_moment / bias_correction(beta2, step)).sqrt() + group["eps"]
    update: Tensor = momentum / denominator * (-group["lr"] * update_mask)
    return update


def _zero_rounding_errors(rotated: Tensor) -> Tensor:
    """Set entries that are only rounding errors to zero, in place.

    AdamW would enlarge them to a full step. Layers in front of a LayerNorm or a softmax have
    directions with zero gradient. Each matrix of a stack has a separate norm.
    """
    norm = torch.linalg.vector_norm(rotated, dim=(-2, -1), keepdim=True)
    noise_floor = norm * (NOISE_FLOOR / math.sqrt(rotated.shape[-2] * rotated.shape[-1]))
    # Multiplying with ones and zeros is four times as fast on a CPU as filling by a mask.
    return rotated.mul_(rotated.abs().ge_(noise_floor))


def _square_blocks(blocks: Blocks) -> Blocks:
    return None if blocks is None else [block.square() for block in blocks]


def _make_layer_state(layers: Sequence[Layer]) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of a weight's layers before the first step, by weight and bias.

    A bias has the last column of the moments.
    """
    weight, states = layers[0].weight, {}
    for layer in layers:
        shape = (*weight.shape[:-2], layer.rows, layer.columns)
        dtype = weight.dtype if shape == weight.shape else torch.float32
        states[layer.part] = adamw_state(torch.empty(shape, dtype=dtype, device=weight.device))
    state, step = join_states(states), states[layers[0].part]["step"]
    return {p: state if p is weight else {"step": step} for p in layers[0].parameters}
