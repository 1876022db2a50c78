"""The extension of mixtures of experts."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, LoopExtension

if TYPE_CHECKING:
    from torch import nn

    from llm.extensions.moe.balanced_routers import Routers
    from llm.trainers.gpt.seams import LoopContext

logger = logging.getLogger("llm")


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


class MoEExtension(Extension[MoEOptions]):
    """Balances and measures the experts of a model that has any."""

    def find_problems(self) -> list[str]:
        """Return a sentence for each combination that cannot work."""
        options = self.options
        problems = []
        if options.replica_option and options.router_balancing not in ("auto", "none"):
            problems.append(
                f"--router_balancing {options.router_balancing} balances one model, and "
                f"{options.replica_option} trains several; leave one of them out."
            )
        if options.router_aux_loss_scope == "sequence" and options.context_parallel_size > 1:
            problems.append(
                "--router_aux_loss_scope sequence needs whole samples, and "
                "--context_parallel_size divides them; take global."
            )
        return problems

    def make_loop_extension(self, context: "LoopContext") -> LoopExtension | None:
        """Return what balances and measures routers in training; None without experts.

        Raises:
            ConfigError: The model cannot be balanced as the options ask.
        """
        options = self.options
        if options.eval_only:
            return None
        if not _has_experts(context.model):
            for name in self._changed_options():
                logger.warning(
                    f"--{name} changes nothing: {context.model.config.model_type} has no experts."
                )
            return None
        if options.replica_option:
            logger.warning(
                f"The load of experts is neither measured nor balanced, because "
                f"{options.replica_option} trains several models."
            )
            return None
        routers = self._make_routers(context)
        if routers is None:
            logger.warning(
                f"The load of the experts of {context.model.config.model_type} cannot be measured, "
                "and nothing balances it: the model lacks the interface of experts in transformers."
            )
        return routers

    @contextlib.contextmanager
    def trial_context(self, context: "LoopContext") -> Iterator[None]:
        """Add the losses of routers to trial steps; a training knows their scores later."""
        routers = None if self.options.replica_option else self._make_routers(context)
        with contextlib.nullcontext() if routers is None else routers.add_losses_for_trial():
            yield

    def _make_routers(self, context: "LoopContext") -> "Routers | None":
        """Return the routers of a model in training; None if their load cannot be measured."""
        from llm.extensions.moe.balanced_routers import Routers
        from llm.extensions.moe.balancing import RouterSettings
        from llm.extensions.moe.expert_layers import find_expert_layers

        options, run = self.options, context.run
        layers = find_expert_layers(context.model)
        if not layers:
            return None
        settings = RouterSettings(
            balancing=options.router_balancing,
            aux_loss_coef=options.router_aux_loss_coef,
            aux_loss_scope=options.router_aux_loss_scope,
            bias_update_rate=options.router_bias_update_rate,
            bias_update=options.router_bias_update,
            z_loss_coef=options.router_z_loss,
        )
        return Routers(
            settings,
            context,
            layers,
            is_pretrained=run.weights_from is not None or run.init_from is not None,
            record_interval=options.expert_load_steps,
        )

    def _changed_options(self) -> list[str]:
        """Return the names of this extension's options that are not at their default."""
        return [
            name
            for name in MoEOptions.__annotations__
            if getattr(self.options, name) != getattr(MoEOptions, name)
        ]


def _has_experts(model: "nn.Module") -> bool:
    """Return whether the model has experts or routers; dense variants of a mixture have neither."""
    from llm.models.mixtures import find_experts, find_router_classes

    classes = tuple(find_router_classes(model))
    return bool(find_experts(model)) or any(isinstance(m, classes) for m in model.modules())
