import torch

from llm.runtime.rng import draw_seed, seed_step
from tests.support.ranks import run_ranks, values


def draw(**key) -> list[float]:
    seed_step(**key)
    return torch.rand(4).tolist()


def test_random_numbers_depend_on_seed_step_and_rank_only():
    first = draw(seed=1, step=5, rank=0)
    torch.rand(100)
    assert draw(seed=1, step=5, rank=0) == first
    for other in ({"seed": 2, "step": 5, "rank": 0}, {"seed": 1, "step": 6, "rank": 0}):
        assert draw(**other) != first
    assert draw(seed=1, step=5, rank=1) != first


def test_ranks_choose_the_same_seed_and_another_each_time():
    first, second = (values(run_ranks(draw_seed, 2)) for _ in range(2))

    assert first[0] == first[1] != second[0] == second[1]


def test_a_single_process_chooses_another_seed_each_time(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert len({draw_seed() for _ in range(5)}) == 5
