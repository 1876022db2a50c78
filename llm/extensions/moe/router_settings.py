"""Settings of the balance of experts."""

from typing import Literal

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig


@option_group("Mixtures of experts", resume="fixed", extension=True)
class MoEOptions(CoreConfig):
    """How the routers of a mixture of experts are balanced, and what is recorded of them."""

    router_balancing: Literal["auto", "none", "bias", "loss", "both"] = option(
        "auto",
        "Balance the load of experts by bias (each router's), by loss (an auxiliary one), by both, "
        "or none. auto takes bias, or loss if the model has no bias; it balances pretrained "
        "weights only with output_router_logits.",
    )
    router_aux_loss_coef: float | None = option(
        None,
        "Coefficient of the auxiliary loss (1 at balance); by default 0.01, or the configuration's "
        "with output_router_logits.",
        at_least=0,
        requires=("router_balancing=loss", "router_balancing=both"),
    )
    router_aux_loss_scope: Literal["global", "sequence"] = option(
        "global",
        "Tokens that the auxiliary loss balances: a global batch, or each sample (sequence).",
        requires=("router_balancing=loss", "router_balancing=both"),
    )
    router_bias_update_rate: float = option(
        1e-3,
        "Change of a router's bias per step; with softmax scores of E experts, 2/E of it.",
        at_least=0,
        requires=("router_balancing=bias", "router_balancing=both"),
    )
    router_bias_update: Literal["sign", "proportional"] = option(
        "sign",
        "Change of the bias: by the sign of the load's deviation, or proportional to it.",
        requires=("router_balancing=bias", "router_balancing=both"),
    )
    router_z_loss: float = option(
        0.0,
        "Coefficient of the z-loss of routers (ST-MoE).",
        at_least=0,
    )
    expert_load_steps: int | None = option(
        None,
        "Steps between records of every expert's load in events.jsonl.",
        at_least=1,
        resume="free",
    )
