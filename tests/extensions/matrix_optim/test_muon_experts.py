"""Muon on a mixture of experts: each expert's matrices are trained as if they were alone."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from llm.extensions.matrix_optim.muon import make_muon
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.support.checkpoints import load_strategy, save_strategy
from tests.support.matrix_runs import make_strategy, train, whole_weights
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values

OPTIONS = GPTConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95))


def gpt_oss():
    """Experts of [inputs, outputs], where gates and ups alternate, with biases."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config)


def mixtral():
    """Experts of [outputs, inputs]; the gates come first, then the ups."""
    return still_model("mixtral", num_hidden_layers=1, intermediate_size=24, hidden_size=16)


def matrices_of(name, stack):
    """Return the matrices [outputs, inputs] in a stack of experts, by expert and half."""
    for number, expert in enumerate(stack):
        if name == "gate_up_proj":
            yield (number, "gate"), expert[:24]
            yield (number, "up"), expert[24:]
        else:
            yield (number, ""), expert


def matrices_of_gpt_oss(name, stack):
    """Return the matrices of [inputs, outputs] stacks as [outputs, inputs]."""
    for number, expert in enumerate(stack):
        if name == "gate_up_proj":
            yield (number, "gate"), expert[:, 0::2].mT
            yield (number, "up"), expert[:, 1::2].mT
        else:
            yield (number, ""), expert.mT


@pytest.mark.parametrize(
    ("make", "divide"), [(mixtral, matrices_of), (gpt_oss, matrices_of_gpt_oss)]
)
@pytest.mark.parametrize("cost", [0, 2**26], ids=["one by one", "stacked as on a GPU"])
def test_each_matrix_of_an_expert_gets_torchs_muon_alone(make, divide, cost, monkeypatch):
    for module in ("muon", "matrix_owners"):
        name = f"llm.extensions.matrix_optim.{module}.min_batch_cost"
        monkeypatch.setattr(name, lambda device: cost)
    monkeypatch.setattr("llm.extensions.matrix_optim.muon.has_half_products", lambda device: True)
    model = make()
    experts = model.model.layers[0].mlp.experts
    alone = {
        (name, *key): torch.nn.Parameter(matrix.detach().clone())
        for name in ("gate_up_proj", "down_proj")
        for key, matrix in divide(name, getattr(experts, name))
    }
    assert len(alone) == 4 * 3
    optimizer = make_muon(OPTIONS, model)
    reference = torch.optim.Muon(
        alone.values(), lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(experts, name)
            stack.grad = torch.randn(stack.shape, generator=generator)
            for key, gradient in divide(name, stack.grad):
                alone[name, *key].grad = gradient.contiguous()
        optimizer.step()
        reference.step()
    for name in ("gate_up_proj", "down_proj"):
        for key, matrix in divide(name, getattr(experts, name)):
            torch.testing.assert_close(matrix, alone[name, *key], rtol=0, atol=1e-3)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_routers_and_the_biases_of_experts_stay_with_adamw(make):
    model = make()
    optimizer = make_muon(OPTIONS, model)
    muons = {p for group in optimizer.param_groups if group["is_muon"] for p in group["params"]}
    adamws = {name for name, p in model.named_parameters() if p.ndim > 1 and p not in muons}
    assert {name.rpartition("layers.0.")[2] for name in adamws} <= {
        "mlp.gate.weight",
        "mlp.router.weight",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
        "model.embed_tokens.weight",
        "lm_head.weight",
    }


def run_muon(kind, sizes):
    """Return losses, weights, and the elements of a rank's momentum of experts."""
    strategy = make_strategy(kind, sizes, still_model("mixtral"))
    losses = train(strategy, range(3), accumulation=1, clip=0.0)
    momentum = [
        state["momentum_buffer"].numel()
        for p, state in strategy.optimizer.state.items()
        if p.ndim == 3
    ]
    weights = whole_weights(strategy)
    strategy.close()
    return losses, weights, sum(momentum)


@pytest.mark.parametrize("kind", ["muon", pytest.param("normuon", marks=pytest.mark.extended)])
def test_a_rank_updates_the_experts_of_its_shard_bit_for_bit(kind):
    """They are whole in its shard, so that no other rank has to own them."""
    shards, replicas = (
        values(run_ranks(run_muon, 2, kind, sizes)) for sizes in ({"shard": 2}, None)
    )
    assert shards[0][0] == replicas[0][0]
    for name, weight in replicas[0][1].items():
        assert torch.equal(shards[0][1][name], weight), name
    assert [momentum for *_, momentum in shards] == [replicas[0][2] // 2] * 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"optimizer": "muon"}, "muon: trains the 24 matrices of experts one by one"),
        ({"optimizer": "soap"}, "soap: adamw trains the experts, which have 64.5% of the weights"),
        ({"kfac": True}, "In 4 of them, stacks of experts, all experts share two factors."),
    ],
)
def test_the_log_says_what_trains_the_experts(options, line):
    model = still_model("mixtral")
    config = GPTConfig(learning_rate=1e-3, **options)
    factory = choose_factory(config, make_extensions(config), seed=0)
    factory.inspect_model(model)
    assert line in factory.make(model, None).describe()


def run_soap(sizes):
    strategy = make_strategy("soap", sizes, still_model("mixtral"))
    train(strategy, range(3), accumulation=1, clip=0.0)
    weights = whole_weights(strategy)
    strategy.close()
    return weights


def test_soap_trains_experts_as_adamw_does_on_shards_and_on_replicas():
    """Its bases are for single matrices: an expert without a token would have none."""
    shards, replicas = (values(run_ranks(run_soap, 2, sizes))[0] for sizes in ({"shard": 2}, None))
    for name, weight in replicas.items():
        assert torch.equal(shards[name], weight), name


def saved_and_trained_on(kind, sizes, folder):
    strategy = make_strategy(kind, sizes, still_model("mixtral"))
    train(strategy, range(3))
    save_strategy(strategy, folder, 3)
    train(strategy, range(3, 5))
    weights = whole_weights(strategy)
    strategy.close()
    return weights


def loaded_and_saved(kind, sizes, folder, copy):
    strategy = make_strategy(kind, sizes, still_model("mixtral"))
    load_strategy(strategy, folder)
    save_strategy(strategy, copy, 3)
    train(strategy, range(3, 5))
    weights = whole_weights(strategy)
    strategy.close()
    return weights


@pytest.mark.parametrize("kind", ["muon", pytest.param("normuon", marks=pytest.mark.extended)])
def test_moments_of_experts_resume_exactly_on_other_layouts(kind, tmp_path):
    first, again, alone = (tmp_path / name for name in ("first", "again", "alone"))
    straight = values(run_ranks(saved_and_trained_on, 2, kind, {"shard": 2}, first))[0]
    values(run_ranks(loaded_and_saved, 1, kind, {}, first, alone))
    resumed = values(run_ranks(loaded_and_saved, 2, kind, {"shard": 2}, alone, again))[0]
    for name, weight in straight.items():
        assert torch.equal(resumed[name], weight), name
