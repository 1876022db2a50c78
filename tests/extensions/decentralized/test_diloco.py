"""DiLoCo against a simulation of all ranks in one process."""

import dataclasses
import sys

import pytest
import torch

from llm.extensions.decentralized.diloco import OuterOptimizer
from llm.extensions.decentralized.modes import DiLoCo
from llm.extensions.decentralized.options import DecentralizedExtension
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.decentralized import (
    BATCH,
    Case,
    Loss,
    finish,
    make_optimizer,
    make_strategy,
    step_data,
    train,
    trained,
)
from tests.support.ranks import run_ranks, values

CASE = Case(optimizer="adamw", sync_every=3, max_grad_norm=0.5, accumulation=2, steps=8)
SETTINGS = DiLoCo(inner_steps=2, outer_learning_rate=0.7, outer_momentum=0.9)


def weights_by_step(case: Case) -> list[torch.Tensor]:
    strategy = make_strategy(case)
    found = []
    for step in range(case.steps):
        train(strategy, case, range(step, step + 1))
        found.append(trained(strategy.model))
    finish(strategy)
    return found


def simulate(case: Case, ranks: int) -> list[list[torch.Tensor]]:
    """PyTorch's own SGD with Nesterov momentum is the outer optimizer."""
    losses = [Loss() for _ in range(ranks)]
    inner = [make_optimizer(case.optimizer, loss.model) for loss in losses]
    start = torch.nn.Parameter(trained(losses[0].model))
    outer = torch.optim.SGD([start], lr=0.7, momentum=0.9, nesterov=True)
    found = []
    for step in range(case.steps):
        input_ids, labels = step_data(step)
        for loss, optimizer, ids, wanted in zip(
            losses, inner, input_ids.chunk(ranks), labels.chunk(ranks), strict=True
        ):
            loss.zero_grad()
            (loss(ids, wanted)[0] * (ranks / labels.numel())).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), case.max_grad_norm)
            optimizer.step()
        if (step + 1) % case.sync_every == 0:
            mean = torch.stack([trained(loss.model) for loss in losses]).mean(dim=0)
            start.grad = start.detach() - mean
            outer.step()
            for loss in losses:
                parameters = [p for p in loss.model.parameters() if p.requires_grad]
                torch.nn.utils.vector_to_parameters(start.detach().clone(), parameters)
        found.append([trained(loss.model) for loss in losses])
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.extended), 4])
@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    # Muon rounds its steps of about 0.01 to bf16.
    [
        ("adamw", 1e-10),
        pytest.param("muon", 2e-4, marks=pytest.mark.extended),
        pytest.param("normuon", 2e-4, marks=pytest.mark.extended),
    ],
)
def test_inner_and_outer_steps_are_those_of_a_simulation(ranks, optimizer, tolerance):
    case = dataclasses.replace(CASE, optimizer=optimizer)
    assert BATCH % (ranks * case.accumulation) == 0
    of_ranks = values(run_ranks(weights_by_step, ranks, case))
    simulation = simulate(case, ranks)
    for step, expected in enumerate(simulation):
        found = [weights[step] for weights in of_ranks]
        torch.testing.assert_close(
            torch.stack(found), torch.stack(expected), rtol=0, atol=tolerance
        )
        synchronised = (step + 1) % case.sync_every == 0
        assert torch.equal(found[0], found[1]) == synchronised
    assert (simulation[-1][0] - simulation[0][0]).abs().max() > 0.03


def test_an_outer_rate_of_1_without_momentum_takes_the_inner_weights():
    weight = torch.ones(3, dtype=torch.float64)
    settings = DiLoCo(inner_steps=2, outer_learning_rate=1.0, outer_momentum=0.0)
    outer = OuterOptimizer(settings, {"weight": weight}, world_size=1)
    for _ in range(4):
        outer.before_step()
        weight += 0.5
        outer.after_step()
    assert torch.equal(weight, torch.full((3,), 3.0, dtype=torch.float64))


def test_the_outer_step_starts_from_weights_loaded_after_construction():
    weight = torch.zeros(2)
    settings = DiLoCo(inner_steps=1, outer_learning_rate=0.7, outer_momentum=0.9)
    outer = OuterOptimizer(settings, {"weight": weight}, world_size=1)
    weight.fill_(10.0)
    outer.before_step()
    weight -= 1.0
    outer.after_step()
    # difference 1, velocity 1, Nesterov 1.9, times 0.7
    torch.testing.assert_close(weight, torch.full((2,), 10 - 0.7 * 1.9))


def test_an_outer_step_does_not_repeat_what_one_replica_has_learned():
    """One replica counts inner steps that no outer step follows."""
    weight, settings = torch.zeros(2), dataclasses.replace(SETTINGS, inner_steps=sys.maxsize)
    alone = OuterOptimizer(settings, {"weight": weight}, world_size=1)
    for _ in range(100):
        alone.before_step()
        weight += 1.0
        alone.after_step()
    resumed = OuterOptimizer(SETTINGS, {"weight": weight}, world_size=1)
    resumed.load_state_dict(alone.state_dict())
    for expected in (101.0, 100 + 2 * 1.9 * 0.7):
        resumed.before_step()
        weight += 1.0
        resumed.after_step()
        torch.testing.assert_close(weight, torch.full((2,), expected))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, "diloco: 1 replica x 1 rank, optimizer adamw, no outer steps"),
        (2, "diloco: 2 replicas x 1 rank, inner optimizer adamw, an outer step every 500 steps"),
    ],
)
def test_the_log_says_whether_there_are_outer_steps(ranks, said):
    extension = DecentralizedExtension(GPTConfig(data_parallel="diloco"))
    layout = extension.make_layout(ranks=ranks, ranks_per_node=ranks, start=None)
    assert layout.description.startswith(said)
