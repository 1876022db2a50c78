"""Muon for the matrices inside a model, and AdamW for the rest, as one optimizer."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.optim.adamw import adamw_settings, adamw_state, adamw_step
from llm.optim.fused import Fusion, fused_weights
from llm.optim.groups import inner_matrices, matrix_groups, split_groups
from llm.optim.options import OptimizerOptions
from llm.optim.whole import Unit, WholeMatrices, groups_of


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for some matrices, torch's fused AdamW for the rest.

    A step of Muon is the gradient's momentum made orthogonal, with Nesterov's look-ahead, as that
    of torch's Muon. Its length is scaled as in Liu et al. 2025 (arXiv:2502.16982), so that it takes
    AdamW's learning rate and weight decay.

    Like torch's fused optimizers it reads an attribute `found_inf` on the device, if there is
    one: where it is 1, weights and state stay as they are.

    Args:
        groups: Parameter groups with their weight decay.
        matrices: The parameters, of two dimensions, that Muon trains.
        lr: Learning rate of both.
        momentum: Momentum of Muon.
        betas: Decay of AdamW's first and second moments.
        eps: Added to the root of AdamW's second moment.
        fusions: How fused weights divide into matrices.
        whole: Who computes which update; by default every rank all of them.

    Attributes:
        units: The matrices that Muon trains.
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
        whole: WholeMatrices | None = None,
    ) -> None:
        split = split_groups(groups, set(matrices), {"is_muon": True}, {"is_muon": False})
        super().__init__(split, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})
        self.units = [
            Unit(parameters=[p], shapes=[p.shape], cost=p.numel(), fusion=(fusions or {}).get(p))
            for group in self.param_groups
            for p in group["params"]
            if group["is_muon"]
        ]
        self._whole = whole or WholeMatrices()
        self._whole.assign(self.units)
        # Created here and not in the first step, so that a checkpoint can be loaded before it.
        for unit in self.units:
            p = unit.weight
            self.state[p] = {}
            if self._whole.owns(unit):  # of the whole shape, also where the weight is sharded
                zeros = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                self.state[p]["momentum_buffer"] = zeros
        self.state.update({p: adamw_state(p) for p in groups_of(self) if p not in self.state})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if not group["is_muon"]:
                adamw_step(group, group["params"], self.state, found_inf)

        groups = groups_of(self)

        def compute(unit: Unit, gradients: list[Tensor]) -> list[Tensor]:
            momentum = groups[unit.weight]["momentum"]
            return [self._direction(unit, gradients[0], momentum, found_inf)]

        for unit, (direction,) in self._whole.updates(self.units, compute, dtype=torch.bfloat16):
            p, group = unit.weight, groups[unit.weight]
            before = p if found_inf is None else p.clone()
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(direction, alpha=-group["lr"] * _length(unit.shapes[0], unit.fusion))
            if found_inf is not None:
                p.copy_(torch.where(found_inf > 0, before, p))

    def _direction(
        self, unit: Unit, gradient: Tensor, momentum: float, found_inf: Tensor | None
    ) -> Tensor:
        """Update the momentum of a unit; return what its step is a multiple of."""
        buffer = self.state[unit.weight]["momentum_buffer"]
        updated = torch.lerp(buffer, gradient, 1 - momentum)
        ahead = gradient.lerp(updated, momentum)
        if found_inf is not None:
            updated = torch.where(found_inf > 0, buffer, updated)
        buffer.copy_(updated)
        if unit.fusion is None:
            return orthogonalized(ahead)
        length = _length(unit.shapes[0], unit.fusion)
        parts = unit.fusion.split(ahead)
        return unit.fusion.join(
            [orthogonalized(part) * (_length(part.shape, None) / length) for part in parts]
        )


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U V^T of a matrix U S V^T, roughly, in bf16: its singular values are 0.7 to 1.2.

    By five steps of the quintic Newton-Schulz iteration of Jordan et al. 2024, as in torch's Muon.

    Args:
        matrix: [rows, columns].
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.bfloat16()
    if matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=1e-7)  # so that no singular value is above 1
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def _length(shape: torch.Size, fusion: Fusion | None) -> float:
    """Return the factor on an orthogonal matrix, or the first of a fused one, for AdamW's rate."""
    first = shape if fusion is None else next(iter(fusion.shapes(shape).values()))
    return 0.2 * math.sqrt(max(first))


def make_muon(
    options: OptimizerOptions, model: nn.Module, whole: WholeMatrices | None = None
) -> MuonAndAdamW:
    """Make Muon for the matrices inside a model.

    AdamW trains the rest: embeddings, the output head, experts stored as one stack.

    Raises:
        ConfigError: The model has no such matrix.
    """
    groups = matrix_groups(options, model)
    inside = [p for p in inner_matrices(model) if p.ndim == 2]
    if not inside:
        raise ConfigError(
            "--optimizer muon found no matrix to train between the embedding and the output head "
            "of this model; use --optimizer adamw."
        )
    momentum = 0.95 if options.momentum is None else options.momentum
    return MuonAndAdamW(
        groups,
        inside,
        momentum=momentum,
        fusions=fused_weights(options, model),
        whole=whole,
        **adamw_settings(options),
    )
