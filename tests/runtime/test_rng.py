import torch

from llm.runtime.rng import draw_seed, seed_step
from llm.runtime.world import launch_id


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


def test_processes_of_one_launch_choose_the_same_seed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1234")
    seeds = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        seeds.add(draw_seed())
    assert len(seeds) == 1
    monkeypatch.setenv("MASTER_PORT", "5678")
    assert draw_seed() not in seeds


def test_a_single_process_chooses_another_seed_each_time(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch_id() is None
    assert len({draw_seed() for _ in range(5)}) == 5
