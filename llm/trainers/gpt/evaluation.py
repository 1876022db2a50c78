"""Loss, perplexity, bits per byte and accuracy of a validation split."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm.data.loader import MicroBatch
from llm.errors import ConfigError
from llm.parallel.base import AcceleratedStrategy

ACCURACY = Path(__file__).parent / "next_token_accuracy.py"


def load_metrics(names: Sequence[str]) -> dict[str, Any]:
    """Load metrics of the evaluate library; `accuracy` is this package's own.

    Raises:
        ConfigError: There is no such metric, or it cannot be reached.
    """
    if not names:
        return {}
    import evaluate

    metrics = {}
    for name in names:
        try:
            # keep_in_memory: no cache files, which several runs would have to share.
            metrics[name] = evaluate.load(
                str(ACCURACY) if name == "accuracy" else name, keep_in_memory=True
            )
        except (FileNotFoundError, ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"--eval_metrics {name} cannot be loaded by the evaluate library: it is no local "
                "folder, and the hub has none or is out of reach."
            ) from error
    return metrics


def evaluate_model(
    strategy: AcceleratedStrategy,
    batches: Iterable[MicroBatch],
    *,
    bytes_per_token: float | None,
    metrics: dict[str, Any],
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Evaluate on all ranks; every token counts once, whatever the batches and ranks.

    Args:
        strategy: The prepared model.
        batches: This rank's share; all ranks have the same number of batches.
        bytes_per_token: UTF-8 bytes of the text that a token stands for on average.
        metrics: Metrics of the evaluate library by name.
        on_batch: Called after each batch.

    Returns:
        `loss` (nats per token), `perplexity`, `bits_per_byte` where bytes are known,
        and the values of the metrics, equal on all ranks.
    """
    # Float64 (where there is one), so that the order of batches leaves no trace.
    dtype = torch.float32 if strategy.device.type == "mps" else torch.float64
    totals = torch.zeros(2, dtype=dtype, device=strategy.device)
    for batch in batches:
        loss_sum, num_tokens = strategy.evaluate(batch)
        totals += torch.stack([loss_sum.to(dtype), num_tokens.to(dtype)])
        if metrics:
            _add_predictions(strategy, batch, metrics)
        if on_batch is not None:
            on_batch()
    loss_sum, num_tokens = strategy.reduce_sum(totals)
    loss = float(loss_sum / num_tokens)
    results = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    if bytes_per_token:
        results["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    for metric in metrics.values():
        results.update(metric.compute())
    return results


@dataclass(frozen=True, slots=True)
class EvaluatedPart:
    """One source of a validation split.

    Attributes:
        name: For the names of its results.
        weight: Its share in the mean; those of all parts sum to 1.
        batches: This rank's share; all ranks have the same number of batches.
        bytes_per_token: UTF-8 bytes of the text that a token stands for on average.
    """

    name: str
    weight: float
    batches: Iterable[MicroBatch]
    bytes_per_token: float | None


def evaluate_parts(
    strategy: AcceleratedStrategy,
    parts: Sequence[EvaluatedPart],
    *,
    metrics: dict[str, Any],
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Evaluate each source by itself, on all ranks.

    Args:
        strategy: The prepared model.
        parts: The sources.
        metrics: Metrics of the evaluate library by name.
        on_batch: Called after each batch.

    Returns:
        Those of `evaluate_model`, as the mean by weight over the sources; perplexity and bits per
        byte follow from the mean loss. With several sources also `loss/NAME` of each. Where ranks
        have weights of their own, their mean is evaluated, and `consensus_distance` says how far
        they are from it.
    """
    with strategy.averaged() as distance:
        by_part = [
            evaluate_model(
                strategy,
                part.batches,
                bytes_per_token=part.bytes_per_token,
                metrics=metrics,
                on_batch=on_batch,
            )
            for part in parts
        ]
    results = by_part[0] if len(parts) == 1 else _mean_of_parts(parts, by_part)
    if distance is not None:
        results["consensus_distance"] = float(distance)
    return results


def _mean_of_parts(
    parts: Sequence[EvaluatedPart], by_part: Sequence[dict[str, float]]
) -> dict[str, float]:
    results: dict[str, float] = {
        name: sum(part.weight * found[name] for part, found in zip(parts, by_part, strict=True))
        for name, value in by_part[0].items()
        if isinstance(value, int | float)
    }
    loss = results["loss"]
    results["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    results.pop("bits_per_byte", None)
    if all(part.bytes_per_token for part in parts):
        mean_bytes = sum(part.weight * (part.bytes_per_token or 0.0) for part in parts)
        results["bits_per_byte"] = loss / math.log(2) / mean_bytes
    for part, found in zip(parts, by_part, strict=True):
        results[f"loss/{part.name}"] = found["loss"]
    return results


def share_batches(max_batches: int, weights: Sequence[float]) -> list[int]:
    """Batches of each source, by the largest remainder, at least one each.

    Args:
        max_batches: Batches to share out.
        weights: Of the sources; they sum to 1.
    """
    exact = [weight * max_batches for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: shares[part] - exact[part])
    for part in by_remainder[: max(0, max_batches - sum(shares))]:
        shares[part] += 1
    return shares


def _add_predictions(
    strategy: AcceleratedStrategy, batch: MicroBatch, metrics: dict[str, Any]
) -> None:
    predictions = strategy.gather(strategy.predict(batch))
    references = strategy.gather(batch.labels)
    counted = references != -100
    for metric in metrics.values():
        metric.add_batch(
            predictions=predictions[counted].cpu().numpy(),
            references=references[counted].cpu().numpy(),
        )
