import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from llm.data.loader import MicroBatch
from llm.trainers.gpt.evaluation import EvaluatedPart, evaluate_parts, share_batches


class Told:
    """A strategy to which a batch's input says the loss of each of its tokens."""

    device = torch.device("cpu")

    def averaged(self):
        return contextlib.nullcontext()

    def evaluate(self, batch):
        return batch.input_ids.double().sum(), torch.tensor(batch.labels.numel())

    def reduce_sum(self, values):
        return values


def part(name, weight, loss, *, tokens=4, bytes_per_token=None):
    batch = MicroBatch(torch.full((1, tokens), loss), torch.zeros(1, tokens))
    return EvaluatedPart(name, weight, [batch], bytes_per_token)


def test_a_single_source_is_evaluated_as_it_is():
    results = evaluate_parts(Told(), [part("wiki", 1.0, 2.0, bytes_per_token=4.0)], metrics={})

    assert results == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2)),
        "bits_per_byte": pytest.approx(2 / math.log(2) / 4),
    }


def test_a_blend_has_the_mean_by_weight_and_each_source_by_name():
    """The number of tokens of a source plays no part."""
    parts = [part("wiki", 0.75, 2.0, tokens=4), part("code", 0.25, 1.0, tokens=400)]

    results = evaluate_parts(Told(), parts, metrics={})

    assert results == {
        "loss": 1.75,
        "perplexity": pytest.approx(math.exp(1.75)),
        "loss/wiki": 2.0,
        "loss/code": 1.0,
    }


def test_bits_per_byte_of_a_blend_are_its_loss_over_its_bytes():
    parts = [
        part("wiki", 0.5, 2.0, bytes_per_token=4.0),
        part("code", 0.5, 1.0, bytes_per_token=2.0),
    ]

    results = evaluate_parts(Told(), parts, metrics={})

    assert results["bits_per_byte"] == pytest.approx(1.5 / math.log(2) / 3)


def test_other_metrics_are_averaged_by_weight_too():
    values = iter([0.5, 0.25])
    metric = SimpleNamespace(add_batch=lambda **_: None, compute=lambda: {"accuracy": next(values)})
    strategy = Told()
    strategy.predict = lambda batch: batch.labels
    strategy.gather = lambda values: values

    parts = [part("wiki", 0.8, 2.0), part("code", 0.2, 1.0)]
    results = evaluate_parts(strategy, parts, metrics={"accuracy": metric})

    assert results["accuracy"] == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("max_batches", "weights", "shares"),
    [
        (10, [0.7, 0.3], [7, 3]),
        (10, [1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),
        (10, [0.99, 0.01], [9, 1]),
        (1, [0.5, 0.5], [1, 1]),
        (7, [1.0], [7]),
    ],
)
def test_batches_are_shared_out_by_weight_at_least_one_each(max_batches, weights, shares):
    assert share_batches(max_batches, weights) == shares
