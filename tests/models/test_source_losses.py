"""Sums of token losses by source: exact, and without a change to what is trained."""

import math

import pytest
import torch

from llm.models.loss import LanguageModelLoss, sum_losses_by_source
from tests.support.models import tiny_config, tiny_model
from tests.support.operations import Reads

SOURCES = torch.tensor([2, 0, 2])


def batch():
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(320, (3, 21), generator=generator)
    labels = torch.randint(320, (3, 21), generator=generator)
    labels[0, :5] = -100
    return input_ids, labels


def test_losses_and_labels_are_summed_by_the_source_of_their_sample():
    losses = torch.tensor([[0.5, 1.0], [2.0, 0.0], [8.0, 16.0]])
    labels = torch.tensor([[1, 1], [1, -100], [1, 1]])

    sums = sum_losses_by_source(losses.flatten(), labels, SOURCES, num_sources=4)

    assert sums.dtype == torch.float64
    assert sums.tolist() == [[2.0, 1], [0.0, 0], [25.5, 4], [0.0, 0]]


def test_a_loss_that_is_not_finite_stays_with_its_source():
    losses = torch.tensor([1.0, math.inf, 2.0])
    sums = sum_losses_by_source(
        losses, torch.ones(3, 1).long(), torch.tensor([0, 1, 0]), num_sources=2
    )
    assert sums.tolist() == [[3.0, 2], [math.inf, 1]]


@pytest.mark.parametrize("chunked", [True, False])
def test_the_sums_are_those_of_each_sources_own_samples(chunked):
    model = tiny_model(tiny_config("gpt2"))
    loss = LanguageModelLoss(model, is_chunked=chunked, sources=["a", "b", "c"]).eval()
    input_ids, labels = batch()

    _, found = loss(input_ids, labels, None, None, SOURCES)
    sums = found[1:].view(3, 2)

    assert loss.names == ("loss", "loss/a", "#loss/a", "loss/b", "#loss/b", "loss/c", "#loss/c")
    for source in (0, 2):
        mine = source == SOURCES
        _, alone = loss(input_ids[mine], labels[mine])
        assert sums[source, 0].item() == pytest.approx(alone[0].item(), rel=1e-6)
    assert sums[:, 1].tolist() == [21, 0, 37]
    _, whole = loss(input_ids, labels)
    assert found[0].item() == pytest.approx(whole[0].item(), rel=1e-6)
    assert whole[1:].tolist() == [0.0] * 6


@pytest.mark.parametrize("chunked", [True, False])
def test_objective_and_gradients_have_the_same_bits_with_and_without(chunked):
    model = tiny_model(tiny_config("gpt2")).eval()
    loss = LanguageModelLoss(model, is_chunked=chunked, sources=["a", "b", "c"])
    input_ids, labels = batch()
    found = []
    for sources in (None, SOURCES):
        model.zero_grad()
        with Reads() as reads:
            objective, _ = loss(input_ids, labels, None, None, sources)
            objective.backward()
        assert reads.seen == []
        found.append([objective.detach(), *(p.grad.clone() for p in model.parameters())])
    # The full logits' sum may round differently; what is trained may not.
    assert all(map(torch.equal, found[0][1:], found[1][1:]))
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-6)
