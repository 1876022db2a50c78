"""Loss, perplexity, bits per byte and other metrics of a validation split."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llm.data.corpus import CorpusSource
from llm.data.loader import EvalLoader, MicroBatch
from llm.errors import ConfigError, one_line
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.float32 import sums_dtype
from llm.runtime.labels import IGNORED
from llm.runtime.offline import offline_remark
from llm.trainers.gpt.seams import Run


class NextTokenAccuracy:
    """Fraction of positions with the right token as the likeliest next one.

    It has the two methods of an evaluate-library metric that an evaluation calls.
    """

    def __init__(self) -> None:
        self._num_right = self._num_tokens = 0

    def add_batch(
        self, *, predictions: npt.NDArray[np.int64], references: npt.NDArray[np.int64]
    ) -> None:
        """Count token ids of shape `[num_tokens]`."""
        self._num_right += int((predictions == references).sum())
        self._num_tokens += len(references)

    def compute(self) -> dict[str, float]:
        """Return the accuracy since the last call."""
        accuracy = self._num_right / self._num_tokens
        self._num_right = self._num_tokens = 0
        return {"accuracy": accuracy}


def load_metrics(names: Sequence[str]) -> dict[str, Any]:
    """Load metrics of the evaluate library by name; `accuracy` is `NextTokenAccuracy`.

    Raises:
        ConfigError: The metric does not exist, or cannot be reached.
    """
    return {
        name: NextTokenAccuracy() if name == "accuracy" else _load_library_metric(name)
        for name in names
    }


def _load_library_metric(name: str) -> Any:
    """Load a metric of the evaluate library."""
    import evaluate

    try:
        # keep_in_memory avoids cache files, which several runs would share.
        return evaluate.load(name, keep_in_memory=True)
    except Exception as error:  # a metric's module may raise anything
        reason = one_line(error)
        # Without a network, the library reports that the Hub does not have the metric.
        if isinstance(error, FileNotFoundError):
            reason = "it is not a local folder, and the Hub does not have it or cannot be reached"
            reason += offline_remark()
        raise ConfigError(
            f"--eval_metrics {name} cannot be loaded by the evaluate library: {reason}."
        ) from error


@dataclass(frozen=True, slots=True)
class ValidationSource:
    """One source of a validation split.

    Attributes:
        name: Used in the names of its results.
        weight: Weight of its loss in the mean; the weights of all sources sum to 1.
        batches: The batches of this rank; all ranks have the same number.
        bytes_per_token: Mean UTF-8 bytes per token; None if the text is unknown.
    """

    name: str
    weight: float
    batches: Iterable[MicroBatch]
    bytes_per_token: float | None


def make_evaluator(
    run: Run, strategy: AcceleratedStrategy, *, on_batch: Callable[[], None] | None = None
) -> Callable[[], dict[str, float]] | None:
    """Return a function that evaluates on all ranks, or None without validation data."""
    corpus_sources = run.corpus.validation
    if not corpus_sources:
        return None
    batch_limits: list[int | None] = [None] * len(corpus_sources)
    if run.config.max_eval_steps is not None:
        weights = [source.weight for source in corpus_sources]
        batch_limits = [*divide_eval_batches(run.config.max_eval_steps, weights)]
    sources = [
        _make_validation_source(run, strategy, source, max_batches)
        for source, max_batches in zip(corpus_sources, batch_limits, strict=True)
    ]
    return partial(evaluate_sources, strategy, sources, metrics=run.metrics, on_batch=on_batch)


def _make_validation_source(
    run: Run, strategy: AcceleratedStrategy, source: CorpusSource, max_batches: int | None
) -> ValidationSource:
    """Return a source of the validation split with this rank's batches of it."""
    stream = source.stream
    is_only_source = len(run.corpus.validation) == 1
    batches = EvalLoader(
        stream=stream,
        block_size=run.block_size,
        micro_batch_size=run.config.per_device_eval_batch_size,
        rank=strategy.data_rank,
        world_size=strategy.data_ranks,
        device=strategy.device,
        max_batches=max_batches,
        document_boundaries=run.document_boundaries,
        name="The validation text" if is_only_source else f"The source {source.name}",
    )
    bytes_per_token = stream.num_bytes / stream.num_tokens if stream.num_bytes else None
    return ValidationSource(source.name, source.weight, batches, bytes_per_token)


def evaluate_sources(
    strategy: AcceleratedStrategy,
    sources: Sequence[ValidationSource],
    *,
    metrics: dict[str, Any],
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Evaluate each source separately; every rank calls it.

    Returns:
        The results of `evaluate_source`, averaged over the sources by weight; perplexity and bits
        per byte are computed from the mean loss. With several sources, each also has `loss/NAME`.
        If ranks have separate weights, their mean is evaluated, and `consensus_distance` is the
        distance of the ranks from it.
    """
    with strategy.averaged() as distance:
        source_results = [
            evaluate_source(strategy, source, metrics=metrics, on_batch=on_batch)
            for source in sources
        ]
    results = source_results[0] if len(sources) == 1 else _average_results(sources, source_results)
    if distance is not None:
        results["consensus_distance"] = float(distance)
    return results


def evaluate_source(
    strategy: AcceleratedStrategy,
    source: ValidationSource,
    *,
    metrics: dict[str, Any],
    on_batch: Callable[[], None] | None,
) -> dict[str, float]:
    """Evaluate on all ranks; every token counts once, regardless of batches and ranks.

    Returns:
        `loss` (nats per token), `perplexity`, `bits_per_byte` if the bytes are known, and the
        values of the metrics; equal on all ranks.
    """
    dtype = sums_dtype(strategy.device)
    loss_and_tokens = torch.zeros(2, dtype=dtype, device=strategy.device)
    for batch in source.batches:
        loss_sum, num_tokens = strategy.evaluate(batch)
        loss_and_tokens += torch.stack([loss_sum.to(dtype), num_tokens.to(dtype)])
        if metrics:
            _add_predictions(strategy, batch, metrics)
        if on_batch is not None:
            on_batch()
    loss_sum, num_tokens = strategy.reduce_sum(loss_and_tokens)
    loss = float(loss_sum / num_tokens)  # the host waits for the device here
    results = {"loss": loss, "perplexity": _compute_perplexity(loss)}
    if source.bytes_per_token:
        results["bits_per_byte"] = loss / math.log(2) / source.bytes_per_token
    for metric in metrics.values():
        results.update(metric.compute())
    return results


def _add_predictions(
    strategy: AcceleratedStrategy, batch: MicroBatch, metrics: dict[str, Any]
) -> None:
    """Add a batch's likeliest tokens, gathered from all ranks, and its labels to the metrics."""
    predicted_ids, _ = strategy.predict(batch)
    predictions = strategy.gather(predicted_ids)
    references = strategy.gather(batch.labels)
    is_label = references != IGNORED
    for metric in metrics.values():
        metric.add_batch(
            predictions=predictions[is_label].cpu().numpy(),
            references=references[is_label].cpu().numpy(),
        )


def _compute_perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp overflows above 709


def _average_results(
    sources: Sequence[ValidationSource], source_results: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return the means of the sources' results by weight, and the loss of each source by name."""
    weighted_results = [*zip(sources, source_results, strict=True)]
    results: dict[str, float] = {
        name: sum(source.weight * values[name] for source, values in weighted_results)
        for name, value in source_results[0].items()
        if isinstance(value, int | float)
    }
    results["perplexity"] = _compute_perplexity(results["loss"])
    results.pop("bits_per_byte", None)
    if all(source.bytes_per_token for source in sources):
        mean_bytes = sum(source.weight * (source.bytes_per_token or 0.0) for source in sources)
        results["bits_per_byte"] = results["loss"] / math.log(2) / mean_bytes
    for source, values in weighted_results:
        results[f"loss/{source.name}"] = values["loss"]
    return results


def divide_eval_batches(max_batches: int, weights: Sequence[float]) -> list[int]:
    """Divide batches over sources in proportion to their weights, by the largest remainder method.

    Args:
        max_batches: Total batches of all sources.
        weights: Weights of the sources, which sum to 1.

    Returns:
        The number of batches of each source, at least 1.
    """
    quotas = [weight * max_batches for weight in weights]
    batch_counts = [max(1, int(quota)) for quota in quotas]
    # The largest remainder first.
    source_order = sorted(
        range(len(quotas)),
        key=lambda source_index: batch_counts[source_index] - quotas[source_index],
    )
    num_unassigned = max(0, max_batches - sum(batch_counts))
    for source_index in source_order[:num_unassigned]:
        batch_counts[source_index] += 1
    return batch_counts
