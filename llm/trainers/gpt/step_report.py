"""What is reported of single steps: those that were skipped, and spikes of the loss."""

import logging
from collections.abc import Iterable

import numpy as np

from llm.checkpoint.format import TrainState
from llm.data.corpus import Corpus
from llm.data.loader import TrainLoader
from llm.errors import DivergedError, LossSpikeError
from llm.metrics.spikes import Spike, find_spike, remember
from llm.runtime.logging import event
from llm.trainers.gpt.commands import inspect_command
from llm.trainers.gpt.config import RunOptions

logger = logging.getLogger("llm")


def report_steps(
    options: RunOptions,
    steps: Iterable[tuple[int, bool, float]],
    state: TrainState,
    loader: TrainLoader,
    corpus: Corpus,
    *,
    run: str,
) -> None:
    """Log skipped steps and spikes of the loss with their samples, and act on them.

    Every rank calls it with the same steps. What it remembers of them is in the state.

    Args:
        options: When to give up, and what to do about a spike.
        steps: The result of `Meter.pop_steps`.
        state: Counters of the run.
        loader: What the steps were trained on.
        corpus: Where their samples come from.
        run: Folder of the run, for the command that shows a step's text.

    Raises:
        DivergedError: Too many steps in a row were skipped.
        LossSpikeError: The loss spiked, and `on_loss_spike` is not warn.
    """
    spikes = []
    for step, skipped, loss in steps:
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        if corpus.stages and _enters_stage(loader, step):
            state.losses = []  # those of another mixture tell nothing about this one
        spike = None if skipped else find_spike(loss, state.losses)
        if skipped:
            _report_skipped(step, loader, run)
        elif spike is not None:
            _report_spike(step, loss, spike, loader, corpus, run)
            spikes.append(step)
        if not skipped:
            state.losses = remember(loss, state.losses)
    if state.skipped_in_a_row >= options.max_skipped_steps:
        raise DivergedError(
            f"The last {state.skipped_in_a_row} steps were skipped since loss or gradient "
            "was not finite (--max_skipped_steps); go on from an earlier checkpoint with a "
            "lower --learning_rate or other data. What was saved before is untouched."
        )
    if spikes and options.on_loss_spike != "warn":
        first, stop = samples_of(loader, spikes[0], spikes[-1] + 1)
        raise LossSpikeError(
            f"The loss of step {spikes[0] + 1} spiked (--on_loss_spike {options.on_loss_spike}): "
            f"look at its text by {inspect_command(run, spikes[0] + 1)}, and go on from the last "
            f"checkpoint by --resume_from_checkpoint with --skip_samples {first}:{stop}, a lower "
            "--learning_rate, or --on_loss_spike warn. What was saved before is untouched.",
            first=spikes[0],
        )


def samples_of(loader: TrainLoader, first: int, stop: int) -> tuple[int, int]:
    """Return the range of samples of the steps first to stop - 1, counted from 0."""
    begin, _ = loader.plan.step_samples(first)
    _, end = loader.plan.step_samples(stop - 1)
    return loader.skipped.span((begin, end))


def _enters_stage(loader: TrainLoader, step: int) -> bool:
    """Return whether a step ends in another stage of the data than the one before it."""
    ends = [samples_of(loader, each, each + 1)[1] - 1 for each in (max(0, step - 1), step)]
    before, now = map(loader.samples.stage_of, ends)
    return before != now


def _report_skipped(step: int, loader: TrainLoader, run: str) -> None:
    first, stop = samples_of(loader, step, step + 1)
    command = inspect_command(run, step + 1)
    logger.info(
        f"step {step + 1} was skipped: its gradient is not finite (samples {first:,} to "
        f"{stop - 1:,}); its text: {command}",
        extra=event(
            "skip", step=step + 1, first_sample=first, last_sample=stop - 1, inspect=command
        ),
    )


def _report_spike(
    step: int,
    loss: float,
    spike: Spike,
    loader: TrainLoader,
    corpus: Corpus,
    run: str,
) -> None:
    first, stop = samples_of(loader, step, step + 1)
    numbers, _ = loader.samples.locate(
        loader.skipped.numbers(np.arange(*loader.plan.step_samples(step), dtype=np.int64))
    )
    counts = np.bincount(numbers, minlength=len(corpus.train)).tolist()
    pairs = zip(corpus.train, counts, strict=True)
    served = {source.name: count for source, count in pairs if count}
    command = inspect_command(run, step + 1)
    logger.info(
        f"the loss spiked at step {step + 1}: {loss:.4g}, {spike.score:.1f} deviations "
        f"above the median {spike.median:.4g} of the steps before (samples {first:,} to "
        f"{stop - 1:,}, from {', '.join(f'{name} {count}' for name, count in served.items())}); "
        f"its text: {command}",
        extra=event(
            "spike",
            step=step + 1,
            loss=loss,
            median=spike.median,
            score=spike.score,
            first_sample=first,
            last_sample=stop - 1,
            sources=served,
            inspect=command,
        ),
    )
