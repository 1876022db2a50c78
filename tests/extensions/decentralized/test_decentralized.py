"""Gossip through the whole strategy, against a simulation of all ranks with dense matrices."""

import dataclasses

import pytest
import torch

from llm.data.loader import MicroBatch
from llm.extensions.decentralized.decentralized import DecentralizedStrategy
from llm.extensions.decentralized.modes import Gossip
from llm.extensions.decentralized.rounds import make_rounds
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.base import AcceleratedStrategy
from tests.support.decentralized import (
    Case,
    Loss,
    finish,
    make_optimizer,
    make_strategy,
    mixing_matrix,
    step_data,
    train,
    trained,
)
from tests.support.layouts import cpu_accelerator
from tests.support.models import tiny_config, tiny_model
from tests.support.ranks import run_ranks, values

TOPOLOGIES = [("complete", 1), ("exp", 1), ("ring", 1), ("alternating-exp-ring", 2)]
OPTIMIZERS = ["sgd", "adamw", "accumadamw"]


def make_all_reduce(case: Case) -> AcceleratedStrategy:
    strategy = AcceleratedStrategy(cpu_accelerator())
    strategy.prepare(
        Loss(unused=False),
        OptimizerFactory(lambda model: make_optimizer(case.optimizer, model)).make,
    )
    return strategy


def simulate(case: Case, ranks: int) -> list[torch.Tensor]:
    """All replicas in one process, mixed by whole matrices; their weights at the end."""
    losses = [Loss(unused=case.unused) for _ in range(ranks)]
    optimizers = [make_optimizer(case.optimizer, loss.model) for loss in losses]
    each = 1 if case.nodes else case.ranks_per_node
    rounds = make_rounds(case.topology, num_ranks=ranks, ranks_per_node=each)
    for step in range(case.steps):
        input_ids, labels = step_data(step)
        for loss, ids, wanted in zip(
            losses, input_ids.chunk(ranks), labels.chunk(ranks), strict=True
        ):
            loss.zero_grad()
            (loss(ids, wanted)[0] * (ranks / labels.numel())).backward()
            if case.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(loss.parameters(), case.max_grad_norm)
        if case.overlap and step > 0:
            mix(losses, rounds[(step - 1) % len(rounds)])
        for optimizer in optimizers:
            optimizer.step()
        if not case.overlap:
            mix(losses, rounds[step % len(rounds)])
    return [trained(loss.model) for loss in losses]


@torch.no_grad()
def mix(losses: list[Loss], groups) -> None:
    mixed = torch.from_numpy(mixing_matrix(groups)) @ torch.stack(
        [trained(x.model) for x in losses]
    )
    for loss, vector in zip(losses, mixed, strict=True):
        torch.nn.utils.vector_to_parameters(
            vector, [p for p in loss.model.parameters() if p.requires_grad]
        )


def final_weights(cases: list[Case]) -> list[torch.Tensor]:
    found = []
    for case in cases:
        strategy = make_strategy(case)
        train(strategy, case, range(case.steps))
        finish(strategy)
        found.append(trained(strategy.model))
    return found


def of_ranks(cases: list[Case], ranks: int) -> list[list[torch.Tensor]]:
    """For each case, the weights of all ranks."""
    found = values(run_ranks(final_weights, ranks, cases))
    return [list(weights) for weights in zip(*found, strict=True)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance=1e-10) -> None:
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("ranks", "optimizers"),
    [(4, OPTIMIZERS), pytest.param(8, ["accumadamw"], marks=pytest.mark.layouts)],
)
def test_overlapped_steps_are_those_of_a_dense_simulation(ranks, optimizers):
    cases = [
        Case(topology=topology, ranks_per_node=each, optimizer=optimizer, max_grad_norm=0.5)
        for topology, each in TOPOLOGIES
        for optimizer in optimizers
    ]
    for case, found in zip(cases, of_ranks(cases, ranks), strict=True):
        assert_equal(found, simulate(case, ranks))
        # Gradients differ from rank to rank, and so must weights.
        assert (found[0] - found[1]).abs().max() > 1e-3


def test_blocking_steps_are_those_of_a_dense_simulation():
    cases = [
        Case(topology=topology, ranks_per_node=each, optimizer="adamw", overlap=False)
        for topology, each in TOPOLOGIES
    ]
    for case, found in zip(cases, of_ranks(cases, 4), strict=True):
        assert_equal(found, simulate(case, 4))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "nodes"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.layouts)]
)
def test_gossip_between_nodes_is_gossip_of_as_many_ranks(ranks, nodes):
    cases = [
        Case(
            topology=topology,
            optimizer="adamw",
            nodes=True,
            ranks_per_node=2,
            max_grad_norm=0.5,
            accumulation=3,
            unused=False,
            overlap=overlap,
        )
        for topology, overlap in (("exp", True), ("complete", True), ("ring", False))
    ]
    for case, found in zip(cases, of_ranks(cases, ranks), strict=True):
        expected = simulate(case, nodes)
        assert_equal(found, [expected[rank // 2] for rank in range(ranks)])
        assert all(torch.equal(found[rank], found[rank ^ 1]) for rank in range(ranks))


def all_reduce_weights(case: Case) -> torch.Tensor:
    strategy = make_all_reduce(case)
    train(strategy, case, range(case.steps))
    finish(strategy)
    return trained(strategy.model)


@pytest.mark.extended
def test_blocking_means_of_all_ranks_with_sgd_are_all_reduce():
    case = Case(topology="complete", optimizer="sgd", overlap=False, unused=False)
    (gossip,) = of_ranks([case], 4)
    all_reduce = values(run_ranks(all_reduce_weights, 4, case))
    assert_equal(gossip, all_reduce)


def test_accumulating_six_micro_batches_is_one_of_six_times_the_size():
    whole = Case(optimizer="accumadamw", max_grad_norm=0.5)
    parts = dataclasses.replace(whole, accumulation=6)
    assert_equal(*of_ranks([whole, parts], 4))


def shared_parameters():
    case = Case(optimizer="adamw")
    strategy = make_strategy(case)
    frozen = strategy.model.frozen.weight.clone()
    unused = strategy.model.unused.weight.clone()
    train(strategy, case, range(case.steps))
    finish(strategy)
    model = strategy.model
    return (
        torch.equal(model.frozen.weight, frozen),
        torch.equal(model.unused.weight, unused),
        model.head.weight is model.embedding.weight,
        list(strategy._trained_weights()),
    )


def test_frozen_and_unused_parameters_stay_and_tied_ones_are_averaged_once():
    for frozen, unused, tied, names in values(run_ranks(shared_parameters, 2)):
        assert frozen
        assert unused
        assert tied
        assert names == [
            "embedding.weight",
            "middle.weight",
            "unused.weight",
            "middle.bias",
            "head.bias",
            "unused.bias",
        ]


def skipped_alone():
    case = Case(topology="complete", optimizer="adamw", overlap=False, steps=1)
    strategy = make_strategy(case)
    start = trained(strategy.model)
    if strategy.rank == 1:
        strategy.parameters[0].register_hook(lambda gradient: gradient * float("nan"))
    skips = []
    step = strategy.optimizer.step

    def step_and_look() -> None:
        step()
        skips.append(torch.equal(trained(strategy.model), start))

    strategy.optimizer.step = step_and_look
    train(strategy, case, range(1))
    finish(strategy)
    return skips, trained(strategy.model)


def test_a_rank_with_a_non_finite_gradient_skips_alone_but_is_averaged():
    outcomes = values(run_ranks(skipped_alone, 2))
    assert [skips for skips, _ in outcomes] == [[False], [True]]
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert all(torch.isfinite(weights).all() for _, weights in outcomes)


def gpt2_both_ways(mixed_precision: str) -> list[tuple[list[float], torch.Tensor]]:
    return [gpt2_steps(kind, mixed_precision) for kind in ("gossip", "allreduce")]


def gpt2_steps(kind: str, mixed_precision: str) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of GPT-2 in float32 or less, by SGD."""
    accelerator = cpu_accelerator(mixed_precision)
    if kind == "allreduce":
        strategy = AcceleratedStrategy(accelerator)
    else:
        rounds = make_rounds("complete", num_ranks=accelerator.num_processes)
        gossip = Gossip(rounds=rounds, overlap=False)
        strategy = DecentralizedStrategy(gossip, accelerator)
    disable_packing_detection()
    model = tiny_model(tiny_config("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    strategy.prepare(
        LanguageModelLoss(model),
        OptimizerFactory(
            lambda module: torch.optim.SGD(module.parameters(), lr=0.5, fused=True)
        ).make,
    )
    losses = []
    for step in range(4):
        tokens = torch.randint(320, (8, 17), generator=torch.Generator().manual_seed(step))
        own = tokens.chunk(strategy.world_size)[strategy.rank]
        batch = MicroBatch(own[:, :-1], own[:, 1:])
        loss = strategy.forward_backward([batch], num_tokens=8 * 16)
        losses.append(float(strategy.reduce_sum(loss)))
        strategy.optimizer_step(0.0)
    finish(strategy)
    return losses, trained(strategy.model)


@pytest.mark.parametrize(
    "mixed_precision",
    [
        pytest.param("bf16", marks=pytest.mark.extended),
        *(pytest.param(name, marks=pytest.mark.layouts) for name in ("no", "fp16")),
    ],
)
def test_gpt2_trains_as_with_all_reduce_in_every_precision(mixed_precision):
    for ranks in (1, 2):
        for (losses, weights), (expected, expected_weights) in values(
            run_ranks(gpt2_both_ways, ranks, mixed_precision)
        ):
            if ranks == 1:
                assert losses == expected
                assert torch.equal(weights, expected_weights)
            assert losses == pytest.approx(expected, rel=1e-5)
            # A half-precision forward of weights that differ in their last bit can differ more.
            tolerance = 1e-6 if mixed_precision == "no" else 1e-3
            torch.testing.assert_close(weights, expected_weights, rtol=0, atol=tolerance)
