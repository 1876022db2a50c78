"""Options of bf16 moments."""

from functools import partial
from typing import TYPE_CHECKING, Literal

from llm.config.options import option, option_group
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from llm.optim.run_optimizer import Recipe
    from llm.parallel.layout import Layout


@option_group("Moments in bf16", resume="fixed", extension=True)
class MomentOptions(Extension):
    """The precision of AdamW's moments."""

    moment_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        "Precision of adamw's moments of matrices; bf16 rounds stochastically and halves their "
        "memory.",
    )

    def problems(self) -> list[str]:
        """Return a sentence if another optimizer trains the run."""
        conflicts = [] if self.optimizer in (None, "adamw") else [f"--optimizer {self.optimizer}"]
        conflicts += [self.besides_optimizer] if self.besides_optimizer else []
        conflicts += [self.several_models] if self.several_models else []
        if self.moment_dtype == "fp32" or not conflicts:
            return []
        return [
            f"--moment_dtype {self.moment_dtype} is for AdamW with gradients averaged over all "
            f"ranks, not for {' and '.join(conflicts)}; leave one of them out."
        ]

    def recipe(self, *, seed: int, layout: "Layout | None") -> "Recipe | None":
        """Return what makes AdamW with bf16 moments; None for float32 ones."""
        if self.moment_dtype == "fp32":
            return None
        from llm.extensions.bf16_moments.bf16_adamw import make_bf16_adamw
        from llm.optim.run_optimizer import Recipe

        return Recipe(partial(make_bf16_adamw, self, seed=seed, compiled=bool(self.torch_compile)))
