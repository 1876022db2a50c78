"""Weights divided over ranks train as the whole model does on one rank."""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from llm.data.loader import MicroBatch
from llm.models.loss import LanguageModelLoss
from llm.models.masking import disable_packing_detection
from llm.models.patches.tied_embedding import tie_gradients
from tests.support.layouts import make_optimizer, make_strategy
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values

BATCH, LENGTH, STEPS = 8, 16, 5


def make_model(family: str):
    torch.manual_seed(0)
    config = tiny_config(family)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config)
    tie_gradients(model)
    return model


def train(family: str, sizes: dict[str, int], accumulation: int):
    """Losses, norms and final weights of a few steps on the ranks of a layout."""
    disable_packing_detection()
    model = make_model(family)
    strategy = make_strategy(sizes)
    strategy.prepare(LanguageModelLoss(model), make_optimizer)
    seen = []
    for step in range(STEPS):
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
        loss = strategy.forward_backward(micro_batches, num_tokens=int((labels != -100).sum()))
        norm, skipped = strategy.optimizer_step(0.5)
        seen.append([strategy.reduce_sum(loss.clone()).item(), norm.item(), skipped.item()])
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )
    weights = strategy.full_state_dict()
    strategy.close()
    return seen, weights, held


MORE = pytest.mark.layouts


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        ("gpt2", 4, {"shard": 2}),
        ("llama", 2, {"shard": 2}),
        pytest.param("gpt2", 2, {"shard": 2}, marks=MORE),
        pytest.param("gpt2", 4, {"shard": 4}, marks=MORE),
        pytest.param("llama", 4, {"shard": 4}, marks=MORE),
        pytest.param("llama", 4, {"shard": 2}, marks=MORE),
    ],
)
def test_sharded_weights_train_as_on_one_rank(family, ranks, sizes):
    expected, whole, size = values(run_ranks(train, 1, family, {}, 1))[0]
    for accumulation in (1, 2):
        outcomes = values(run_ranks(train, ranks, family, sizes, accumulation))
        for seen, _, held in outcomes:
            assert torch.allclose(torch.tensor(seen), torch.tensor(expected), rtol=1e-5)
            assert held < 1.1 * size / sizes["shard"]
        weights = outcomes[0][1]
        assert weights.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5)


class Collectives(TorchDispatchMode):
    """Counts the collectives inside the context by their names."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(family: str, precision: str) -> dict[str, int]:
    """Collectives of one step of two micro-batches, after another one, by their names."""
    disable_packing_detection()
    strategy = make_strategy({"shard": 2}, precision)
    strategy.prepare(LanguageModelLoss(make_model(family)), make_optimizer)
    tokens = torch.randint(320, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batches = [MicroBatch(tokens[:, :-1], tokens[:, 1:])] * 2
    for _ in range(2):
        with Collectives() as collectives:
            strategy.forward_backward(batches, num_tokens=4 * LENGTH * 2)
        strategy.optimizer_step(0.5)
    strategy.close()
    return dict(collectives.counts)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_block_is_gathered_and_reduced_as_one_group(family, precision):
    """Two blocks, forward and backward, twice; all other weights are gathered once."""
    for counts in values(run_ranks(count_collectives, 2, family, precision)):
        assert counts == {
            "c10d::_allgather_base_": 2 * 2 * 2 + 1,
            "c10d::_reduce_scatter_base_": 2 * (2 + 1),
        }
