"""Fused projections: which rows are whose, and optimizers that treat them as several matrices."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.ekfac import EKFAC
from llm.extensions.kfac.layers import find_covered_layers
from llm.extensions.matrix_optim.fused import Fusion, find_fused_weights
from llm.extensions.matrix_optim.muon import MuonAndAdamW
from llm.extensions.matrix_optim.soap import SOAP
from tests.support.models import tiny_config

SIZES = {"query": 4, "key": 2, "value": 2}
FUSIONS = [
    Fusion(sizes=SIZES),
    Fusion(sizes=SIZES, groups=3),
    Fusion(sizes=SIZES, dim=1),
    Fusion(sizes=SIZES, groups=2, dim=1),
]
_SMALL = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_GPT = {"vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16}
CONFIGS = {
    "gpt2": tiny_config("gpt2"),
    "gpt_neox": tiny_config("gpt_neox"),
    "bloom": tiny_config("bloom"),
    "falcon, one key": tiny_config("falcon"),
    "falcon, all keys": tiny_config("falcon", multi_query=False),
    "falcon, grouped": tiny_config(
        "falcon", new_decoder_architecture=True, num_attention_heads=4, num_kv_heads=2
    ),
    "phi3": transformers.Phi3Config(**_SMALL, num_key_value_heads=2),
    "persimmon": transformers.PersimmonConfig(**_SMALL),
    "mpt": transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=16),
    "bigcode": transformers.GPTBigCodeConfig(**_GPT),
    "bigcode, all keys": transformers.GPTBigCodeConfig(**_GPT, multi_query=False),
    "codegen": transformers.CodeGenConfig(**_GPT, rotary_dim=4),
}


def logits(model, first: int) -> torch.Tensor:
    """Logits after the last of some tokens, of which the first is given."""
    ids = torch.tensor([[first, 3, 5, 7]])
    return model(input_ids=ids, use_cache=False).logits[0, -1]


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_without_its_values_a_token_does_not_see_earlier_ones(kind):
    for part in ("query", "key", "value"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
        fused = {
            weight: fusion
            for weight, fusion in find_fused_weights(model).items()
            if "value" in fusion.sizes
        }
        assert len(fused) == 2
        for weight, fusion in fused.items():
            parts = fusion.split(weight.clone())
            assert {name: p.shape for name, p in parts.items()} == fusion.shapes(weight.shape)
            parts[part].zero_()
            weight.copy_(fusion.join(parts))
        blind = torch.equal(logits(model, first=1), logits(model, first=2))
        assert blind is (part == "value")


def test_gate_and_up_projections_are_apart():
    model = AutoModelForCausalLM.from_config(CONFIGS["phi3"])
    mlp = model.model.layers[0].mlp.gate_up_proj.weight
    found = find_fused_weights(model)[mlp]
    assert found == Fusion(sizes={"gate": 48, "up": 48})


def weights(fusion: Fusion) -> tuple[nn.Parameter, list[nn.Parameter]]:
    """A fused weight, and its matrices as parameters of their own."""
    outputs = fusion.groups * sum(SIZES.values())
    shape = (6, outputs) if fusion.dim else (outputs, 6)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = [nn.Parameter(part.clone()) for part in fusion.split(whole).values()]
    return nn.Parameter(whole), parts


def train(parameters: list[nn.Parameter], optimizer, gradients) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("kind", ["muon", "soap"])
def test_a_fused_weight_trains_as_its_matrices_do(kind, fusion):
    fused, parts = weights(fusion)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(fused.shape, generator=generator) for _ in range(6)]

    def make(parameters, fusions):
        groups = [{"params": parameters, "weight_decay": 0.1}]
        if kind == "muon":
            return MuonAndAdamW(groups, parameters, lr=0.01, fusions=fusions)
        sides = dict.fromkeys(parameters, (0, 1))
        return SOAP(groups, sides, lr=0.01, update_steps=1, fusions=fusions)

    train([fused], make([fused], {fused: fusion}), [[g] for g in gradients])
    train(parts, make(parts, {}), [[*fusion.split(g).values()] for g in gradients])

    # Muon computes in bf16, which magnifies rounding.
    tolerance = 1e-4 if kind == "muon" else 1e-6
    torch.testing.assert_close(
        fused, fusion.join(dict(zip(SIZES, parts, strict=True))), rtol=0, atol=tolerance
    )


class Projections(nn.Module):
    """Query, key and value of width 4 as one layer or as three, and what comes of their product."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = [nn.Linear(6, 4) for _ in range(3)]
        self.apart = nn.ModuleList([] if fused else own)
        if fused:
            self.together = nn.Linear(6, 12)
            self.together.weight.data = torch.cat([layer.weight for layer in own]).data
            self.together.bias.data = torch.cat([layer.bias for layer in own]).data

    def forward(self, inputs):
        outputs = [layer(inputs) for layer in self.apart] or self.together(inputs).split(4, -1)
        query, key, value = outputs
        return torch.tanh(query * key) * value


def test_kfac_gives_fused_projections_a_factor_each():
    models = [Projections(fused=fused) for fused in (True, False)]
    fusion = Fusion(sizes={"query": 4, "key": 4, "value": 4})
    for model in models:
        generator = torch.Generator().manual_seed(0)
        coverage = find_covered_layers(
            model,
            fusions={model.together.weight: fusion} if model is models[0] else None,
            sample_forward=lambda module: module(torch.zeros(1, 6)),
        )
        curvature = Curvature(coverage, factor_update_steps=1, inv_update_steps=2)
        optimizer = EKFAC([{"params": list(model.parameters())}], curvature, lr=0.01)
        for _ in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(32, 6, generator=generator)
            with curvature.capture_stats(token_weight=1 / 32):
                (model(inputs).square().sum() / 32).backward()
            optimizer.step()
        assert [factor.widths for factor in curvature.factors] == [[7], [4], [4], [4]]

    together, apart = models[0].together, models[1].apart
    expected = torch.cat([layer.weight for layer in apart])
    torch.testing.assert_close(together.weight, expected, rtol=1e-5, atol=1e-6)
    expected = torch.cat([layer.bias for layer in apart])
    torch.testing.assert_close(together.bias, expected, rtol=1e-5, atol=1e-6)


def test_gpt2_has_no_block_border_inside_a_key():
    model = AutoModelForCausalLM.from_config(CONFIGS["gpt2"])
    fusions = find_fused_weights(model)
    curvature = Curvature(find_covered_layers(model, fusions=fusions), max_dim=64)
    widths = {factor.name: factor.widths for factor in curvature.factors}
    name = "transformer.h.0.attn.c_attn"
    assert widths[f"{name}.key.G"] == [32]
    assert widths[f"{name}.query.A"] == [33]
    assert f"{name}.key.A" not in widths
    assert widths["transformer.h.0.mlp.c_fc.G"] == [64, 64]
