"""Share of tokens that the model predicts right, as a metric of the evaluate library."""

from typing import Any

import datasets
import evaluate
import numpy as np


class NextTokenAccuracy(evaluate.Metric):  # type: ignore[misc]
    """Share of positions at which the likeliest next token is the one that follows."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of positions at which the likeliest next token is the right one.",
            citation="",
            inputs_description="predictions and references: token ids, one a position.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
