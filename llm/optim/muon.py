"""Muon for the matrices inside a model, and AdamW for the rest, as one optimizer."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.optim.adamw import adamw_settings
from llm.optim.fused import Fusion, fused_weights, fusion_of
from llm.optim.groups import inner_matrices, parameter_groups, split_groups
from llm.optim.options import OptimizerOptions
from llm.optim.whole import MatrixOptimizer, Unit, WholeMatrices, groups_of
from llm.runtime.float32 import has_half_products


class MuonAndAdamW(MatrixOptimizer):
    """Muon (Jordan et al. 2024) for some matrices, torch's fused AdamW for the rest.

    A step of Muon is the gradient's momentum made orthogonal, with Nesterov's look-ahead, as that
    of torch's Muon. Its length is scaled as in Liu et al. 2025 (arXiv:2502.16982), so that it takes
    AdamW's learning rate and weight decay.

    Args:
        groups: Parameter groups with their weight decay.
        matrices: The parameters, of two dimensions, that Muon trains.
        lr: Learning rate of both.
        momentum: Momentum of Muon.
        betas: Decay of AdamW's first and second moments.
        eps: Added to the root of AdamW's second moment.
        fusions: How fused weights divide into matrices.
        whole: Who computes which update; by default every rank all of them.
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
            Unit(
                parameters=[p],
                shapes=[p.shape],
                fusion=fusion_of(p, fusions or {}),
                cost=p.numel(),
            )
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
        self._add_adamw_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported.
        """
        self._step_adamw()
        groups = groups_of(self)

        def compute(unit: Unit, gradients: list[Tensor]) -> list[Tensor]:
            return [self._direction(unit, gradients[0], groups[unit.weight]["momentum"])]

        for unit, (direction,) in self._whole.updates(self.units, compute, dtype=torch.bfloat16):
            p, group = unit.weight, groups[unit.weight]
            updated = p * (1 - group["lr"] * group["weight_decay"])
            length, *_ = _lengths(unit).values()
            self._overwrite(p, updated.add_(direction, alpha=-group["lr"] * length))

    def _direction(self, unit: Unit, gradient: Tensor, momentum: float) -> Tensor:
        """Update the momentum of a unit; return what its step is a multiple of."""
        buffer = self.state[unit.weight]["momentum_buffer"]
        updated = torch.lerp(buffer, gradient, 1 - momentum)
        parts = unit.fusion.split(gradient.lerp(updated, momentum))
        self._overwrite(buffer, updated)
        lengths = _lengths(unit)
        first, *_ = lengths.values()
        return unit.fusion.join(
            {name: orthogonalized(part) * (lengths[name] / first) for name, part in parts.items()}
        )


def _lengths(unit: Unit) -> dict[str, float]:
    """Return the factors on orthogonal matrices, by the matrix's name, for AdamW's rate."""
    shapes = unit.fusion.shapes(unit.shapes[0])
    return {name: 0.2 * math.sqrt(max(shape)) for name, shape in shapes.items()}


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U V^T of a matrix U S V^T, roughly, in bf16: its singular values are 0.7 to 1.2.

    By five steps of the quintic Newton-Schulz iteration of Jordan et al. 2024, as in torch's Muon,
    but in float32 where the device is slow in bf16.

    Args:
        matrix: [rows, columns].
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.bfloat16() if has_half_products(matrix.device) else matrix.float()
    if matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=1e-7)  # so that no singular value is above 1
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    orthogonal = wide.bfloat16()
    return orthogonal.T if matrix.shape[0] > matrix.shape[1] else orthogonal


def make_muon(
    options: OptimizerOptions, model: nn.Module, whole: WholeMatrices | None = None
) -> MuonAndAdamW:
    """Make Muon for the matrices inside a model.

    AdamW trains the rest: embeddings, the output head, experts stored as one stack.

    Raises:
        ConfigError: The model has no such matrix.
    """
    groups = parameter_groups(options, model)
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
        fusions=fused_weights(model),
        whole=whole,
        **adamw_settings(options),
    )
