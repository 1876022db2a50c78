"""The extension of bf16 moments."""

from functools import partial
from typing import TYPE_CHECKING, Literal

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from llm.optim.run_optimizer import OptimizerFactory
    from llm.parallel.layout import Layout


@option_group("Moments in bf16", resume="fixed", extension=True)
class MomentOptions(CoreConfig):
    """The precision of AdamW's moments."""

    moment_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        "Precision of adamw's moments of matrices; bf16 rounds stochastically.",
    )


class MomentExtension(Extension[MomentOptions]):
    """Makes AdamW with bf16 moments."""

    def find_problems(self) -> list[str]:
        """Return a sentence if another optimizer trains the run."""
        options = self.options
        optimizer = options.optimizer or "adamw"
        conflicts = [] if optimizer == "adamw" else [f"--optimizer {optimizer}"]
        conflicting_options = options.extra_optimizer_option, options.step_change_option
        conflicts += filter(None, (*conflicting_options, options.replica_option))
        if options.moment_dtype == "fp32" or not conflicts:
            return []
        return [
            f"--moment_dtype {options.moment_dtype} is for AdamW with gradients averaged over all "
            f"ranks, not for {' and '.join(conflicts)}; leave one of them out."
        ]

    def make_optimizer_factory(
        self, *, seed: int, layout: "Layout | None"
    ) -> "OptimizerFactory | None":
        """Return what makes AdamW with bf16 moments; None for float32 ones."""
        options = self.options
        if options.moment_dtype == "fp32":
            return None
        from llm.extensions.bf16_moments.bf16_adamw import make_bf16_adamw
        from llm.optim.run_optimizer import OptimizerFactory

        return OptimizerFactory(
            partial(make_bf16_adamw, options, seed=seed, compiled=bool(options.torch_compile))
        )
