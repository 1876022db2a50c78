"""How the routers of a run are balanced: the choice, its refusals and its description."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from llm.errors import ConfigError
from llm.extensions.moe.expert_layers import ExpertLayer
from llm.extensions.moe.router_settings import MoEOptions
from llm.models.sizes import experts_per_token

Kind = Literal["none", "bias", "loss", "both"]

_DEFAULT_COEFFICIENT = 0.01  # Switch Transformer


@dataclass(frozen=True, kw_only=True)
class Balancing:
    """How the routers of a run are balanced.

    Attributes:
        kind: Whether by their bias, by a loss, by both or not at all.
        reason: Why the kind is what it is, if no option says it; or empty.
        aux_loss_coef: Coefficient of the auxiliary loss; 0 without one.
        is_per_sequence: Whether the auxiliary loss balances each sample.
        bias_update_rate: Change of a bias per step, in units of sigmoid scores; 0 without any.
        is_proportional: Whether the bias changes by the relative deviation of the load, not by its
            sign.
        z_loss_coef: Coefficient of the z-loss; 0 without one.
    """

    kind: Kind
    reason: str
    aux_loss_coef: float
    is_per_sequence: bool
    bias_update_rate: float
    is_proportional: bool
    z_loss_coef: float

    @property
    def has_losses(self) -> bool:
        """Whether there is an auxiliary loss or a z-loss."""
        return bool(self.aux_loss_coef or self.z_loss_coef)

    def describe(self) -> str:
        """Return a description for the log."""
        parts = []
        if self.kind in ("loss", "both"):
            scope = "sample" if self.is_per_sequence else "global batch"
            parts.append(f"an auxiliary loss of {self.aux_loss_coef:g} over each {scope}")
        if self.kind in ("bias", "both"):
            update = "in proportion to the load" if self.is_proportional else "by the load's sign"
            parts.append(f"a bias that changes {update}, rate {self.bias_update_rate:g}")
        text = f"balanced by {' and '.join(parts)}" if parts else "not balanced"
        text += f" {self.reason}" if self.reason else ""
        return text + (f"; z-loss {self.z_loss_coef:g}" if self.z_loss_coef else "")


def make_balancing(
    options: MoEOptions,
    config: PreTrainedConfig,
    layers: Sequence[ExpertLayer],
    *,
    kind: Kind,
    reason: str,
) -> Balancing:
    """Return the balancing of a kind, with its coefficients.

    Raises:
        ConfigError: The routers lack a bias or logits, or the configuration has no usable
            coefficient.
    """
    _check_routers(options, layers, kind=kind, family=config.model_type)
    return Balancing(
        kind=kind,
        reason=reason,
        aux_loss_coef=_choose_aux_loss_coef(options, config, len(layers), kind=kind),
        is_per_sequence=options.router_aux_loss_scope == "sequence",
        bias_update_rate=options.router_bias_update_rate if kind in ("bias", "both") else 0.0,
        is_proportional=options.router_bias_update == "proportional",
        z_loss_coef=options.router_z_loss,
    )


def _check_routers(
    options: MoEOptions, layers: Sequence[ExpertLayer], *, kind: Kind, family: str
) -> None:
    """Refuse a kind of balancing that the routers lack a bias or logits for."""
    if kind in ("bias", "both") and all(layer.bias is None for layer in layers):
        raise ConfigError(
            f"--router_balancing {kind} changes the bias of routers, and the routers of {family} "
            "have none; take loss."
        )
    logits_option = f"--router_balancing {kind}" if kind in ("loss", "both") else None
    logits_option = "--router_z_loss" if options.router_z_loss else logits_option
    if logits_option is not None and all(layer.router is None for layer in layers):
        raise ConfigError(
            f"{logits_option} needs the logits of routers, and {family} gives none; leave it out."
        )


def _choose_aux_loss_coef(
    options: MoEOptions, config: PreTrainedConfig, num_layers: int, *, kind: Kind
) -> float:
    """Return the coefficient of the auxiliary loss: the option's, the model's, or the default.

    It is 0 for a kind without an auxiliary loss.

    Raises:
        ConfigError: The configuration has no usable coefficient.
    """
    if kind not in ("loss", "both"):
        return 0.0
    if options.router_aux_loss_coef is not None:
        return options.router_aux_loss_coef
    coefficient = read_aux_loss_coef(config, num_layers)
    if coefficient == 0:
        raise ConfigError(
            f"--router_balancing {kind} needs a coefficient, and the configuration of "
            f"{config.model_type} has output_router_logits with a coefficient of 0; set "
            "--router_aux_loss_coef."
        )
    return _DEFAULT_COEFFICIENT if coefficient is None else coefficient


def choose_auto_kind(
    config: PreTrainedConfig, layers: Sequence[ExpertLayer], *, is_pretrained: bool
) -> tuple[Kind, str]:
    """Return what `auto` means for a run that starts here, and the reason for the log.

    Args:
        config: The text configuration of the model.
        layers: The layers with experts of the whole model.
        is_pretrained: Whether the run starts from pretrained weights.

    Raises:
        ConfigError: The configuration has a coefficient that is negative or not finite.
    """
    has_logits = any(layer.router is not None for layer in layers)
    coefficient = read_aux_loss_coef(config, len(layers)) if has_logits else None
    if coefficient:
        return "loss", "(output_router_logits of the configuration)"
    if is_pretrained:
        return "none", "because the weights are pretrained (--router_balancing)"
    if any(layer.bias is not None for layer in layers):
        return "bias", ""
    if coefficient == 0:
        return "none", "because the coefficient of the auxiliary loss in the configuration is 0"
    return ("loss", "") if has_logits else ("none", "because the routers have no logits")


def read_aux_loss_coef(config: PreTrainedConfig, num_layers: int) -> float | None:
    """Return the coefficient of a configuration that asks for the auxiliary loss, converted.

    Hugging Face's loss is K times the loss here, of loads and probabilities averaged over layers,
    while the loss here is summed over layers.

    Args:
        config: The text configuration of the model.
        num_layers: Number of layers with experts.

    Returns:
        None if the configuration does not ask for it, or its coefficient is missing.

    Raises:
        ConfigError: The coefficient is negative or not finite.
    """
    num_chosen = experts_per_token(config)
    if not getattr(config, "output_router_logits", False) or num_chosen is None:
        return None
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        coefficient = getattr(config, name, None)
        if coefficient is None:
            continue
        if not (coefficient >= 0 and math.isfinite(coefficient)):
            raise ConfigError(
                f"The {config.model_type} model has {name}={coefficient}, which must be 0 or "
                "more: a negative one would make routers send all tokens to the same experts; "
                "change config.json or --config_overrides."
            )
        return float(coefficient) * num_chosen / num_layers
    return None
