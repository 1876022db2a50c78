"""What is evaluated, exported and saved when each rank has weights of its own."""

import copy

import pytest
import torch

from llm.errors import LLMError
from llm.runtime.agreement import gather
from tests.support.decentralized import (
    DILOCO,
    RING,
    Case,
    finish,
    make_strategy,
    train,
    trained,
)
from tests.support.ranks import run_ranks, values

BLOCKING = Case(topology="exp", optimizer="adamw", overlap=False)
ALTERNATING = Case(topology="alternating-exp-ring", ranks_per_node=2, optimizer="adamw")


def averaged_weights(case: Case):
    strategy = make_strategy(case)
    train(strategy, case, range(3))
    own = trained(strategy.model)
    with strategy.averaged():
        inside = trained(strategy.model)
    after = trained(strategy.model)
    exported = strategy.gather_full_state_dict()
    if strategy.rank == 0:  # tied weights stay one tensor, as an export of one rank has them
        assert exported["head.weight"].data_ptr() == exported["embedding.weight"].data_ptr()
    saved = strategy.state_dict()["model"]
    names = list(strategy._trained_weights())
    distance = strategy._consensus.distance
    train(strategy, case, range(3, 6))
    finish(strategy)
    return {
        "own": own,
        "inside": inside,
        "after": after,
        "exported": exported,
        "saved": {name: tensor.clone() for name, tensor in saved.items()},
        "names": names,
        "distance": float(distance),
        "final": trained(strategy.model),
    }


def undisturbed(case: Case) -> torch.Tensor:
    strategy = make_strategy(case)
    train(strategy, case, range(6))
    finish(strategy)
    return trained(strategy.model)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(RING, marks=pytest.mark.layouts),
        *(pytest.param(case, marks=pytest.mark.extended) for case in (BLOCKING, DILOCO)),
    ],
    ids=["ring", "blocking", "diloco"],
)
def test_the_mean_is_swapped_in_and_the_weights_back_bit_for_bit(case):
    of_ranks = values(run_ranks(averaged_weights, 4, case))
    own = torch.stack([found["own"] for found in of_ranks])
    mean = own.mean(dim=0)
    spread = ((own - mean).square().sum(dim=1).mean()).sqrt() / mean.norm()
    for found in of_ranks:
        torch.testing.assert_close(found["inside"], mean, rtol=0, atol=1e-14)
        assert torch.equal(found["own"], found["after"])
        assert found["distance"] == pytest.approx(float(spread), rel=1e-10, abs=1e-14)
        for name in found["names"]:
            assert torch.equal(found["saved"][name], of_ranks[0]["exported"][name])
    assert [bool(found["exported"]) for found in of_ranks] == [True, False, False, False]
    # Looking at the mean, exporting and saving change nothing in what follows.
    for found, expected in zip(of_ranks, values(run_ranks(undisturbed, 4, case)), strict=True):
        assert torch.equal(found["final"], expected)


def resumed(case: Case, stop: int) -> bool:
    whole = make_strategy(case)
    train(whole, case, range(6))
    finish(whole)
    first = make_strategy(case)
    train(first, case, range(stop))
    saved = copy.deepcopy(first.state_dict())
    finish(first)
    second = make_strategy(case)
    second.load_state_dict(saved)
    train(second, case, range(stop, 6))
    finish(second)
    return torch.equal(trained(whole.model), trained(second.model))


# test_decentralized_checkpoint.py resumes the others from a disk.
@pytest.mark.parametrize(
    "case",
    [pytest.param(ALTERNATING, marks=pytest.mark.extended), BLOCKING],
    ids=["alternating", "blocking"],
)
def test_a_loaded_state_continues_bit_for_bit_on_every_rank(case):
    assert values(run_ranks(resumed, 4, case, 4)) == [True] * 4


def saved_states(case: Case, steps: int):
    """The state of this rank, plain and by path, as a checkpoint would hold it."""
    strategy = make_strategy(case)
    train(strategy, case, range(steps))
    saved = by_path(copy.deepcopy(strategy.state_dict()))
    finish(strategy)
    return saved


def by_path(tree, prefix="") -> dict[str, torch.Tensor]:
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found.update(by_path(value, f"{prefix}{key}/"))
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


def loaded_from(case: Case, files: dict[str, torch.Tensor], replicas: int, steps: range):
    strategy = make_strategy(case)

    def read(tensors):
        for path, tensor in tensors.items():
            tensor.copy_(files[path])

    strategy.load_mean_state(read, num_replicas=replicas)
    loaded = by_path(copy.deepcopy(strategy.state_dict()))
    train(strategy, case, steps)
    finish(strategy)
    return loaded, torch.isfinite(trained(strategy.model)).all().item()


@pytest.mark.parametrize(
    "case", [RING, pytest.param(DILOCO, marks=pytest.mark.layouts)], ids=["gossip", "diloco"]
)
def test_resuming_4_ranks_on_2_and_on_4_keeps_the_mean(case):
    of_four = values(run_ranks(saved_states, 4, case, 4))
    files = {path: tensor for state in of_four for path, tensor in state.items()}
    replicas = [f"replica_{number:05d}/" for number in range(4)]
    means = {
        path.removeprefix(replicas[0]): torch.stack([files[f"{r}{path[14:]}"] for r in replicas])
        .double()
        .mean(dim=0)
        for path in files
        if path.startswith(replicas[0])
    }
    assert any(path.endswith("exp_avg_sq") for path in means)

    of_two = values(run_ranks(loaded_from, 2, case, files, 4, range(4, 6)))
    for rank, (state, trains_on) in enumerate(of_two):
        assert trains_on
        for path, mean in means.items():
            found = state[f"replica_{rank:05d}/{path}"]
            torch.testing.assert_close(found.double(), mean, rtol=1e-15, atol=1e-15)

    files = {path: tensor for state, _ in of_two for path, tensor in state.items()}
    of_four = values(run_ranks(loaded_from, 4, case, files, 2, range(0)))
    for rank, (state, _) in enumerate(of_four):
        for path in means:
            back = state[f"replica_{rank:05d}/{path}"]
            assert torch.equal(back, files[f"replica_00000/{path}"])
        for path in files:
            if path.startswith("averaging/"):
                assert torch.equal(state[path], files[path])


def fresh_and_foreign():
    strategy = make_strategy(RING)
    state = strategy.state_dict()
    # Weights to start from are read into what a fresh strategy gives as its model.
    state["model"]["middle.bias"].fill_(5.0)
    reads_into_live = bool((strategy.model.middle.bias == 5).all())
    complaints = []
    without = {key: value for key, value in state.items() if not key.startswith("replica")}
    other = {**state, "model": {"a": torch.zeros(1)}}
    for wrong in (without, other):
        try:
            strategy.load_state_dict(wrong)
        except LLMError as error:
            complaints.append(str(error))
    finish(strategy)
    return reads_into_live, complaints


def test_a_fresh_state_loads_in_place_and_a_foreign_one_is_refused():
    for rank, (reads_into_live, complaints) in enumerate(values(run_ranks(fresh_and_foreign, 2))):
        assert reads_into_live
        assert complaints == [
            f"The saved state has no replica {rank}.",
            "The model of the saved state has other parameters.",
        ]


def scales():
    first = make_strategy(RING, mixed_precision="fp16")
    if first.rank == 0:
        first.parameters[0].register_hook(lambda gradient: gradient * float("inf"))
    train(first, RING, range(1))
    saved = copy.deepcopy(first.state_dict())
    finish(first)
    second = make_strategy(RING, mixed_precision="fp16")
    second.load_state_dict(saved)
    train(second, RING, range(1, 2))
    finish(second)
    third = make_strategy(RING, mixed_precision="fp16")
    files = {path: tensor for state in gather(by_path(saved)) for path, tensor in state.items()}
    third.load_mean_state(
        lambda tensors: [tensor.copy_(files[path]) for path, tensor in tensors.items()],
        num_replicas=2,
    )
    finish(third)
    return [float(strategy.loss_scale()) for strategy in (first, second, third)]


def test_each_rank_saves_and_restores_its_own_loss_scale():
    expected = [[32768.0, 32768.0, 32768.0], [65536.0, 65536.0, 32768.0]]
    assert values(run_ranks(scales, 2)) == expected
