"""Layers computed by several ranks together train as the whole model does on one rank."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm.models.blocks import find_blocks
from llm.models.loss import LanguageModelLoss
from llm.models.masking import windows_are_whole
from llm.models.plans import tensor_plan
from llm.optim.groups import make_adamw
from llm.parallel.accelerated import AcceleratedStrategy, make_accelerator
from llm.parallel.layout import lay_out
from llm.parallel.sharded import ShardedStrategy
from llm.parallel.tensor import divide_layers
from llm.strategy import MicroBatch
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values

BATCH, LENGTH, STEPS = 8, 16, 4
CHANGES = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"n_head": 4, "vocab_size": 321, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gpt_neo": {"num_heads": 4, "embed_dropout": 0, "attention_dropout": 0, "resid_dropout": 0},
    "opt": {"num_attention_heads": 4, "dropout": 0, "attention_dropout": 0, "pad_token_id": 1},
}


def make_model(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **CHANGES.get(family, {})))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a bias or gain that is 0 or 1 everywhere would hide a mistake
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def make_optimizer(model):
    return make_adamw(model, learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def prepare(family: str, sizes: dict[str, int], chunked: bool):
    windows_are_whole()
    model = make_model(family)
    accelerator = make_accelerator("no", device=torch.device("cpu"))
    layout = lay_out(int(os.environ["WORLD_SIZE"]), **sizes)
    strategy = AcceleratedStrategy(accelerator=accelerator, mixed_precision="no")
    if layout.world_size > 1:
        plan = tensor_plan(model)

        def divide(mesh):
            divide_layers(model, mesh, styles=plan.styles, per_rank=plan.per_rank)

        strategy = ShardedStrategy(
            accelerator=accelerator,
            mixed_precision="no",
            layout=layout,
            blocks=find_blocks(model),
            divide_layers=divide,
        )
    strategy.prepare(LanguageModelLoss(model, chunked=chunked), make_optimizer)
    return strategy


def train(family: str, sizes: dict[str, int], accumulation: int, chunked: bool):
    """Losses, norms, an evaluation and the final weights of a few steps on a layout's ranks."""
    strategy = prepare(family, sizes, chunked)
    seen = []
    for step in range(STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, : LENGTH // 2] = -100  # an uneven number of tokens on the ranks
        size = BATCH // (strategy.data_ranks * accumulation)
        micro_batches = []
        for number in range(accumulation):
            first = (number * strategy.data_ranks + strategy.data_rank) * size
            micro_batches.append(
                MicroBatch(tokens[first : first + size, :-1], labels[first : first + size])
            )
        if step == STEPS:
            break
        loss = strategy.forward_backward(micro_batches, num_tokens=int((labels != -100).sum()))
        norm, skipped = strategy.optimizer_step(0.5)
        seen.append([strategy.reduce_sum(loss.clone()).item(), norm.item(), skipped.item()])
    evaluated = torch.stack([torch.stack(strategy.evaluate(batch)) for batch in micro_batches])
    evaluated = strategy.reduce_sum(evaluated.sum(dim=0)).tolist()
    predicted = [strategy.predict(batch) for batch in micro_batches]
    predicted = torch.cat([strategy.gather(tokens) for tokens in predicted])
    weights = strategy.full_state_dict()
    return seen, evaluated, predicted, weights


def train_in_ways(family: str, sizes: dict[str, int], ways):
    outcomes = [train(family, sizes, accumulation, chunked) for accumulation, chunked in ways]
    return outcomes


def assert_same(outcome, expected, family):
    seen, evaluated, predicted, weights = outcome
    expected_seen, expected_evaluated, expected_predicted, whole = expected
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected_seen), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        torch.tensor(evaluated), torch.tensor(expected_evaluated), rtol=1e-5, atol=0
    )
    assert (predicted == expected_predicted).float().mean() > 0.99
    if not weights:  # a rank other than the first
        return
    assert weights.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=5e-4, msg=name)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gpt_neox", "opt", "gpt_neo"])
def test_two_ranks_compute_a_layer_as_one_does(family):
    ways = [(1, True), (2, True), (1, False)]
    expected = values(run_ranks(train_in_ways, 1, family, {}, ways[:1]))[0][0]
    for outcomes in values(run_ranks(train_in_ways, 2, family, {"tensor": 2}, ways)):
        for outcome in outcomes:
            assert_same(outcome, expected, family)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("sizes", [{"tensor": 2, "shard": 2}, {"tensor": 2}, {"tensor": 4}])
def test_divided_layers_go_with_divided_weights_and_replicas(family, sizes):
    ways = [(1, True), (2, True)]
    expected = values(run_ranks(train_in_ways, 1, family, {}, ways[:1]))[0][0]
    for outcomes in values(run_ranks(train_in_ways, 4, family, sizes, ways)):
        for outcome in outcomes:
            assert_same(outcome, expected, family)
