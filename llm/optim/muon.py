"""Muon for the matrices inside a model, and AdamW for the rest, as one optimizer."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.optim.adamw import adamw_settings, adamw_state, adamw_step
from llm.optim.groups import embeddings_and_head, parameter_groups
from llm.optim.options import OptimizerOptions


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon (Jordan et al. 2024) for some matrices, its fused AdamW for the rest.

    A step of Muon is the gradient's momentum made orthogonal. Its length is scaled as in Liu et
    al. 2025 (arXiv:2502.16982), so that it takes AdamW's learning rate and weight decay. Every
    rank computes the whole step.

    Like torch's fused optimizers it reads an attribute `found_inf` on the device, if there is
    one: where it is 1, weights and state stay as they are.

    Args:
        groups: Parameter groups with their weight decay.
        matrices: The parameters, of two dimensions, that Muon trains.
        lr: Learning rate of both.
        momentum: Momentum of Muon.
        betas: Decay of AdamW's first and second moments.
        eps: Added to the root of AdamW's second moment.
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
        divided = [
            group
            | {"params": [p for p in group["params"] if (p in chosen) is is_muon]}
            | {"is_muon": is_muon}
            for is_muon in (True, False)
            for group in groups
        ]
        divided = [group for group in divided if group["params"]]
        # Gives its groups Muon's own settings, such as the number of Newton-Schulz iterations.
        self._muon = torch.optim.Muon(
            [group for group in divided if group["is_muon"]],
            lr=lr,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        super().__init__(divided, {"lr": lr, "betas": betas, "eps": eps})
        # Created here and not in the first step, so that a checkpoint can be loaded before it.
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
        self._muon.state = self.state  # torch's load_state_dict replaces it.
        for group in self.param_groups:
            if not group["is_muon"]:
                adamw_step(group, group["params"], self.state, found_inf)
                continue
            for p in group["params"]:
                if p.grad is not None:
                    self._step_muon(p, group, found_inf)

    def _step_muon(self, p: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None) -> None:
        """Take a step on one matrix, and undo it on the device where `found_inf` is set.

        torch's Muon has no such flag. One matrix at a time needs a copy of one matrix only.
        """
        self._muon.param_groups = [{**group, "params": [p]}]
        if found_inf is None:
            self._muon.step()
            return
        kept = [p, self.state[p]["momentum_buffer"]]
        before = [tensor.clone() for tensor in kept]
        self._muon.step()
        for tensor, former in zip(kept, before, strict=True):
            tensor.copy_(torch.where(found_inf > 0, former, tensor))


def make_muon(options: OptimizerOptions, model: nn.Module) -> MuonAndAdamW:
    """Make Muon for the matrices inside a model.

    AdamW trains the rest: embeddings, the output head, experts stored as one stack.

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
