"""Samples divided over ranks train as whole samples do on one rank."""

import os
from unittest.mock import patch

import pytest
import torch

from llm.data.loader import MicroBatch
from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel import context
from llm.parallel.context import SequenceShard
from llm.parallel.dims import ParallelDims
from llm.runtime import torch_names
from tests.support import layouts
from tests.support.layouts import make_optimizer
from tests.support.models import tiny_config, tiny_model
from tests.support.ranks import run_ranks, values
from tests.support.training import NO_DROPOUT

BATCH, LENGTH, STEPS = 4, 32, 3
# Learned positions and a tied head; shared keys; norms of queries and keys; a window of 8 tokens.
FAMILIES = ["gpt2", "llama", "qwen3", "mistral"]


def make_strategy(family: str, sizes: dict[str, int], mixed_precision: str = "no"):
    changes = NO_DROPOUT if family == "gpt2" else {}
    model = tiny_model(tiny_config(family, **changes), tied_gradients=True)
    strategy = layouts.make_strategy(sizes, mixed_precision)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    return strategy


def make_batch(step: int) -> MicroBatch:
    """All samples of a step; in every second one, documents of uneven lengths are kept apart."""
    tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[0, : LENGTH // 2] = -100  # an uneven number of tokens on the ranks
    if step % 2 == 0:
        return MicroBatch(tokens[:, :-1], labels)
    places = torch.arange(LENGTH).expand(BATCH, -1)
    ends = torch.tensor([[3, 13], [8, 29], [16, 17], [1, 31]])
    documents = (places[..., None] >= ends[:, None]).sum(-1)
    starts = torch.nn.functional.pad(ends, (1, 0)).gather(1, documents)
    return MicroBatch(tokens[:, :-1], labels, places - starts, documents)


def share_of(batch: MicroBatch, strategy, accumulation: int) -> list[MicroBatch]:
    """A rank's micro-batches: those of its share of the samples."""
    rows = torch.arange(BATCH).view(accumulation, strategy.data_ranks, -1)[:, strategy.data_rank]
    return [MicroBatch(*(None if t is None else t[own] for t in batch)) for own in rows]


def train(family: str, sizes: dict[str, int], accumulation: int):
    """Predictions, what a few steps and an evaluation show, and the weights after them."""
    strategy = make_strategy(family, sizes)
    (micro_batch,) = share_of(make_batch(1), strategy, 1)
    predictions = [strategy.gather(values) for values in strategy.predict(micro_batch)]
    seen = []
    for step in range(STEPS):
        batch = make_batch(step)
        micro_batches = share_of(batch, strategy, accumulation)
        num_tokens = int((batch.labels != -100).sum())
        loss = strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        norm, skipped = strategy.optimizer_step(0.5)
        seen.append([strategy.reduce_sum(loss.clone()).item(), norm.item(), skipped.item()])
    sums = strategy.reduce_sum(torch.stack(strategy.evaluate(micro_batch)))
    return seen, sums, predictions, strategy.gather_full_state_dict()


def train_all(sizes: dict[str, int], accumulation: int, masked: bool = True):
    if not masked:
        context._EXPLICIT_MASK_DEVICES = ()
    return [train(family, sizes, accumulation) for family in FAMILIES]


@pytest.fixture(scope="module")
def on_one_rank():
    return values(run_ranks(train_all, 1, {}, 1))[0]


@pytest.mark.parametrize(
    ("ranks", "sizes", "accumulation", "masked"),
    [
        (2, {"context": 2}, 2, True),
        pytest.param(2, {"context": 2}, 1, False, marks=pytest.mark.extended),  # as on a GPU
        pytest.param(4, {"context": 4}, 1, True, marks=pytest.mark.layouts),
        # And two replicas.
        pytest.param(4, {"context": 2}, 1, True, marks=pytest.mark.layouts),
        pytest.param(4, {"context": 2, "shard": 2}, 2, True, marks=pytest.mark.layouts),
    ],
)
def test_sharded_sequences_train_as_on_one_rank(on_one_rank, ranks, sizes, accumulation, masked):
    outcomes = values(run_ranks(train_all, ranks, sizes, accumulation, masked))
    for rank, families in enumerate(outcomes):
        for (seen, sums, predictions, weights), expected in zip(families, on_one_rank, strict=True):
            assert torch.allclose(torch.tensor(seen), torch.tensor(expected[0]), rtol=1e-5)
            assert torch.allclose(sums, expected[1], rtol=1e-5)
            assert torch.equal(predictions[0], expected[2][0])
            assert torch.allclose(predictions[1], expected[2][1], rtol=1e-5)
            if rank == 0:
                assert weights.keys() == expected[3].keys()
                for name, tensor in expected[3].items():
                    torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5)


def half_precision_loss(mixed_precision: str):
    """Loss and norm of a step of a model whose norms make queries of another dtype than values."""
    context._EXPLICIT_MASK_DEVICES = ()
    strategy = make_strategy("qwen3", {"context": int(os.environ["WORLD_SIZE"])}, mixed_precision)
    batch = make_batch(0)
    loss = strategy.forward_backward([batch], num_tokens=int((batch.labels != -100).sum()))
    norm, _ = strategy.optimizer_step(0.5)
    return strategy.reduce_sum(loss.clone()).item(), norm.item()


@pytest.mark.parametrize(
    "mixed_precision",
    [
        pytest.param("bf16", marks=pytest.mark.extended),
        pytest.param("fp16", marks=pytest.mark.layouts),
    ],
)
def test_sharded_sequences_train_in_half_precision(mixed_precision):
    expected = values(run_ranks(half_precision_loss, 1, mixed_precision))[0]
    for found in values(run_ranks(half_precision_loss, 2, mixed_precision)):
        assert found == pytest.approx(expected, rel=0.01)


def exchange_keys_and_values():
    """The bytes that each layer exchanges, and the heads that its kernel is given, in bf16."""
    accelerator = layouts.cpu_accelerator("bf16")
    context._EXPLICIT_MASK_DEVICES = ()
    model = tiny_model(tiny_config("llama", num_attention_heads=8, num_key_value_heads=2))
    shard = SequenceShard(ParallelDims(context=2), int(os.environ["RANK"]))
    context.divide_attention(model, shard)
    gather, scatter = torch_names.all_gather_single, torch_names.reduce_scatter_single
    with (
        patch.object(torch_names, "all_gather_single", wraps=gather) as gather,
        patch.object(torch_names, "reduce_scatter_single", wraps=scatter) as scatter,
        patch.object(context, "_scaled_dot_product", wraps=context._scaled_dot_product) as attend,
    ):
        with accelerator.autocast():
            objective, _ = LanguageModelLoss(model)(*shard.local_batch(make_batch(0)))
        objective.backward()
    gathered = [call.args[1].nbytes for call in gather.call_args_list]
    scattered = [call.args[0].nbytes for call in scatter.call_args_list]
    return gathered, scattered, {tuple(t.shape[1] for t in c.args[:3]) for c in attend.mock_calls}


def test_each_rank_exchanges_and_keeps_only_the_key_value_heads():
    # Two layers: 4 samples x 16 tokens x 2 heads of width 4 x keys and values x 2 bytes.
    for gathered, scattered, heads in values(run_ranks(exchange_keys_and_values, 2)):
        assert gathered == scattered == [2048, 2048]
        assert heads == {(8, 2, 2)}


def test_ranks_with_different_tokens_have_different_dropout():
    dims = ParallelDims(pipeline=2, shard=2, context=2, tensor=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [dims.rng_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [dims.rng_rank(rank) for rank in range(8, 16)] == [0, 0, 1, 1, 2, 2, 3, 3]


def shards_and_gradient():
    """A sequence of 8 tokens, the shard of each rank, and the gradient of its all-gather."""
    layouts.cpu_accelerator()
    rank = int(os.environ["RANK"])
    shard = SequenceShard(ParallelDims(context=2), rank)
    tokens = torch.arange(8).unsqueeze(0)
    own = shard.local_batch(MicroBatch(tokens, tokens + 1))
    values = own.input_ids.double().requires_grad_()
    whole = shard.gather(values, 1)
    (whole * (tokens + 10 * rank)).sum().backward()
    return own, whole.tolist(), values.grad.tolist()


def test_a_rank_holds_a_chunk_from_the_front_and_its_mirror_from_the_back():
    (first, whole, gradient), (second, _, _) = values(run_ranks(shards_and_gradient, 2))
    assert first.input_ids.tolist() == first.positions.tolist() == [[0, 1, 6, 7]]
    assert second.input_ids.tolist() == second.positions.tolist() == [[2, 3, 4, 5]]
    assert first.labels.tolist() == [[1, 2, 7, 8]]
    assert whole == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # What one rank makes of a key, and what the other one makes of it.
    assert gradient == [[0 + 10, 1 + 11, 6 + 16, 7 + 17]]
