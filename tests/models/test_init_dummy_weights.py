"""A model without memory is asked what it computes, with weights that are made up."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from llm.errors import ConfigError
from llm.models.attention import check_documents_apart
from llm.models.init import dummy_weights
from llm.parallel.pipeline.stage import check_cut
from tests.support.families import every_family
from tests.support.models import remember_across_layers, tiny_config, tiny_model

CPU, META = torch.device("cpu"), torch.device("meta")


def answer(check, model) -> str | None:
    try:
        check(model)
    except ConfigError as error:
        return str(error)
    return None


def keeps_attention_apart(model):
    check_documents_apart(model, positions=False, attention=True)


def takes_positions(model):
    check_documents_apart(model, positions=True, attention=False)


@every_family
def test_checks_of_a_family_give_the_same_result_without_weights(family):
    real = tiny_model(tiny_config(family))
    bare = tiny_model(tiny_config(family), device=META)
    for check in (keeps_attention_apart, takes_positions, lambda model: check_cut(model, 2)):
        with dummy_weights(bare, CPU):
            answered = answer(check, bare)
        assert answered == answer(check, real)


def test_layers_that_share_other_tensors_are_detected_without_weights():
    model = tiny_model(tiny_config("llama"), device=META)
    remember_across_layers(model)
    with (
        dummy_weights(model, CPU),
        pytest.raises(ConfigError, match="cannot cut llama into stages"),
    ):
        check_cut(model, 2)


def test_dummy_weights_leave_the_model_unchanged_and_keep_ties():
    model = tiny_model(tiny_config("gpt2"), device=META)
    before = dict(model.named_parameters(remove_duplicate=False))
    with dummy_weights(model, CPU):
        assert model.lm_head.weight is model.transformer.wte.weight
        assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
        assert all(
            p.shape == before[name].shape and p.requires_grad == before[name].requires_grad
            for name, p in model.named_parameters()
        )
    assert all(p is before[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert all(buffer.is_meta for buffer in model.buffers())


def test_checks_of_a_7b_model_allocate_no_weights():
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    )
    model = tiny_model(config, device=META)
    with dummy_weights(model, CPU):
        stored = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    assert sum(p.numel() for p in model.parameters()) > 6.5e9
    assert sum(storage.nbytes() for storage in stored.values()) < 20e6


def test_a_model_with_weights_keeps_them():
    model = nn.Linear(2, 2)
    weight = model.weight
    with dummy_weights(model, CPU):
        assert model.weight is weight
