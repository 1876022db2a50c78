import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llm.data.loader import MicroBatch
from llm.errors import ConfigError
from llm.trainers.gpt.evaluation import (
    ValidationSource,
    divide_eval_batches,
    evaluate_sources,
    load_metrics,
)


class FakeStrategy:
    """A strategy under which a token's loss is its input id."""

    device = torch.device("cpu")

    def averaged(self):
        return contextlib.nullcontext()

    def evaluate(self, batch):
        return batch.input_ids.double().sum(), torch.tensor(batch.labels.numel())

    def reduce_sum(self, values):
        return values


def source(name, weight, loss, *, tokens=4, bytes_per_token=None):
    batch = MicroBatch(torch.full((1, tokens), loss), torch.zeros(1, tokens))
    return ValidationSource(name, weight, [batch], bytes_per_token)


def test_a_single_source_is_evaluated_as_it_is():
    results = evaluate_sources(
        FakeStrategy(), [source("wiki", 1.0, 2.0, bytes_per_token=4.0)], metrics={}
    )

    assert results == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2)),
        "bits_per_byte": pytest.approx(2 / math.log(2) / 4),
    }


def test_a_blend_has_the_mean_by_weight_and_each_source_by_name():
    """The number of tokens of a source plays no part."""
    sources = [source("wiki", 0.75, 2.0, tokens=4), source("code", 0.25, 1.0, tokens=400)]

    results = evaluate_sources(FakeStrategy(), sources, metrics={})

    assert results == {
        "loss": 1.75,
        "perplexity": pytest.approx(math.exp(1.75)),
        "loss/wiki": 2.0,
        "loss/code": 1.0,
    }


def test_bits_per_byte_of_a_blend_are_its_loss_over_its_bytes():
    sources = [
        source("wiki", 0.5, 2.0, bytes_per_token=4.0),
        source("code", 0.5, 1.0, bytes_per_token=2.0),
    ]

    results = evaluate_sources(FakeStrategy(), sources, metrics={})

    assert results["bits_per_byte"] == pytest.approx(1.5 / math.log(2) / 3)


def test_other_metrics_are_averaged_by_weight_too():
    values = iter([0.5, 0.25])
    metric = SimpleNamespace(add_batch=lambda **_: None, compute=lambda: {"accuracy": next(values)})
    strategy = FakeStrategy()
    strategy.predict = lambda batch: (batch.labels, None)
    strategy.gather = lambda values: values

    sources = [source("wiki", 0.8, 2.0), source("code", 0.2, 1.0)]
    results = evaluate_sources(strategy, sources, metrics={"accuracy": metric})

    assert results["accuracy"] == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("max_batches", "weights", "batches"),
    [
        (10, [0.7, 0.3], [7, 3]),
        (10, [1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),
        (10, [0.99, 0.01], [9, 1]),
        (1, [0.5, 0.5], [1, 1]),
        (7, [1.0], [7]),
    ],
)
def test_batches_are_assigned_by_weight_with_at_least_one_per_source(max_batches, weights, batches):
    assert divide_eval_batches(max_batches, weights) == batches


def test_accuracy_is_counted_over_batches_and_reset_afterwards():
    (accuracy,) = load_metrics(["accuracy"]).values()
    for _ in range(2):
        accuracy.add_batch(predictions=np.array([1, 2, 3]), references=np.array([1, 2, 4]))
        accuracy.add_batch(predictions=np.array([5]), references=np.array([6]))
        assert accuracy.compute() == {"accuracy": 0.5}


def test_a_metric_that_lacks_a_package_is_refused_with_the_librarys_reason(tmp_path):
    metric = tmp_path / "broken" / "broken.py"
    metric.parent.mkdir()
    metric.write_text("import absent_package\n")

    with pytest.raises(ConfigError, match=r"--eval_metrics .*broken .*pip install absent_package"):
        load_metrics([str(metric.parent)])


def test_a_metric_that_is_nowhere_is_refused_with_both_places(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(ConfigError, match=r"not a local folder, and the Hub .* cannot be reached"):
        load_metrics([str(tmp_path / "absent")])
