"""Optimizers that need whole matrices, where weights are sharded or cut into stages."""

from typing import Any

import pytest
import torch

from llm.checkpoint.format import split_state
from llm.extensions.kfac.make_kfac import KFAC
from llm.extensions.matrix_optim import matrices, matrix_owners
from llm.parallel.base import AcceleratedStrategy
from tests.support.checkpoints import load_strategy, parts_of, save_strategy
from tests.support.matrix_runs import KINDS, make_strategy, train, whole_weights
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values

MORE = pytest.mark.layouts
STEPS = 9
"""So that a basis is renewed twice after the first step, and used."""


def state_bytes(strategy: AcceleratedStrategy) -> int:
    """Bytes of the optimizer's state and of K-FAC's on this rank."""
    parts: list[Any] = [t for s in strategy.optimizer.state.values() for t in s.values()]
    if isinstance(strategy.run_optimizer, KFAC):
        factors = strategy.run_optimizer.recorder.factors
        parts += [t for factor in factors for t in factor.tensors().values()]
    return sum(t.nbytes for t in {id(t): t for t in parts}.values())


def kinds_of(sizes):
    """Those that go with a layout: K-FAC needs the inputs and outputs of whole layers."""
    return [
        kind
        for kind, options in KINDS.items()
        if "tensor" not in (sizes or {}) or "kfac" not in options
    ]


def run(sizes, steps, options):
    """Losses, weights and bytes of state by method."""
    found = {}
    for kind in kinds_of(sizes):
        strategy = make_strategy(kind, sizes)
        losses = train(strategy, range(steps), **options)
        found[kind] = losses, whole_weights(strategy), state_bytes(strategy)
    strategy.close()
    return found


@pytest.fixture(scope="module")
def alone():
    return values(run_ranks(run, 1, {}, STEPS, {}))[0]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(2, {"shard": 2}, marks=pytest.mark.extended),
        pytest.param(2, {"pipeline": 2}, marks=MORE),
        pytest.param(4, {"shard": 2, "pipeline": 2}, marks=MORE),
        pytest.param(4, {"shard": 2}, marks=MORE),
        pytest.param(4, {"shard": 4}, marks=MORE),
        pytest.param(4, {"pipeline": 2}, marks=MORE),
        pytest.param(4, {"shard": 2, "context": 2}, marks=MORE),
        pytest.param(4, {"shard": 2, "tensor": 2}, marks=MORE),
        pytest.param(4, {"pipeline": 2, "tensor": 2}, marks=MORE),
    ],
)
def test_steps_are_those_of_one_rank(alone, ranks, sizes):
    found = values(run_ranks(run, ranks, sizes, STEPS, {}, timeout=400))
    for kind in kinds_of(sizes):
        losses, weights, num_bytes = alone[kind]
        torch.testing.assert_close(found[0][kind][0], losses, rtol=1e-5, atol=0)
        for name, weight in found[0][kind][1].items():
            # A rate of 1e-3; where a gradient is rounding, so is its sign.
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=3e-4)
        if sizes == {"shard": ranks}:
            # Matrices are not divided: the embedding's state is a third of SOAP's, and beside
            # K-FAC, whose layers are divided evenly, it comes on top of a rank's.
            largest = max(of_rank[kind][2] for of_rank in found)
            assert largest < (1 / ranks + (1 / 4 if kind == "ekfac-soap" else 1 / 10)) * num_bytes


def run_untied(sizes):
    found = {}
    for kind in ("muon", "soap"):
        strategy = make_strategy(kind, sizes, still_model("llama", tie_word_embeddings=False))
        train(strategy, range(2))
        found[kind] = whole_weights(strategy)
    strategy.close()
    return found


@pytest.mark.extended
def test_a_stage_without_the_head_trains_as_one_rank_does():
    cut, alone = (values(run_ranks(run_untied, *on))[0] for on in ((2, {"pipeline": 2}), (1, {})))
    for kind, weights in alone.items():
        for name, weight in weights.items():
            torch.testing.assert_close(cut[kind][name], weight, rtol=0, atol=1e-4)


def run_in_small_buckets(*args):
    matrices.BUCKET = 1000
    return run(*args)


def test_shards_train_bit_for_bit_as_replicas_do():
    """In many buckets, and without clipping, whose norm is summed in another order."""
    options = {"accumulation": 1, "clip": 0.0}
    shards, replicas = (
        values(run_ranks(run_in_small_buckets, 2, sizes, 5, options))[0]
        for sizes in ({"shard": 2}, None)
    )
    for kind in KINDS:
        assert shards[kind][0] == replicas[kind][0]
        for name, weight in replicas[kind][1].items():
            assert torch.equal(shards[kind][1][name], weight), (kind, name)


def run_batches(cost):
    """Weights after Muon's updates, of batches as a GPU has them if a cost is given."""
    if cost:
        matrix_owners.min_batch_cost = lambda device: cost
    # The fused attention weight and the feed-forward weight have the same shape.
    model = still_model("gpt2", n_layer=4, n_embd=16, n_inner=48)
    strategy = make_strategy("muon", {"shard": 2}, model)
    train(strategy, range(2))
    weights = whole_weights(strategy)
    strategy.close()
    return weights


def test_each_weight_gets_its_own_update_from_a_batch_of_equal_shapes():
    batched, single = (values(run_ranks(run_batches, 2, cost))[0] for cost in (2**26, 0))
    for name, weight in single.items():
        torch.testing.assert_close(batched[name], weight, rtol=0, atol=1e-5)


def run_experts(sizes):
    strategy = make_strategy("ekfac", sizes, still_model("mixtral"))
    train(strategy, range(3), accumulation=1, clip=0.0)
    counts = {f.name: f.count.item() for f in strategy.run_optimizer.recorder.factors if f.is_owned}
    weights = whole_weights(strategy)
    strategy.close()
    return weights, counts


@pytest.mark.extended
def test_stacks_of_experts_train_bit_for_bit_as_replicas_do():
    shards, replicas = (values(run_ranks(run_experts, 2, sizes)) for sizes in ({"shard": 2}, None))
    found, expected = (
        {n: c for _, counts in its for n, c in counts.items()} for its in (shards, replicas)
    )
    assert found == expected
    assert all(count > 0 for count in found.values())
    for name, weight in replicas[0][0].items():
        assert torch.equal(shards[0][0][name], weight), name


def saved_and_trained_on(sizes, folder):
    weights = {}
    for kind in kinds_of(sizes):
        strategy = make_strategy(kind, sizes)
        train(strategy, range(5))
        save_strategy(strategy, folder / kind, 5)
        train(strategy, range(5, 9))
        weights[kind] = whole_weights(strategy)
    strategy.close()
    return weights


def loaded_and_saved(sizes, folder, copy, stop):
    weights = {}
    for kind in [kind for kind in KINDS if (folder / kind).exists()]:
        strategy = make_strategy(kind, sizes)
        load_strategy(strategy, folder / kind)
        save_strategy(strategy, copy / kind, 5)
        train(strategy, range(5, stop))
        weights[kind] = whole_weights(strategy)
    strategy.close()
    return weights


def contents(folders):
    """All tensors of the checkpoints in some folders, whole, by method and path."""
    found = []
    for folder in folders:
        found.append({})
        for kind in [kind for kind in KINDS if (folder / kind).exists()]:
            strategy = make_strategy(kind, {})
            load_strategy(strategy, folder / kind)
            state, _ = split_state({n: p.state_dict() for n, p in parts_of(strategy).items()})
            found[-1] |= {f"{kind}/{path}": t.detach().clone() for path, t in state.items()}
    return found


@pytest.mark.parametrize(
    ("ranks", "sizes", "others"),
    [
        pytest.param(2, {"shard": 2}, [(1, {}), (2, {"pipeline": 2})], marks=MORE),
        pytest.param(4, {"shard": 2, "pipeline": 2}, [(2, {"shard": 2}), (2, None)], marks=MORE),
        pytest.param(4, {"shard": 2, "tensor": 2}, [(2, {"tensor": 2}), (1, {})], marks=MORE),
        pytest.param(4, {"shard": 2}, [(4, {"shard": 2, "pipeline": 2}), (1, {})], marks=MORE),
    ],
)
def test_runs_resume_bit_for_bit_and_load_under_other_layouts(ranks, sizes, others, tmp_path):
    folder = tmp_path / "run"
    straight = values(run_ranks(saved_and_trained_on, ranks, sizes, folder, timeout=300))[0]

    resumed = run_ranks(loaded_and_saved, ranks, sizes, folder, tmp_path / "again", 9, timeout=300)
    for number, (other_ranks, other) in enumerate(others):
        copy = tmp_path / str(number)
        values(run_ranks(loaded_and_saved, other_ranks, other, folder, copy, 5, timeout=300))

    for kind, weights in values(resumed)[0].items():
        for name, weight in straight[kind].items():
            assert torch.equal(weights[name], weight), (kind, name)
    folders = [folder, *(tmp_path / copy for copy in ("again", "0", "1"))]
    saved, *copies = values(run_ranks(contents, 1, folders))[0]
    for copy in copies:
        assert copy.keys() == saved.keys()
        assert [path for path in saved if not torch.equal(copy[path], saved[path])] == []
