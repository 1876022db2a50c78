"""The extension of loss spikes."""

from typing import TYPE_CHECKING, Literal

from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, LoopExtension

if TYPE_CHECKING:
    from llm.trainers.gpt.seams import LoopContext


@option_group("Loss spikes", extension=True)
class SpikeOptions(CoreConfig):
    """How a run reacts to loss spikes."""

    on_loss_spike: Literal["warn", "stop", "rewind"] = option(
        "warn",
        "On a loss spike, warn in the log, stop, or rewind to the last checkpoint and skip the "
        "samples around the step.",
    )
    max_rewinds: int = option(
        3,
        "Maximum rewinds before the run stops.",
        requires=("on_loss_spike=rewind",),
        at_least=1,
    )


class SpikeExtension(Extension[SpikeOptions]):
    """Looks for spikes."""

    def find_problems(self) -> list[str]:
        """Return a sentence if a run should go back to checkpoints but saves none."""
        options = self.options
        saves = options.save_interval or options.checkpointing_minutes
        if options.on_loss_spike != "rewind" or saves:
            return []
        return [
            "--on_loss_spike rewind goes back to checkpoints, and none are saved; give "
            "--save_interval or --checkpointing_minutes too."
        ]

    def make_loop_extension(self, context: "LoopContext") -> LoopExtension | None:
        """Return the spike detector of a training."""
        options = self.options
        if options.eval_only:
            return None
        from llm.extensions.spikes.loss_spikes import LossSpikes

        return LossSpikes(
            context.run.corpus,
            folder=context.run.folder.path,
            action=options.on_loss_spike,
            max_rewinds=options.max_rewinds,
            # The updates of a logging interval before the spike may have led to it.
            logging_steps=options.logging_steps,
        )
