"""The extension of the moving average of the weights."""

from typing import TYPE_CHECKING, ClassVar

from llm.config.duration import Tokens
from llm.config.options import option, option_group
from llm.errors import ConfigError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, LoopExtension, SavedWeights

if TYPE_CHECKING:
    from llm.trainers.gpt.seams import LoopContext, Run


@option_group("Checkpoints")
class ExportAverageOptions:
    """What `llm-trainers checkpoints` takes of the average."""

    ema: bool = option(
        False,
        "Export the moving average of the weights.",
        requires=("export",),
    )


@option_group("Moving average of the weights", extension=True)
class AveragingOptions(CoreConfig):
    """The moving average of the weights, and whether it is evaluated and exported."""

    ema_decay: float | None = option(
        None,
        "Decay per step of a moving average of the weights.",
        resume="logged",
        above=0,
        below=1,
    )
    ema_tokens: Tokens | None = option(
        None,
        "Half-life of the moving average in tokens.",
        resume="logged",
        at_least=1,
        at_most=10**15,
    )
    eval_ema: bool = option(
        False,
        "Also evaluate the moving average, with the prefix ema_.",
        needs_validation=True,
        requires=("ema_decay", "ema_tokens"),
    )
    export_ema: bool = option(
        False,
        "Export the moving average instead of the last weights.",
        requires=("ema_decay", "ema_tokens"),
    )


class AveragingExtension(Extension[AveragingOptions]):
    """Keeps the average of a run's weights."""

    saved_weights: ClassVar[SavedWeights] = SavedWeights(
        part="ema",
        options=ExportAverageOptions,
        description="moving average; train with --ema_decay or --ema_tokens to keep one",
        card="their exponential moving average",
    )

    def find_problems(self) -> list[str]:
        """Return a sentence for each combination that cannot work."""
        options = self.options
        problems = []
        if options.ema_decay is not None and options.ema_tokens is not None:
            problems.append("--ema_decay and --ema_tokens exclude each other.")
        problems += [
            f"--{name} averages the weights of one model, and {options.replica_option} trains "
            "several; leave one of them out."
            for name in ("ema_decay", "ema_tokens")
            if getattr(options, name) is not None and options.replica_option
        ]
        return problems

    def prepare_run(self, run: "Run") -> None:
        """Refuse to evaluate an average that no checkpoint holds.

        Raises:
            ConfigError: The run only evaluates, and names no checkpoint.
        """
        if self.options.eval_only and self.options.eval_ema and run.start is None:
            raise ConfigError(
                "--eval_ema has no moving average to evaluate with --eval_only: name a checkpoint "
                "by --resume_from_checkpoint, or leave it out."
            )

    def make_loop_extension(self, context: "LoopContext") -> LoopExtension | None:
        """Return the moving average; None if no option needs it."""
        options = self.options
        if not self._keeps_average or (options.eval_only and not options.eval_ema):
            return None
        from llm.extensions.averaging.weight_average import WeightAverage

        return WeightAverage(
            context.strategy,
            decay=options.ema_decay,
            half_life=options.ema_tokens,
            is_evaluated=options.eval_ema,
            is_exported=options.export_ema,
        )

    def bytes_per_parameter(self) -> float:
        """Return the bytes of a float32 average."""
        return 4.0 if self._keeps_average else 0.0

    @property
    def _keeps_average(self) -> bool:
        return self.options.ema_decay is not None or self.options.ema_tokens is not None
