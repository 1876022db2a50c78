"""The text that a model writes during and after training, if `sample_prompt` asks for it."""

import contextlib
import logging
from collections.abc import Callable

from transformers import PreTrainedModel

from llm.errors import DivergedError
from llm.models.sampling import sample_text
from llm.parallel.base import AcceleratedStrategy
from llm.trainers.gpt.training_run import TrainingRun

SAMPLE_TOKENS = 120

logger = logging.getLogger("llm")


def log_sample(
    run: TrainingRun,
    strategy: AcceleratedStrategy,
    model: PreTrainedModel,
    step: int | None,
    *,
    should_stop: Callable[[], bool],
) -> None:
    """Let the model continue `sample_prompt` and log the text; every rank calls it.

    Args:
        run: The run.
        strategy: The prepared model; different weights of ranks are averaged.
        model: The whole model; rank 0 generates.
        step: Steps done during training; None at the end.
        should_stop: Whether to end the text with the next token.
    """
    with strategy.averaged():
        if strategy.rank != 0:
            return
        try:
            with strategy.autocast():
                text = sample_text(
                    model,
                    run.tokenizer,
                    prompt=run.config.sample_prompt or "",
                    max_new_tokens=SAMPLE_TOKENS,
                    seed=run.seed,
                    stopping_criteria=[lambda tokens, scores: should_stop()],
                )
        except DivergedError as error:
            logger.warning(f"No sample was written. {error}")
            return
    if step is None:
        logger.info(f"a sample that the model wrote:\n\n{text}\n")
    else:
        logger.info(f"a sample at step {step}:\n\n{text}\n")
        _add_to_tensorboard(strategy, text, step)


def _add_to_tensorboard(strategy: AcceleratedStrategy, text: str, step: int) -> None:
    """Add the text of a step to TensorBoard, if it is one of the trackers."""
    for tracker in strategy.accelerator.trackers:
        if tracker.name == "tensorboard":
            with contextlib.suppress(Exception):  # `MetricsReporter.write` warns of a full disk
                tracker.writer.add_text("sample", f"```\n{text}\n```", step)
