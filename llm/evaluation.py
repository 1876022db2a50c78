"""Loss, perplexity, bits per byte and accuracy of a validation split."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from llm.errors import ConfigError
from llm.strategy import MicroBatch, Strategy

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
    strategy: Strategy,
    batches: Iterable[MicroBatch],
    *,
    bytes_per_token: float | None,
    metrics: dict[str, Any],
) -> dict[str, float]:
    """Evaluate on all ranks; every token counts once, whatever the batches and ranks.

    Args:
        strategy: The prepared model.
        batches: This rank's share; all ranks have the same number of batches.
        bytes_per_token: UTF-8 bytes of the text that a token stands for on average.
        metrics: Metrics of the evaluate library by name.

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
    loss_sum, num_tokens = strategy.reduce_sum(totals)
    loss = float(loss_sum / num_tokens)
    results = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    if bytes_per_token:
        results["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    for metric in metrics.values():
        results.update(metric.compute())
    return results


def _add_predictions(strategy: Strategy, batch: MicroBatch, metrics: dict[str, Any]) -> None:
    input_ids, labels = batch
    predictions = strategy.gather(strategy.predict(input_ids))
    references = strategy.gather(labels)
    counted = references != -100
    for metric in metrics.values():
        metric.add_batch(
            predictions=predictions[counted].cpu().numpy(),
            references=references[counted].cpu().numpy(),
        )
