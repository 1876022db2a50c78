"""The extension of mixtures of experts."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llm.config.options import non_default
from llm.extensions.moe.router_settings import MoEOptions
from llm.runtime.logging import SAME_ON_ALL_RANKS
from llm.trainers.gpt.seams import Extension, LoopExtension

if TYPE_CHECKING:
    from torch import nn

    from llm.extensions.moe.balanced_routers import Routers
    from llm.trainers.gpt.seams import LoopContext

logger = logging.getLogger("llm")


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
            for name in non_default(options):
                if name in MoEOptions.__annotations__:
                    family = context.model.config.model_type
                    line = f"--{name} changes nothing: {family} has no experts."
                    logger.warning(line, extra=SAME_ON_ALL_RANKS)
            return None
        if options.replica_option:
            logger.warning(
                f"The load of experts is neither measured nor balanced, because "
                f"{options.replica_option} trains several models.",
                extra=SAME_ON_ALL_RANKS,
            )
            return None
        routers = self._make_routers(context)
        if routers is None:
            logger.warning(
                f"The load of the experts of {context.model.config.model_type} cannot be measured, "
                "and nothing balances it: the model lacks the interface of experts in "
                "transformers.",
                extra=SAME_ON_ALL_RANKS,
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
        from llm.extensions.moe.expert_layers import find_expert_layers

        layers = find_expert_layers(context.model)
        return Routers(self.options, context, layers) if layers else None


def _has_experts(model: "nn.Module") -> bool:
    """Return whether the model has experts or routers; dense variants of a mixture have neither."""
    from llm.models.mixtures import find_experts, find_router_classes

    classes = tuple(find_router_classes(model))
    return bool(find_experts(model)) or any(isinstance(m, classes) for m in model.modules())
