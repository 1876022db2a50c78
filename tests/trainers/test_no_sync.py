"""Nothing in a step waits for the device: no value is read from a tensor between two logs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from tests.support.families import every_family
from tests.support.layouts import make_data_parallel, share
from tests.support.models import tiny_config
from tests.support.operations import Reads
from tests.support.ranks import run_ranks, values


def reads_of_a_step(mixed_precision: str) -> list[str]:
    from llm.metrics.meter import Meter

    strategy = make_data_parallel(mixed_precision)
    meter = Meter(strategy.device, rank=0)
    for step in range(2):
        micro_batches, num_tokens = share(step, strategy, 2)
        with Reads() as reads:
            strategy.set_learning_rate(1e-3)
            loss_sum = strategy.forward_backward(micro_batches, num_tokens=num_tokens)
            grad_norm, skipped = strategy.optimizer_step(1.0)
            meter.add(0, loss_sum, num_tokens, grad_norm=grad_norm, skipped=skipped)
    return reads.seen


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_a_step_reads_no_value_from_the_device(mixed_precision):
    assert values(run_ranks(reads_of_a_step, 1, mixed_precision)) == [[]]


@every_family
def test_no_family_reads_a_value_in_forward_or_backward(family):
    disable_packing_detection()
    loss = LanguageModelLoss(AutoModelForCausalLM.from_config(tiny_config(family)))
    tokens = torch.randint(300, (2, 17))
    with Reads() as reads:
        objective, _ = loss(tokens[:, :-1], tokens[:, 1:])
        objective.backward()
    assert reads.seen == []


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_documents_are_kept_apart_without_a_read(family):
    disable_packing_detection()
    loss = LanguageModelLoss(AutoModelForCausalLM.from_config(tiny_config(family)))
    tokens = torch.randint(300, (2, 17))
    places = torch.arange(16).expand(2, 16)
    positions, documents = places % 5, places // 5
    with Reads() as reads:
        objective, _ = loss(tokens[:, :-1], tokens[:, 1:], positions, documents)
        objective.backward()
    assert reads.seen == []


def reads_of_a_read() -> list[str]:
    with Reads() as reads:
        float(torch.ones(2).sum())
    return reads.seen


def test_a_read_from_the_device_is_detected():
    assert reads_of_a_read() == ["_local_scalar_dense"]
