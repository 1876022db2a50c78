"""Muon, NorMuon and SOAP among the optimizers of a run."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from llm.config.options import option, option_group
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
        "muon": OptimizerKind(has_betas=True, sharded=True, replicated=True, averaged=True),
        "normuon": OptimizerKind(has_betas=True, sharded=True, replicated=True, averaged=True),
        # The mean of bases is no basis.
        "soap": OptimizerKind(has_betas=True, sharded=True, replicated=True),
    }

    hyperball: bool = option(
        False,
        "Keep the norms of inner matrices, instead of weight decay; learning_rate becomes the "
        "length of a step relative to them. For adamw, muon, normuon and soap.",
    )

    @property
    def step_change_option(self) -> str | None:
        """Hyperball, which changes the steps of the optimizer."""
        return "--hyperball" if self.hyperball else None


class MatrixExtension(Extension[MatrixOptions]):
    """Makes Muon, NorMuon and SOAP, and takes steps on spheres."""

    def find_problems(self) -> list[str]:
        """Return a sentence if Hyperball was not tried with another option."""
        options = self.options
        if not options.hyperball:
            return []
        conflicts = [options.extra_optimizer_option, options.replica_option]
        if options.optimizer not in (None, "adamw", *MatrixOptions.OPTIMIZERS):
            conflicts.append(f"--optimizer {options.optimizer}")
        return [
            "--hyperball takes the steps of adamw, muon, normuon and soap with one model, not with "
            f"{conflict}; leave one of them out."
            for conflict in conflicts
            if conflict is not None
        ]

    def make_optimizer_factory(
        self, *, seed: int, layout: "Layout | None"
    ) -> "OptimizerFactory | None":
        """Return what makes one of them; None for other optimizers."""
        options = self.options
        if options.optimizer not in MatrixOptions.OPTIMIZERS and not options.hyperball:
            return None
        from llm.extensions.matrix_optim.hyperball import HyperballFactory
        from llm.extensions.matrix_optim.matrix_factories import MuonFactory, SOAPFactory
        from llm.optim.adamw_and_sgd import make_adamw
        from llm.optim.run_optimizer import OptimizerFactory

        factory: OptimizerFactory
        if options.optimizer in (None, "adamw"):
            factory = OptimizerFactory(partial(make_adamw, options))
        elif options.optimizer == "soap":
            factory = SOAPFactory(options)
        else:
            factory = MuonFactory(options)
        return HyperballFactory(factory, options) if options.hyperball else factory
