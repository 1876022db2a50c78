"""Weights divided over ranks train as the whole model does on one rank."""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor

from llm.data.loader import MicroBatch
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.models.mixtures import find_routers
from llm.models.patches.tied_embedding import tie_gradients
from llm.models.sizes import find_blocks
from llm.optim.run_optimizer import OptimizerFactory
from tests.support.layouts import make_optimizer, make_strategy
from tests.support.models import still_model, tiny_config, tiny_model
from tests.support.operations import Messages
from tests.support.ranks import run_ranks, values

BATCH, LENGTH, STEPS = 8, 16, 5


def make_model(family: str):
    model = still_model(family)
    tie_gradients(model)
    return model


def train(family: str, sizes: dict[str, int], accumulation: int, unsharded: bool = False):
    """Losses, norms and final weights of a few steps on the ranks of a layout."""
    disable_packing_detection()
    model = make_model(family)
    strategy = make_strategy(sizes, unsharded_gradients=unsharded)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
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
    weights = strategy.gather_full_state_dict()
    strategy.close()
    return seen, weights, held


MORE = pytest.mark.layouts


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        pytest.param("gpt2", 4, {"shard": 2}, marks=pytest.mark.extended),
        pytest.param("llama", 2, {"shard": 2}, marks=MORE),
        ("gpt2", 2, {"shard": 2}),
        pytest.param("gpt2", 4, {"shard": 4}, marks=MORE),
        pytest.param("llama", 4, {"shard": 4}, marks=MORE),
        pytest.param("llama", 4, {"shard": 2}, marks=MORE),
    ],
)
def test_sharded_weights_train_as_on_one_rank(family, ranks, sizes):
    expected, whole, size = values(run_ranks(train, 1, family, {}, 1))[0]
    for accumulation, unsharded in ((1, False), (2, False), (2, True)):
        outcomes = values(run_ranks(train, ranks, family, sizes, accumulation, unsharded))
        for seen, _, held in outcomes:
            assert torch.allclose(torch.tensor(seen), torch.tensor(expected), rtol=1e-5)
            assert held < 1.1 * size / sizes["shard"]
        weights = outcomes[0][1]
        assert weights.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5)


def train_padding(sizes: dict[str, int]) -> torch.Tensor:
    """The embedding of the padding token after a step on a text that contains it."""
    disable_packing_detection()
    model = tiny_model(tiny_config("llama", pad_token_id=7)).eval()
    strategy = make_strategy(sizes)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    tokens = torch.tensor([[5, 7, 9, 7, 4, 7, 7, 1], [7, 7, 3, 2, 8, 7, 6, 7]])
    share = tokens.chunk(strategy.data_ranks)[strategy.data_rank]
    strategy.forward_backward([MicroBatch(share, share)], num_tokens=tokens.numel())
    strategy.optimizer_step(0.5)
    weights = strategy.gather_full_state_dict()
    strategy.close()
    return weights["model.embed_tokens.weight"][7] if weights else torch.empty(0)


@pytest.mark.extended
def test_the_padding_token_learns_alike_on_all_layouts():
    initial = tiny_model(tiny_config("llama")).model.embed_tokens.weight[7].detach()
    (alone,) = values(run_ranks(train_padding, 1, {}))
    assert not torch.equal(alone, initial)
    for sizes in ({}, {"shard": 2}):
        torch.testing.assert_close(values(run_ranks(train_padding, 2, sizes))[0], alone)


def evaluate_routers(sizes: dict[str, int]) -> tuple[float, set[torch.dtype]]:
    """The loss of a mixture of experts in bf16, and the types of its routers' weights in use."""
    disable_packing_detection()
    model = tiny_model(tiny_config("ernie4_5_moe"))
    dtypes = set()
    for router in find_routers(model):
        router.register_forward_pre_hook(
            lambda router, _: dtypes.update(weight.dtype for weight in router.parameters())
        )
    strategy = make_strategy(sizes, "bf16")
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    tokens = torch.randint(320, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    share = tokens.chunk(strategy.data_ranks)[strategy.data_rank]
    strategy.forward_backward([MicroBatch(share, share)], num_tokens=tokens.numel())
    strategy.optimizer_step(0.5)
    loss = strategy.reduce_sum(strategy.evaluate(MicroBatch(share, share))[0]).item()
    strategy.close()
    return loss, dtypes


@pytest.mark.extended
def test_routers_are_gathered_in_float32_in_a_bf16_run():
    ((alone, _),) = values(run_ranks(evaluate_routers, 1, {}))
    for loss, dtypes in values(run_ranks(evaluate_routers, 2, {"shard": 2})):
        assert dtypes == {torch.float32}
        assert loss == pytest.approx(alone, rel=1e-5)


def list_messages(family: str, precision: str, micro_batches: int = 2, unsharded: bool = False):
    """Messages of a step, after another one, and the moments when a block begins between them."""
    disable_packing_detection()
    strategy = make_strategy({"shard": 2}, precision, unsharded_gradients=unsharded)
    strategy.prepare(LanguageModelLoss(make_model(family)), OptimizerFactory(make_optimizer).make)
    messages = Messages()
    for block in find_blocks(strategy.model):
        note_begin(block, messages.sent)
    tokens = torch.randint(320, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batches = [MicroBatch(tokens[:, :-1], tokens[:, 1:])] * micro_batches
    for _ in range(2):
        messages.sent.clear()
        with messages:
            strategy.forward_backward(batches, num_tokens=2 * LENGTH * 2 * micro_batches)
        strategy.optimizer_step(0.5)
    strategy.close()
    return messages.sent


def note_begin(block: torch.nn.Module, sent: list) -> None:
    """Note when the forward and the backward pass of a block begin, after FSDP's own hooks."""

    def begin_backward(block, args, output):
        output.register_hook(lambda _: sent.append(("block backward",)))

    block.register_forward_pre_hook(lambda *_: sent.append(("block",)))
    block.register_forward_hook(begin_backward)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("family", "outside"), [("gpt2", 1), pytest.param("llama", 3, marks=pytest.mark.extended)]
)
def test_a_block_is_gathered_and_reduced_as_one_group(family, outside, precision):
    """Two blocks, forward and backward, twice; all other weights are gathered once.

    Of Llama, the embedding and the head are groups by themselves. GPT-2 has one matrix for both.
    """
    for sent in values(run_ranks(list_messages, 2, family, precision)):
        counts = Counter(name for name, *_ in sent if not name.startswith("block"))
        assert counts == {"gather": 2 * 2 * 2 + outside, "reduce": 2 * (2 + outside)}


def test_unsharded_gradients_are_reduced_once_in_a_step():
    for sent in values(run_ranks(list_messages, 2, "llama", "bf16", 3, True)):
        counts = Counter(name for name, *_ in sent if not name.startswith("block"))
        assert counts == {"gather": 2 * 2 * 3 + 3, "reduce": 2 + 3}


def test_each_layer_travels_while_the_one_before_it_computes():
    whole, half = torch.float32, torch.bfloat16
    gains, vocabulary, block = 5 * 32, 320 * 32, 3 * 32 * 32 + 3 * 32 * 64
    sent, _ = values(run_ranks(list_messages, 2, "llama", "bf16", 1))
    assert sent == [
        ("gather", whole, gains),
        ("gather", whole, vocabulary),
        ("gather", half, block),
        ("gather", half, block),
        ("block",),
        ("gather", half, vocabulary),  # the head
        ("block",),
        ("gather", half, block),
        ("reduce", whole, vocabulary),
        ("gather", half, block),
        ("block backward",),
        ("reduce", whole, block),
        ("block backward",),
        ("reduce", whole, block),
        ("reduce", whole, gains),
        ("reduce", whole, vocabulary),
    ]
