"""muP's factors, the weights that they give, and a training with the multipliers in the forward."""

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llm.errors import ConfigError
from llm.extensions.mup.mup_scales import Scales
from llm.extensions.mup.options import MuPExtension
from llm.models.shapes import SHAPED
from llm.models.sizes import find_blocks
from llm.optim.groups import scale_learning_rates
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import Run, choose_factory, make_extensions
from tests.support.models import (
    FAMILIES,
    export_to,
    moved_from_its_start,
    tiny_config,
    tiny_model,
)

# A model of 4 times the width and 4 times the layers of its base: initial deviation, AdamW's rate
# and Muon's. GPT-2 starts its projections by depth itself: 0.25 instead of 0.125.
GPT2 = {
    "transformer.wte.weight": (2, 1, 1, 1),
    "transformer.wpe.weight": (2, 1, 1, 1),
    "transformer.h.0.ln_1.weight": (1, 1, 1, 1),
    "transformer.h.0.attn.c_attn.weight": (2, 0.5, 0.25, 0.5),
    "transformer.h.0.attn.c_attn.bias": (1, 1, 1, 1),
    "transformer.h.0.attn.c_proj.weight": (2, 0.25, 0.0625, 0.125),
    "transformer.h.0.attn.c_proj.bias": (1, 0.5, 0.25, 0.25),
    "transformer.h.11.mlp.c_fc.weight": (2, 0.5, 0.25, 0.5),
    "transformer.h.11.mlp.c_proj.weight": (2, 0.25, 0.0625, 0.125),
    "transformer.ln_f.weight": (1, 0.25, 0.25, 0.25),
    "transformer.ln_f.bias": (1, 0.25, 0.25, 0.25),
    "lm_head.weight": (2, 1, 1, 1),
}
LLAMA = {
    "model.embed_tokens.weight": (2, 1, 1, 1),
    "model.layers.0.input_layernorm.weight": (1, 1, 1, 1),
    "model.layers.0.self_attn.q_proj.weight": (2, 0.5, 0.25, 0.5),
    "model.layers.0.self_attn.o_proj.weight": (2, 0.125, 0.0625, 0.125),
    "model.layers.0.mlp.gate_proj.weight": (2, 0.5, 0.25, 0.5),
    "model.layers.0.mlp.down_proj.weight": (2, 0.125, 0.0625, 0.125),
    "model.norm.weight": (1, 0.25, 0.25, 0.25),
    "lm_head.weight": (2, 1, 1, 1),
}
NEOX = {
    "gpt_neox.embed_in.weight": (2, 1, 1, 1),
    "gpt_neox.layers.0.attention.query_key_value.weight": (2, 0.5, 0.25, 0.5),
    "gpt_neox.layers.0.attention.dense.weight": (2, 0.125, 0.0625, 0.125),
    "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": (2, 0.5, 0.25, 0.5),
    "gpt_neox.layers.0.mlp.dense_4h_to_h.bias": (1, 0.25, 0.25, 0.25),
    "gpt_neox.final_layer_norm.bias": (1, 0.25, 0.25, 0.25),
    "embed_out.weight": (2, 1, 1, 1),
}
CASES = [
    (family, name, *expected)
    for family, table in (("gpt2", GPT2), ("llama", LLAMA), ("gpt_neox", NEOX))
    for name, expected in table.items()
]
# Half the width, one layer and half the head of the tiny models.
HALF = {"mup": True, "mup_base_width": 16, "mup_base_num_layers": 1, "mup_base_head_dim": 8}


def scaled_model(config: PreTrainedConfig, **options) -> PreTrainedModel:
    """The tiny model under muP."""
    return tiny_model(
        config, transforms=[MuPExtension(GPTConfig(**options)).make_transform(config)]
    )


@pytest.mark.parametrize(("family", "name", "ndim", "deviation", "adamw", "muon"), CASES)
def test_each_kind_of_weight_has_its_deviation_and_its_rates(
    family, name, ndim, deviation, adamw, muon
):
    scales = Scales(width_ratio=4, depth_ratio=4, has_depth_scaled_init=family == "gpt2")
    assert scales.deviation_factor(name, ndim) == deviation
    assert scales.rate_factor(name, ndim, {}) == adamw
    assert scales.rate_factor(name, ndim, {"is_muon": True}) == muon


def test_a_models_scales_are_its_sizes_over_those_of_the_base_model():
    options = GPTConfig(**HALF)
    scales = MuPExtension(options).make_transform(
        tiny_config("gpt2", n_embd=64, n_head=2, n_layer=6)
    )
    assert scales == Scales(
        width_ratio=4, depth_ratio=6, attention_factor=0.5, has_depth_scaled_init=True
    )
    wider = MuPExtension(options).make_transform(tiny_config("qwen3"))
    assert wider == Scales(width_ratio=2, depth_ratio=2, attention_factor=0.5**0.5)
    assert MuPExtension(GPTConfig()).make_transform(tiny_config("opt")) is None


@pytest.mark.parametrize("family", SHAPED)
def test_at_the_base_width_a_model_starts_as_without_mup(family):
    plain = tiny_model(tiny_config(family)).state_dict()
    base = scaled_model(
        tiny_config(family), mup=True, mup_base_width=32, mup_base_num_layers=2
    ).state_dict()
    assert all(torch.equal(base[name], weight) for name, weight in plain.items())


@pytest.mark.parametrize("family", SHAPED)
def test_initial_weights_are_the_librarys_times_their_factor(family):
    plain = dict(tiny_model(tiny_config(family)).named_parameters())
    model = scaled_model(tiny_config(family), **HALF)
    scales = Scales(width_ratio=2, depth_ratio=2, has_depth_scaled_init=family == "gpt2")
    changed = set()
    for name, parameter in model.named_parameters():
        factor = scales.deviation_factor(name, parameter.ndim)
        torch.testing.assert_close(parameter, factor * plain[name])
        changed |= {name} if factor != 1 else set()
    # All matrices of the layers, and the last norm.
    assert len(changed) >= 4 * 2 + 1
    assert not any("emb" in name or "wte" in name or "head" in name for name in changed)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", SHAPED)
def test_an_export_has_the_logits_of_the_model_in_training(family, tied, tmp_path):
    model = scaled_model(tiny_config(family, tie_word_embeddings=tied), **HALF)
    moved_from_its_start(model, by=0.3)
    ids = torch.arange(20).view(2, 10)
    logits = {}
    for factor in (0.5**0.5, 1.0):
        export_to(tmp_path, model, transforms=[Scales(attention_factor=factor)])
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        logits[factor] = loaded(ids).logits
    torch.testing.assert_close(logits[0.5**0.5], model(ids).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[1.0], model(ids).logits, rtol=1e-3, atol=1e-3)


def with_multipliers(model: torch.nn.Module, scales: Scales) -> torch.nn.Module:
    """The same function, with the factors of logits and branches in the forward pass."""
    other = copy.deepcopy(model)
    last_norm = other.transformer.ln_f if hasattr(other, "transformer") else other.model.norm
    outputs = [
        (module, scales.depth_ratio)
        for block in find_blocks(other)
        for name, module in block.named_modules()
        if name.endswith(("c_proj", "o_proj", "down_proj"))
    ]
    for module, divisor in (*outputs, (last_norm, scales.width_ratio)):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter *= divisor
        module.register_forward_hook(lambda _, __, output, divisor=divisor: output / divisor)
    return other


@pytest.mark.parametrize("hyperball", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_trains_as_one_with_multipliers_in_the_forward_pass(family, optimizer, hyperball):
    """The factors of tables 8 and 1 of the two papers, instead of ours in the weights."""
    scales = Scales(width_ratio=2, depth_ratio=2, has_depth_scaled_init=family == "gpt2")
    folded = scaled_model(tiny_config(family), **HALF).eval().double()
    multiplied = with_multipliers(folded, scales)
    settings = GPTConfig(
        optimizer=optimizer,
        hyperball=hyperball,
        learning_rate=1e-2,
        weight_decay=0.1,
        eps=1e-300,
    )

    def rate_in_the_papers(name: str, ndim: int, group: dict) -> float:
        if ndim != 2 or not (".h." in name or ".layers." in name):
            return 1.0
        rate = 0.5**0.5 if group.get("is_muon") else 0.5
        # The initial deviation of 0.5 ** 0.5 is in Hyperball's steps.
        return rate / 0.5**0.5 if hyperball else rate

    ids = torch.randint(320, (4, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for model, factor_of in ((folded, scales.rate_factor), (multiplied, rate_in_the_papers)):
        stepper = (
            choose_factory(settings, make_extensions(settings), seed=0).make(model, None).optimizer
        )
        scale_learning_rates(stepper, model, factor_of)
        losses.append([])
        for _ in range(6):
            loss = model(ids, labels=ids).loss
            losses[-1].append(loss.item())
            stepper.zero_grad()
            loss.backward()
            stepper.step()
    assert losses[0][5] < losses[0][0] - 0.1
    # Newton-Schulz computes in bfloat16.
    assert losses[0] == pytest.approx(losses[1], rel=1e-9 if optimizer == "adamw" else 1e-3)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SHAPED])
def test_other_families_are_refused_by_name(family):
    options = GPTConfig(mup=True, mup_base_width=16)
    with pytest.raises(ConfigError, match=rf"--mup is for gpt2, .* this model is {family}"):
        MuPExtension(options).make_transform(tiny_config(family))


@pytest.mark.parametrize(
    ("changes", "weights_from", "sentence"),
    [
        ({"mup_base_width": 24}, None, "--mup_base_width 24 cannot be divided into heads of 16"),
        (
            {"mup_base_width": 16, "mup_base_head_dim": 5},
            None,
            "--mup_base_width 16 cannot be divided into heads of 5",
        ),
        ({"mup_base_width": 16}, "gpt2", "gpt2 has trained ones; add --from_scratch"),
    ],
)
def test_a_base_model_that_cannot_be_and_trained_weights_are_refused(
    changes, weights_from, sentence
):
    given = {"model_config": tiny_config("gpt2"), "weights_from": weights_from}
    run = Run(**dict.fromkeys(field.name for field in dataclasses.fields(Run)) | given)
    with pytest.raises(ConfigError, match=sentence):
        MuPExtension(GPTConfig(mup=True, **changes)).prepare_run(run)
