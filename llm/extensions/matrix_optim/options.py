"""Muon and SOAP among the optimizers of a run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from llm.config.options import option_group
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings
from llm.optim.options import OptimizerKind

if TYPE_CHECKING:
    from llm.optim.run_optimizer import Recipe
    from llm.parallel.layout import Layout


@option_group("Muon and SOAP", resume="fixed", extension=True)
class MatrixOptions(MatrixSettings):
    """Optimizers of whole matrices, and their settings."""

    OPTIMIZERS: ClassVar[Mapping[str, OptimizerKind]] = {
        "muon": OptimizerKind(has_betas=True, sharded=True, averaged=True),
        "soap": OptimizerKind(has_betas=True, sharded=True, state="bases"),
    }

    def recipe(self, *, seed: int, layout: "Layout | None") -> "Recipe | None":
        """Return what makes Muon or SOAP; None for other optimizers."""
        if self.optimizer not in MatrixOptions.OPTIMIZERS:
            return None
        from llm.extensions.matrix_optim.matrix_recipe import MuonRecipe, SOAPRecipe

        return MuonRecipe(self) if self.optimizer == "muon" else SOAPRecipe(self)
