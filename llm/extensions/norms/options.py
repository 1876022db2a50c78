"""The extension of norms: its option and its memory."""

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, LoopContext, LoopExtension


@option_group("Norms of layers", extension=True)
class NormOptions(CoreConfig):
    """How often norms are measured."""

    log_norms: int | None = option(
        None,
        "Steps between records of each layer's norms (weights, gradients, updates) and largest "
        "attention logits.",
        at_least=1,
    )


class NormExtension(Extension[NormOptions]):
    """Records norms, if the option asks for them."""

    def find_problems(self) -> list[str]:
        """Return a sentence if a record would make the host wait for the device."""
        interval, logging_steps = self.options.log_norms, self.options.logging_steps
        if interval is None or interval % logging_steps == 0:
            return []
        return [
            f"--log_norms {interval} is not a multiple of --logging_steps {logging_steps}, where "
            "the host reads from the device anyway; give a multiple."
        ]

    def make_loop_extension(self, context: LoopContext) -> LoopExtension | None:
        """Return what records the norms of a training; None without the option."""
        interval = self.options.log_norms
        if interval is None or self.options.eval_only:
            return None
        from llm.extensions.norms.norm_records import NormRecords

        return NormRecords(
            context.strategy,
            interval_steps=interval,
            has_several_models=self.options.replica_option is not None,
        )

    def bytes_per_parameter(self) -> float:
        """Return the memory of a copy of the weights; an update is its difference from them."""
        return 0.0 if self.options.log_norms is None else 4.0
