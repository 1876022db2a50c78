"""Muon, NorMuon and SOAP among the optimizers of a run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from llm.config.options import option_group
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings
from llm.optim.options import OptimizerKind
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from llm.optim.run_optimizer import OptimizerFactory
    from llm.parallel.layout import Layout


@option_group("Muon and SOAP", resume="fixed", extension=True)
class MatrixOptions(MatrixSettings):
    """Optimizers of whole matrices, and their settings."""

    OPTIMIZERS: ClassVar[Mapping[str, OptimizerKind]] = {
        "muon": OptimizerKind(has_betas=True, sharded=True, averaged=True),
        "normuon": OptimizerKind(has_betas=True, sharded=True, averaged=True),
        "soap": OptimizerKind(has_betas=True, sharded=True, state="bases"),
    }


class MatrixExtension(Extension[MatrixOptions]):
    """Makes Muon, NorMuon and SOAP."""

    def optimizer_factory(self, *, seed: int, layout: "Layout | None") -> "OptimizerFactory | None":
        """Return what makes one of them; None for other optimizers."""
        if self.options.optimizer not in MatrixOptions.OPTIMIZERS:
            return None
        from llm.extensions.matrix_optim.matrix_factories import MuonFactory, SOAPFactory

        options = self.options
        return SOAPFactory(options) if options.optimizer == "soap" else MuonFactory(options)
