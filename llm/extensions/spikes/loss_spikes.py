"""Report loss spikes with their samples, and ask the run to stop or to go back."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llm.data.corpus import Corpus
from llm.data.loader import TrainLoader
from llm.errors import DivergedError, RestartError
from llm.extensions.spikes.spike_detection import Spike, append_loss, find_spike
from llm.runtime.logging import event
from llm.trainers.gpt.commands import inspect_command
from llm.trainers.gpt.seams import LoopExtension

logger = logging.getLogger("llm")


class LossSpikes(LoopExtension):
    """Looks for spikes in the losses of a run; every rank sees the same losses.

    Args:
        corpus: Where the samples come from.
        folder: Folder of the run, for the command that shows a step's text.
        action: Reaction to a spike, as in `on_loss_spike`.
        max_rewinds: Maximum number of rewinds before the run stops.
        logging_steps: Steps of a logging interval. A run that goes back skips as many steps before
            a spike, and the steps up to the end of the spike's interval.

    Attributes:
        losses: Losses of the last steps that were not skipped.
        num_rewinds: How often the run went back.
    """

    part = "spikes"
    description = "record of losses, to tell a spike by"

    def __init__(
        self,
        corpus: Corpus,
        *,
        folder: Path,
        action: Literal["warn", "stop", "rewind"],
        max_rewinds: int = 0,
        logging_steps: int = 1,
    ) -> None:
        self._corpus, self._folder, self._action = corpus, folder, action
        self._max_rewinds, self._logging_steps = max_rewinds, logging_steps
        self.losses: list[float] = []
        self.num_rewinds = 0

    def check_losses(self, steps: Sequence[tuple[int, bool, float]], loader: TrainLoader) -> None:
        """Log the spikes among some steps, and stop the run or let it go back if options say so.

        Args:
            steps: For each step its number from 0, whether it was skipped, and its mean loss.
            loader: The samples of the steps.

        Raises:
            DivergedError: The loss spiked, and the run stops or has gone back `max_rewinds` times.
            RestartError: The loss spiked, and the run goes back.
        """
        spike_steps = []
        for step, is_skipped, loss in steps:
            if self._corpus.stages and _enters_stage(loader, step):
                self.losses = []  # losses of another mixture tell nothing about this one
            if is_skipped:
                continue
            spike = find_spike(loss, self.losses)
            if spike is not None:
                self._log_spike(step, loss, spike, loader)
                spike_steps.append(step)
            self.losses = append_loss(loss, self.losses)
        if spike_steps and self._action != "warn":
            self._stop_or_rewind(spike_steps, loader)

    def _stop_or_rewind(self, spike_steps: list[int], loader: TrainLoader) -> None:
        """Raise the error that stops the run, or lets it go back to a checkpoint.

        Args:
            spike_steps: The steps with a spike, counted from 0, in order.
            loader: The samples of the steps.
        """
        first_step, last_step = spike_steps[0], spike_steps[-1]
        first_sample, end_sample = loader.sample_range(first_step, last_step + 1)
        command = inspect_command(self._folder, first_step + 1)
        message = (
            f"The loss of step {first_step + 1} spiked (--on_loss_spike {self._action}): "
            f"look at its text with {command}, and continue from "
            f"the last checkpoint with --resume_from_checkpoint and --skip_samples "
            f"{first_sample}:{end_sample}, a lower --learning_rate, or --on_loss_spike warn. "
            "Earlier checkpoints are untouched."
        )
        if self._action == "stop":
            raise DivergedError(message)
        if self.num_rewinds >= self._max_rewinds:
            raise DivergedError(
                f"{message} The run has gone back {self.num_rewinds} times already (--max_rewinds)."
            )
        self.num_rewinds += 1
        # Not up to the present step: a save or a request to stop may end the interval earlier.
        interval_end = (first_step // self._logging_steps + 1) * self._logging_steps
        raise RestartError(
            message,
            first=first_step - self._logging_steps,
            end=interval_end,
            reason=f"the spike at step {first_step + 1} (time {self.num_rewinds} of "
            f"--max_rewinds {self._max_rewinds})",
        )

    def _log_spike(self, step: int, loss: float, spike: Spike, loader: TrainLoader) -> None:
        """Log a spike with its samples, and the command that shows their text."""
        first_sample, end_sample = loader.sample_range(step, step + 1)
        samples_by_source = self._count_samples(step, loader)
        blend = ", ".join(f"{name} {count}" for name, count in samples_by_source.items())
        command = inspect_command(self._folder, step + 1)
        logger.info(
            f"the loss spiked at step {step + 1}: {loss:.4g}, {spike.score:.1f} deviations "
            f"above the median {spike.median:.4g} of the steps before (samples {first_sample:,} to "
            f"{end_sample - 1:,}, from {blend}); its text: {command}",
            extra=event(
                "spike",
                step=step + 1,
                loss=loss,
                median=spike.median,
                score=spike.score,
                first_sample=first_sample,
                last_sample=end_sample - 1,
                sources=samples_by_source,
                inspect=command,
            ),
        )

    def _count_samples(self, step: int, loader: TrainLoader) -> dict[str, int]:
        """Return the number of samples of a step from each source that has any."""
        positions = np.arange(*loader.batch_plan.step_positions(step), dtype=np.int64)
        sources, _ = loader.samples.locate(loader.skipped.sample_indices(positions))
        counts = np.bincount(sources, minlength=len(self._corpus.train)).tolist()
        pairs = zip(self._corpus.train, counts, strict=True)
        return {source.name: count for source, count in pairs if count}

    def begin(self) -> None:
        """Forget the losses; the number of rewinds of this start stays."""
        self.losses = []

    def state_dict(self) -> dict[str, Any]:
        """Return the last losses and the number of rewinds."""
        return {"losses": self.losses, "rewinds": self.num_rewinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the losses; a run that goes back keeps its number of rewinds."""
        self.losses = list(state["losses"])
        self.num_rewinds = max(self.num_rewinds, state["rewinds"])


def _enters_stage(loader: TrainLoader, step: int) -> bool:
    """Return whether a step ends in another stage of the data than the step before it."""
    _, previous_end_sample = loader.sample_range(max(0, step - 1), max(1, step))
    _, end_sample = loader.sample_range(step, step + 1)
    previous_stage = loader.samples.stage_of(previous_end_sample - 1)
    return previous_stage != loader.samples.stage_of(end_sample - 1)
