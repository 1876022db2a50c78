"""Muon for the matrices inside a model, AdamW for all that is not one: one optimizer of both."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.optim.adamw import adamw_settings, adamw_state
from llm.optim.groups import embeddings_and_head, parameter_groups
from llm.optim.options import OptimizerOptions


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon (Jordan et al. 2024) for some matrices, its fused AdamW for the rest.

    A step of Muon is the gradient's momentum made orthogonal; its length is scaled as Liu et al.
    2025 (arXiv:2502.16982) do, so that it takes AdamW's learning rate and weight decay. Every rank
    computes it whole.

    Like torch's fused optimizers it reads an attribute `found_inf` on the device, if there is
    one: where it is 1, weights and state stay as they are.

    Args:
        groups: Parameter groups with their weight decay.
        matrices: The parameters, of two dimensions, that are Muon's.
        lr: Learning rate of both.
        momentum: Muon's.
        betas: AdamW's.
        eps: AdamW's.
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
    ) -> None:
        chosen = set(matrices)
        self._muon = torch.optim.Muon(
            _part(groups, lambda p: p in chosen),
            lr=lr,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        others = _part(groups, lambda p: p not in chosen)
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        for group in self._muon.param_groups:
            group["is_muon"] = True
        for group in self._adamw.param_groups:
            group["is_muon"] = False
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {"lr": lr})
        self._make_state()

    def _make_state(self) -> None:
        """Create all state at once, so that a checkpoint can be loaded before the first step."""
        for group in self.param_groups:
            for p in group["params"]:
                if group["is_muon"]:
                    self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
                else:
                    self.state[p] = adamw_state(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # torch's load_state_dict puts new groups and a new state in the place of these.
        self._muon.state = self._adamw.state = self.state
        for group in self.param_groups:
            if group["is_muon"]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._step_muon(p, group, found_inf)
        self._adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _step_muon(self, p: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None) -> None:
        """One matrix at a time: torch's Muon knows no flag, and a copy of all would be dear."""
        self._muon.param_groups = [{**group, "params": [p]}]
        if found_inf is None:
            self._muon.step()
            return
        kept = [p, self.state[p]["momentum_buffer"]]
        before = [tensor.clone() for tensor in kept]
        self._muon.step()
        for tensor, former in zip(kept, before, strict=True):
            tensor.copy_(torch.where(found_inf > 0, former, tensor))


def _part(
    groups: list[dict[str, Any]], belongs: Callable[[nn.Parameter], bool]
) -> list[dict[str, Any]]:
    """The groups with the parameters that belong, without empty ones."""
    parts = [{**group, "params": [p for p in group["params"] if belongs(p)]} for group in groups]
    return [part for part in parts if part["params"]]


def make_muon(options: OptimizerOptions, model: nn.Module) -> MuonAndAdamW:
    """Make Muon for the matrices inside a model.

    AdamW has the rest: embeddings, the output head, experts stored as one stack.

    Raises:
        ConfigError: The model has no such matrix.
    """
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    outside = embeddings_and_head(model)
    inside = [p for p in groups[0]["params"] if p.ndim == 2 and p not in outside]
    if not inside:
        raise ConfigError(
            "--optimizer muon found no matrix to train between the embedding and the output head "
            "of this model; use --optimizer adamw."
        )
    momentum = 0.95 if options.momentum is None else options.momentum
    return MuonAndAdamW(groups, inside, momentum=momentum, **adamw_settings(options))
