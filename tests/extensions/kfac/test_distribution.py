"""K-FAC over several ranks, each of which sees its share of every step's tokens."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.distribution import assign_factors
from llm.extensions.kfac.ekfac import EKFAC
from llm.extensions.kfac.layers import find_covered_layers
from llm.extensions.kfac.preconditioner import Preconditioner
from tests.support.ranks import run_ranks, values

STEPS = 14
BATCH = 16
OPTIONS = {"factor_update_steps": 2, "inv_update_steps": 4, "max_dim": 10}


class Block(nn.Module):
    """Two layers that read the same tensor, and a third one."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 16)
        self.up = nn.Linear(12, 16)
        self.down = nn.Linear(16, 12, bias=False)

    def forward(self, inputs):
        return inputs + self.down(torch.tanh(self.gate(inputs)) * self.up(inputs))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), Block(), nn.LayerNorm(12), nn.Linear(12, 5))


def make_optimizer(model, method):
    coverage = find_covered_layers(model, sample_forward=lambda module: module(torch.zeros(1, 6)))
    curvature = Curvature(coverage, method=method, **OPTIONS)
    if method == "ekfac":
        optimizer = EKFAC([{"params": list(model.parameters())}], curvature, lr=0.01)
        return curvature, optimizer, None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return curvature, optimizer, Preconditioner(curvature, model.parameters(), kl_clip=1e-3)


def train(model, curvature, optimizer, preconditioner, steps, *, rank, world_size):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 3, 6, generator=generator)[rank::world_size]
        targets = torch.randn(BATCH, 3, 5, generator=generator)[rank::world_size]
        optimizer.zero_grad()
        weight = world_size / (BATCH * 3)
        with curvature.capture_stats(token_weight=weight):
            ((model(inputs) - targets).square().sum() * weight).backward()
        for parameter in model.parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            if step == 5:  # an overflow
                parameter.grad[0] = torch.inf
        if preconditioner is None:
            optimizer.found_inf = torch.tensor(float(step == 5))
            optimizer.step()
        else:
            preconditioner.precondition(learning_rate=0.1)
            if step != 5:
                optimizer.step()


METHODS = ["ekfac", "eigen"]


def run():
    """The weights that each method ends with."""
    dist.init_process_group("gloo")
    where = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    weights = {}
    for method in METHODS:
        model = make_model()
        train(model, *make_optimizer(model, method), range(STEPS), **where)
        weights[method] = [p.detach().numpy().copy() for p in model.parameters()]
    dist.destroy_process_group()
    return weights


@pytest.fixture(scope="module")
def alone():
    weights = {}
    for method in METHODS:
        model = make_model()
        train(model, *make_optimizer(model, method), range(STEPS), rank=0, world_size=1)
        weights[method] = [p.detach().numpy() for p in model.parameters()]
    return weights


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.layouts)])
def test_any_number_of_ranks_ends_with_the_weights_of_one_process(alone, world_size):
    found = values(run_ranks(run, world_size))

    for weights in found:
        for method in METHODS:
            pairs = zip(weights[method], alone[method], found[0][method], strict=True)
            for one, expected, of_rank_0 in pairs:
                assert abs(one - expected).max() < 1e-5
                assert (one == of_rank_0).all()


def resume():
    dist.init_process_group("gloo")
    where = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    model = make_model()
    curvature, optimizer, _ = make_optimizer(model, "ekfac")
    train(model, curvature, optimizer, None, range(7), **where)
    saved = copy.deepcopy(
        (
            model.state_dict(),
            {name: optimizer.state[p] for name, p in model.named_parameters()},
            curvature.state_dict(),
        )
    )
    train(model, curvature, optimizer, None, range(7, STEPS), **where)
    other = make_model()
    other_curvature, other_optimizer, _ = make_optimizer(other, "ekfac")
    other.load_state_dict(saved[0])
    for name, parameter in other.named_parameters():
        for key, tensor in other_optimizer.state[parameter].items():
            tensor.copy_(saved[1][name][key])
    other_curvature.load_state_dict(saved[2])
    train(other, other_curvature, other_optimizer, None, range(7, STEPS), **where)
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
    digest = {
        f"{name}.{key}": float(tensor.double().sum())
        for name, state in saved[1].items()
        for key, tensor in state.items()
    } | {
        f"{name}.{key}": float(tensor.double().sum())
        for name, state in saved[2]["factors"].items()
        for key, tensor in state.items()
    }
    dist.destroy_process_group()
    return same, digest


@pytest.mark.extended
def test_a_resumed_run_continues_bit_by_bit_and_ranks_keep_equal_copies():
    found = values(run_ranks(resume, 4))

    whole = {key: value for _, digest in found for key, value in digest.items()}
    for same, digest in found:
        assert all(same)
        assert digest.items() <= whole.items()


def test_work_is_assigned_to_ranks_and_steps_by_its_cost():
    groups = {
        name: {f"{name}.A": cost, f"{name}.G": cost}
        for name, cost in zip("abcd", (5, 4, 3, 2), strict=True)
    }

    found = assign_factors(groups, world_size=2, keeps_groups_together=True)

    by_group = {"a": 0, "b": 1, "c": 1, "d": 0}
    assert found.owner_by_factor == {f"{n}.{side}": r for n, r in by_group.items() for side in "AG"}
    apart = assign_factors(groups, world_size=2, keeps_groups_together=False)
    assert (apart.owner_by_factor["a.A"], apart.owner_by_factor["a.G"]) == (0, 1)
    # Two factors of cost 5 come first, then those of 4, 3 and 2; 28 in all.
    assert found.phase_by_factor == {
        "a.A": 0,
        "a.G": 5 / 28,
        "b.A": 10 / 28,
        "b.G": 14 / 28,
        "c.A": 18 / 28,
        "c.G": 21 / 28,
        "d.A": 24 / 28,
        "d.G": 26 / 28,
    }


def count_failures():
    """Rank 1 fails once; what each rank says of it, before and after a resume."""
    dist.init_process_group("gloo")
    curvature, *_ = make_optimizer(make_model(), "ekfac")
    if dist.get_rank() == 1:
        curvature._num_fallbacks += 1
    told = [curvature.metrics()["fallbacks"].item(), curvature.state_dict()["fallbacks"].item()]
    curvature.load_state_dict(curvature.state_dict())
    told.append(curvature.metrics()["fallbacks"].item())
    dist.destroy_process_group()
    return told


def test_failures_are_counted_over_all_ranks_and_once_after_a_resume():
    assert values(run_ranks(count_failures, 2)) == [[1.0, 1.0, 1.0]] * 2
