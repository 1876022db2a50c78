"""Models are cut into stages that compute together what the whole model does."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm.errors import ConfigError
from llm.models.init import copy_to_meta
from llm.models.loss import LanguageModelLoss
from llm.models.sizes import parameter_counts
from llm.parallel.pipeline.split import assign_layers, find_pipeline_modules
from llm.parallel.pipeline.stage import check_cut, cut_model
from tests.support.models import FAMILIES, remember_across_layers, tiny_config, tiny_model


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_mixture_of_experts_is_cut_before_it_has_weights(family):
    outline = tiny_model(tiny_config(family), device=torch.device("meta"))
    kernel = outline.config._experts_implementation

    modules = find_pipeline_modules(outline)

    assert modules.layers == tuple(outline.model.layers)
    assert modules.epilogue == (outline.model.norm, outline.lm_head)
    assert outline.config._experts_implementation == kernel == "grouped_mm"


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_stages_of_every_family_pass_the_whole_gradient(family):
    model = tiny_model(tiny_config(family)).eval()
    loss = LanguageModelLoss(model)
    ids = torch.randint(320, (2, 12), generator=torch.Generator().manual_seed(0))
    objective, _ = loss(ids, ids)
    objective.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    first, last = cut_model(find_pipeline_modules(model), loss, 2, [0, 1]).stages
    sent = first(ids, input_ids=ids, labels=ids)
    received = sent.detach().requires_grad_()
    staged, _ = last(received, input_ids=ids, labels=ids)
    staged.backward()
    sent.backward(received.grad)

    torch.testing.assert_close(staged, objective)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name])


def test_a_stage_knows_its_parameters_by_their_names_in_the_whole_model():
    model = tiny_model(tiny_config("gpt2", n_layer=3))
    names = dict(model.named_parameters())
    held = []
    for number in range(3):
        cut = cut_model(find_pipeline_modules(model), LanguageModelLoss(model), 3, [number])
        part = dict(cut.model.named_parameters())
        assert all(part[name] is names[name] for name in part)
        held.append(set(part))
        assert cut.num_parameters[number] == sum(p.numel() for p in part.values())
        assert cut.tied == ({"transformer.wte.weight"} if number != 1 else set())
    assert held[0] | held[1] | held[2] == set(names)
    assert held[0] & held[2] == {"transformer.wte.weight"}
    assert not held[0] & held[1]


def test_the_model_that_was_cut_is_as_it_was():
    model = tiny_model(tiny_config("llama"))
    before = [(name, id(module)) for name, module in model.named_modules()]
    cut_model(find_pipeline_modules(model), LanguageModelLoss(model), 2, [1])
    assert [(name, id(module)) for name, module in model.named_modules()] == before


def test_a_stage_does_not_compute_sharded_layers_of_other_stages():
    model = tiny_model(tiny_config("llama"))
    pieces, whole = find_pipeline_modules(model), LanguageModelLoss(model)

    def forward(ids):
        raise AssertionError("the other stage's embedding, which has no weights here")

    model.get_input_embeddings().forward = forward  # as tensor parallelism divides it
    (last,) = cut_model(pieces, whole, 2, [1]).stages
    ids = torch.zeros(1, 4, dtype=torch.long)

    loss, _ = last(torch.ones(1, 4, model.config.hidden_size), input_ids=ids, labels=ids)

    assert torch.isfinite(loss)


def test_positions_and_documents_reach_every_stage():
    model = tiny_model(tiny_config("llama")).eval()
    loss = LanguageModelLoss(model)
    ids = torch.randint(320, (2, 12), generator=torch.Generator().manual_seed(0))
    places = torch.arange(12).expand(2, 12)
    apart = {"positions": places % 6, "documents": places // 6}
    expected, _ = loss(ids, ids, **apart)
    first, last = cut_model(find_pipeline_modules(model), loss, 2, [0, 1]).stages
    _, together = last(first(ids, input_ids=ids, labels=ids), input_ids=ids, labels=ids)
    _, staged = last(
        first(ids, input_ids=ids, labels=ids, **apart), input_ids=ids, labels=ids, **apart
    )
    torch.testing.assert_close(staged, expected.detach()[None])
    assert abs(staged - together) > 1e-3


def test_layers_of_other_stages_are_freed_with_the_model():
    model = tiny_model(tiny_config("llama", num_hidden_layers=4))
    layers = [weakref.ref(layer) for layer in model.model.layers]
    loss = LanguageModelLoss(model)
    cut = cut_model(find_pipeline_modules(model), loss, 2, [1])
    last_reference = model
    del model, loss
    gc.collect()
    assert all(layer() for layer in layers)

    del last_reference
    gc.collect()

    assert [layer() is not None for layer in layers] == [n in cut.layers[1] for n in range(4)]


def test_a_model_whose_layers_share_more_than_their_output_is_refused():
    model = tiny_model(tiny_config("llama"))
    remember_across_layers(model)
    with pytest.raises(ConfigError, match="cannot cut llama into stages"):
        check_cut(model, 2)


def test_a_model_without_weights_is_cut_alike():
    config = tiny_config("gpt2", n_layer=4)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config)
    cuts = [
        cut_model(find_pipeline_modules(model), LanguageModelLoss(model, is_chunked=True), 2, [1])
        for model in (tiny_model(config), bare)
    ]
    assert cuts[0].layers == cuts[1].layers
    assert cuts[0].tied == cuts[1].tied
    assert [*cuts[0].model.state_dict()] == [*cuts[1].model.state_dict()]


@pytest.mark.parametrize(
    ("costs", "first", "last", "stages", "expected"),
    [
        ([1] * 4, 0, 0, 2, [2, 2]),
        ([1] * 6, 0, 0, 4, [1, 1, 2, 2]),
        ([1] * 12, 0.5, 5, 2, [8, 4]),
        ([1] * 10, 1, 1, 4, [2, 3, 3, 2]),
        ([1, 1, 4, 1, 1], 0, 0, 3, [2, 1, 2]),
        ([1] * 4, 0, 100, 4, [1, 1, 1, 1]),
    ],
)
def test_the_assignment_minimises_the_cost_of_the_slowest_stage(
    costs, first, last, stages, expected
):
    shares = assign_layers(costs, prologue_cost=first, epilogue_cost=last, num_stages=stages)
    assert [len(share) for share in shares] == expected
    assert shares[0].start == 0
    assert shares[-1].stop == len(costs)
    assert all(one.stop == next_.start for one, next_ in pairwise(shares))


def test_a_model_without_weights_has_the_same_parameter_counts():
    model = tiny_model(tiny_config("gpt2"), no_bias=True)
    bare = copy_to_meta(model)
    assert parameter_counts(bare) == parameter_counts(model)
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    assert bare.lm_head.weight is bare.transformer.wte.weight
    assert {p.device.type for p in model.parameters()} == {"cpu"}
