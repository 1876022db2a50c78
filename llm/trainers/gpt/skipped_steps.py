"""Report skipped steps, and stop if there are too many in a row."""

import logging
from collections.abc import Iterable

from llm.checkpoint.format import TrainState
from llm.data.loader import TrainLoader
from llm.errors import DivergedError
from llm.runtime.logging import event
from llm.trainers.gpt.commands import inspect_command

logger = logging.getLogger("llm")


def report_skipped(
    steps: Iterable[tuple[int, bool, float]],
    state: TrainState,
    loader: TrainLoader,
    *,
    most: int,
    run: str,
) -> None:
    """Log skipped steps with their samples; every rank calls it with the same steps.

    Args:
        steps: The result of `Meter.pop_steps`.
        state: Counters of the run, which count the skipped steps in a row.
        loader: The samples of the steps.
        most: Maximum number of consecutive skipped steps before training stops.
        run: Folder of the run, for the command that shows a step's text.

    Raises:
        DivergedError: Too many steps in a row were skipped.
    """
    for step, skipped, _ in steps:
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            _report(step, loader, run)
    if state.skipped_in_a_row >= most:
        raise DivergedError(
            f"The last {state.skipped_in_a_row} steps were skipped because loss or gradient was "
            "not finite (--max_skipped_steps); resume from an earlier checkpoint with a lower "
            "--learning_rate or other data. Earlier checkpoints are untouched."
        )


def _report(step: int, loader: TrainLoader, run: str) -> None:
    first, stop = loader.samples_of(step, step + 1)
    command = inspect_command(run, step + 1)
    logger.info(
        f"step {step + 1} was skipped: its gradient is not finite (samples {first:,} to "
        f"{stop - 1:,}); its text: {command}",
        extra=event(
            "skip", step=step + 1, first_sample=first, last_sample=stop - 1, inspect=command
        ),
    )
