"""The extension of K-FAC: its options, and the combinations that work."""

from typing import TYPE_CHECKING

from llm.config.options import option_group
from llm.errors import ConfigError
from llm.extensions.kfac.kfac_settings import (
    KFACSettings,
    choose_kfac_method,
    list_preconditioner_options,
)
from llm.parallel.options import sizes_above_one
from llm.trainers.gpt.seams import Extension

if TYPE_CHECKING:
    from llm.optim.run_optimizer import OptimizerFactory
    from llm.parallel.layout import Layout

_SIZES_OF_WHOLE_LAYERS = (
    "data_parallel_shard_size",
    "context_parallel_size",
    "pipeline_parallel_size",
)
"""Options that leave layers whole, which K-FAC needs."""


@option_group("K-FAC", resume="fixed", extension=True)
class KFACOptions(KFACSettings):
    """K-FAC, a second-order method; see `llm.extensions.kfac`."""

    @property
    def extra_optimizer_option(self) -> str | None:
        """K-FAC's option, if it is given: it trains the covered layers."""
        return "--kfac" if self.kfac else None


class KFACExtension(Extension[KFACOptions]):
    """Makes K-FAC."""

    def find_problems(self) -> list[str]:
        """Return a sentence for each combination that nobody tried, or that cannot work."""
        options = self.options
        return [
            *_find_method_problems(options),
            *_find_optimizer_problems(options),
            *_find_layout_problems(options),
        ]

    def make_optimizer_factory(
        self, *, seed: int, layout: "Layout | None"
    ) -> "OptimizerFactory | None":
        """Return what makes K-FAC; None without it, and for an evaluation."""
        if not self.options.kfac or self.options.eval_only:  # an evaluation takes the weights only
            return None
        from llm.extensions.kfac.make_kfac import KFACFactory

        return KFACFactory(self.options)

    def bytes_per_parameter(self) -> float:
        """Return 0: `RunOptimizer.memory` has the state.

        Raises:
            ConfigError: A library does the arithmetic, which has no plan.
        """
        library = self.options.kfac_library
        if self.options.kfac and library not in (None, "native"):
            raise ConfigError(f"--kfac_library {library} cannot be planned; leave it out.")
        return 0.0


def _find_method_problems(options: KFACOptions) -> list[str]:
    """Return a sentence for each option that the method or the library does not have."""
    problems = []
    if options.kfac_method not in (None, "eigen"):
        problems += [
            f"--{name} is not for --kfac_method {options.kfac_method}; choose eigen, or "
            "leave it out."
            for name in list_preconditioner_options(options)
        ]
    if options.kfac and choose_kfac_method(options) != "ekfac" and options.nesterov:
        problems.append(
            "--nesterov is for --kfac_method ekfac; eigen changes AdamW's gradient, so leave "
            "it out."
        )
    is_external = options.kfac_library not in (None, "native")
    if is_external and options.per_device_train_batch_size == "auto":
        problems.append(
            "--per_device_train_batch_size auto does not go with --kfac_library "
            f"{options.kfac_library}; give a number."
        )
    if is_external and options.kfac_max_dim is not None:
        problems.append(
            "--kfac_max_dim is for --kfac_library native; leave it out with "
            f"{options.kfac_library}."
        )
    return problems


def _find_optimizer_problems(options: KFACOptions) -> list[str]:
    """Return a sentence if the optimizer does not go with K-FAC or its method."""
    optimizer, problems = options.optimizer, []
    if options.kfac and optimizer == "soap" and choose_kfac_method(options) != "ekfac":
        selection_note = ""
        if not options.kfac_method:
            selecting_flags = [f"--{name}" for name in list_preconditioner_options(options)]
            selection_note = f" (selected by {' and '.join(selecting_flags)})"
        problems.append(
            f"--optimizer soap does not go with --kfac by the method {choose_kfac_method(options)}"
            f"{selection_note}; choose ekfac, or leave --optimizer soap out."
        )
    elif options.kfac and optimizer not in (None, "adamw", "soap"):
        problems.append(
            f"--optimizer {optimizer} does not go with --kfac: adamw trains the other weights, or "
            "soap with the method ekfac; leave one of them out."
        )
    return problems


def _find_layout_problems(options: KFACOptions) -> list[str]:
    """Return a sentence for each option of layout or precision that does not go with K-FAC."""
    if not options.kfac:
        return []
    problems, sizes, precision = [], sizes_above_one(options), options.mixed_precision
    if options.replica_option is not None:
        problems.append(
            f"--kfac needs the gradients of all ranks, which {options.replica_option} does not "
            "bring together; leave one of them out."
        )
    problems += [
        f"--kfac needs the inputs and outputs of whole layers, which --{name} divides; leave one "
        "of them out."
        for name in sizes
        if name not in _SIZES_OF_WHOLE_LAYERS
    ]
    if sizes and options.kfac_library not in (None, "native"):
        problems.append(
            f"--kfac_library {options.kfac_library} needs whole weights on every rank, which "
            f"--{sizes[0]} divides; leave one of them out."
        )
    if options.kfac_library == "kfac-pytorch" and options.activation_checkpointing == "selective":
        problems.append(
            "--activation_checkpointing selective does not go with --kfac_library kfac-pytorch, "
            "because recomputation mistakes the library's products for the layers'; choose full."
        )
    if precision not in (None, "no", "fp16", "bf16"):
        problems.append(
            f"--mixed_precision {precision} has no layers that --kfac covers; use bf16 or no."
        )
    return problems
