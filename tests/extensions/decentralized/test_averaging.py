"""Rounds on gloo ranks against their matrices."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llm.extensions.decentralized.averaging import GossipAverager
from llm.extensions.decentralized.modes import Gossip
from llm.extensions.decentralized.rounds import make_rounds
from llm.parallel import flat_buffers
from tests.support.decentralized import mixing_matrix
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks, values

SHAPES = [(5, 3), (7,), (2, 2, 2), ()]


def start(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def flat(tensors) -> np.ndarray:
    return torch.cat([tensor.flatten() for tensor in tensors]).numpy().copy()


def join() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def mixed(cases, steps: int, buffer_bytes: int):
    """The weights of this rank after each step of each case, where nothing else moves them."""
    flat_buffers.MAX_BUFFER_BYTES = buffer_bytes
    rank = join()
    found = []
    for topology, ranks_per_node, overlap in cases:
        tensors = start(rank)
        rounds = make_rounds(
            topology, num_ranks=dist.get_world_size(), ranks_per_node=ranks_per_node
        )
        gossip = Gossip(rounds=rounds, overlap=overlap)
        averager = GossipAverager(gossip, tensors, rank=rank)
        states = []
        for _ in range(steps):
            averager.before_step()
            averager.after_step()
            states.append(flat(tensors))
        averager.wait_for_messages()
        found.append(np.array(states))
    dist.barrier()
    return found


CASES = {
    3: [("complete", 1), ("ring", 1)],
    4: [("complete", 1), ("exp", 1), ("ring", 1), ("alternating-exp-ring", 2)],
    8: [("exp", 1), ("ring", 1), ("alternating-exp-ring", 2)],
}


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(3, marks=pytest.mark.extended), 4, pytest.param(8, marks=pytest.mark.layouts)],
)
@pytest.mark.parametrize("buffer_bytes", [1, pytest.param(2**20, marks=pytest.mark.extended)])
def test_each_round_multiplies_by_its_matrix_and_leaves_the_mean(ranks, buffer_bytes):
    steps = 6
    cases = [(*case, overlap) for case in CASES[ranks] for overlap in (False, True)]
    of_ranks = values(run_ranks(mixed, ranks, cases, steps, buffer_bytes))
    for number, (topology, ranks_per_node, overlap) in enumerate(cases):
        rounds = make_rounds(topology, num_ranks=ranks, ranks_per_node=ranks_per_node)
        points = np.array([flat(start(rank)) for rank in range(ranks)])
        mean = points.mean(axis=0)
        for step in range(steps):
            if step > 0 or not overlap:
                groups = rounds[(step - overlap) % len(rounds)]
                points = mixing_matrix(groups) @ points
            found = np.array([results[number][step] for results in of_ranks])
            np.testing.assert_allclose(found, points, rtol=0, atol=1e-12)
            assert np.abs(found.mean(axis=0) - mean).max() < 1e-12


def mixed_nodes(topologies):
    """Weights after one period between nodes of two ranks."""
    flat_buffers.MAX_BUFFER_BYTES = 100
    rank = join()
    node, nodes = rank // 2, dist.get_world_size() // 2
    found = []
    for topology in topologies:
        tensors = start(node)
        rounds = make_rounds(topology, num_ranks=nodes)
        averager = GossipAverager(Gossip(rounds=rounds), tensors, rank=rank, ranks_per_replica=2)
        for _ in rounds:
            averager.after_step()
            averager.before_step()
        found.append(flat(tensors))
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        (4, 2),
        pytest.param(6, 3, marks=pytest.mark.extended),
        pytest.param(8, 4, marks=pytest.mark.layouts),
    ],
)
def test_ranks_of_a_node_exchange_a_shard_each_and_hold_equal_weights(ranks, nodes):
    topologies = ("exp", "complete") if nodes != 3 else ("complete",)
    of_ranks = values(run_ranks(mixed_nodes, ranks, topologies))
    for number, topology in enumerate(topologies):
        points = np.array([flat(start(node)) for node in range(nodes)])
        for groups in make_rounds(topology, num_ranks=nodes):
            points = mixing_matrix(groups) @ points
        for rank in range(ranks):
            expected = points[rank // 2]
            np.testing.assert_allclose(of_ranks[rank][number], expected, rtol=0, atol=1e-12)
            assert np.array_equal(of_ranks[rank][number], of_ranks[rank ^ 1][number])


def types_and_views():
    rank = join()
    base = torch.full((4, 6), float(rank), dtype=torch.float64)
    tensors = [
        base.t(),  # not contiguous
        torch.full((3,), float(rank), dtype=torch.bfloat16),
        torch.full((5,), float(rank)),
        torch.full((2, 2), float(rank), dtype=torch.float16),
        torch.full((2,), float(rank), dtype=torch.bfloat16),
    ]
    means = []
    for topology in ("exp", "complete"):
        rounds = make_rounds(topology, num_ranks=dist.get_world_size())
        averager = GossipAverager(Gossip(rounds=rounds, overlap=False), tensors, rank=rank)
        averager.after_step()
        means.append([(tensor.dtype, tensor.unique().tolist()) for tensor in tensors])
    dist.barrier()
    return means


def test_weights_of_each_dtype_are_averaged_separately():
    for rank, (pair, everyone) in enumerate(values(run_ranks(types_and_views, 4))):
        mean = 0.5 if rank < 2 else 2.5
        assert [found for _, found in pair] == [[mean]] * 5
        assert [dtype for dtype, _ in pair] == [
            torch.float64,
            torch.bfloat16,
            torch.float32,
            torch.float16,
            torch.bfloat16,
        ]
        assert [found for _, found in everyone] == [[1.5]] * 5


def times_of_an_exchange(topology: str, file: Path) -> tuple[float, float]:
    """When a rank begins its exchange and has waited for it; rank 1 begins last, after `file`."""
    rank = join()
    rounds = make_rounds(topology, num_ranks=dist.get_world_size())
    averager = GossipAverager(Gossip(rounds=rounds), start(rank), rank=rank)
    dist.barrier()
    if rank == 1:
        wait_until(file.exists)
    began = time.monotonic()
    averager.after_step()
    if rank == 0:
        file.touch()
    averager.before_step()
    waited = time.monotonic()
    dist.barrier()
    return began, waited


@pytest.mark.parametrize("topology", ["exp", pytest.param("complete", marks=pytest.mark.extended)])
def test_an_exchange_is_waited_for_only_before_the_next_step(topology, tmp_path):
    # If a step's end waited, rank 0 would never write the file that rank 1 waits for.
    outcomes = values(run_ranks(times_of_an_exchange, 4, topology, tmp_path / "ended"))
    (_, waited), (late, _) = outcomes[:2]
    assert waited > late
