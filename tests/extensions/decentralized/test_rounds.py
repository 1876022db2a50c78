"""Issue: matrices symmetric and doubly stochastic; contraction as theory has it."""

import numpy as np
import pytest

from benchmarks.gossip_convergence import (
    average,
    busiest_links,
    consensus_distance,
    contraction,
    link_bytes,
)
from llm.errors import ConfigError
from llm.extensions.decentralized.rounds import TOPOLOGIES, check_topology, make_rounds
from tests.support.decentralized import mixing_matrix


def allowed() -> list[tuple[str, int, int]]:
    cases = []
    for topology in TOPOLOGIES:
        for ranks in [*range(1, 17), 64]:
            for ranks_per_node in (1, 2, 3, 4, 8):
                try:
                    check_topology(topology, num_ranks=ranks, ranks_per_node=ranks_per_node)
                except ConfigError:
                    continue
                cases.append((topology, ranks, ranks_per_node))
    return cases


def test_only_complete_and_ring_accept_any_number_of_ranks():
    sizes = {name: {n for topology, n, _ in allowed() if topology == name} for name in TOPOLOGIES}
    assert sizes["complete"] == sizes["ring"] == {*range(1, 17), 64}
    assert sizes["exp"] == {1, 2, 4, 8, 16, 64}
    assert {n for name, n, each in allowed() if name == "alternating-exp-ring" and each == 3} == {
        3,
        6,
        12,
    }


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_round_is_symmetric_and_doubly_stochastic_over_all_ranks(topology):
    cases = [case for case in allowed() if case[0] == topology]
    assert len(cases) > 5
    for _, ranks, ranks_per_node in cases:
        for groups in make_rounds(topology, num_ranks=ranks, ranks_per_node=ranks_per_node):
            assert sorted(rank for group in groups for rank in group) == list(range(ranks))
            assert all(list(group) == sorted(group) for group in groups)
            matrix = mixing_matrix(groups)
            assert np.array_equal(matrix, matrix.T)
            np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-15)
            assert (matrix >= 0).all()


def test_averaging_by_groups_is_multiplying_by_the_matrix():
    points = np.random.default_rng(1).standard_normal((7, 5))
    for groups in make_rounds("ring", num_ranks=7):
        expected = mixing_matrix(groups) @ points
        np.testing.assert_allclose(average(points, groups), expected, rtol=0, atol=1e-15)


def test_the_rounds_of_eight_ranks_read_as_the_textbook_has_them():
    assert make_rounds("complete", num_ranks=8) == [((0, 1, 2, 3, 4, 5, 6, 7),)]
    assert make_rounds("exp", num_ranks=8) == [
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 2), (1, 3), (4, 6), (5, 7)),
        ((0, 4), (1, 5), (2, 6), (3, 7)),
    ]
    assert make_rounds("ring", num_ranks=8) == [
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((1, 2), (3, 4), (5, 6), (0, 7)),
    ]
    assert make_rounds("alternating-exp-ring", num_ranks=8, ranks_per_node=2) == [
        ((0, 1), (2, 3), (4, 5, 6, 7)),
        ((0, 1, 2, 3), (4, 5), (6, 7)),
        ((0, 1), (4, 5), (2, 3, 6, 7)),
        ((0, 1, 4, 5), (2, 3), (6, 7)),
    ]


def test_a_ring_of_an_odd_number_leaves_another_rank_idle_in_each_round():
    assert make_rounds("ring", num_ranks=5) == [
        ((0,), (1, 2), (3, 4)),
        ((1,), (2, 3), (0, 4)),
        ((2,), (3, 4), (0, 1)),
        ((3,), (0, 4), (1, 2)),
        ((4,), (0, 1), (2, 3)),
    ]


def slow_contraction(rounds) -> float:
    ranks = len(mixing_matrix(rounds[0]))
    product = np.eye(ranks)
    for groups in rounds:
        product = mixing_matrix(groups) @ product
    return np.abs(np.linalg.eigvals(product - 1 / ranks)).max()


@pytest.mark.parametrize(
    ("topology", "ranks", "ranks_per_node", "period", "expected"),
    [
        ("complete", 8, 1, 1, 0.0),
        ("exp", 8, 1, 3, 0.0),
        ("exp", 64, 8, 6, 0.0),
        ("ring", 4, 1, 2, 0.0),
        ("ring", 8, 1, 2, 0.5),
        ("ring", 64, 1, 2, np.cos(2 * np.pi / 64) ** 2),
        ("alternating-exp-ring", 8, 2, 4, 0.0),
        ("alternating-exp-ring", 12, 3, 4, 0.0),
        ("alternating-exp-ring", 64, 4, 8, 0.0),
    ],
)
def test_a_period_contracts_as_in_theory(topology, ranks, ranks_per_node, period, expected):
    rounds = make_rounds(topology, num_ranks=ranks, ranks_per_node=ranks_per_node)
    assert len(rounds) == period
    assert contraction(rounds) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("ranks", [3, 5, 7, 10, 15])
def test_the_contraction_is_the_second_eigenvalue_of_the_whole_product(ranks):
    rounds = make_rounds("ring", num_ranks=ranks)
    assert contraction(rounds) == pytest.approx(slow_contraction(rounds), abs=1e-9)


def test_1000_ranks_converge_at_the_rate_of_the_contraction():
    rounds = make_rounds("exp", num_ranks=1024)
    distances = consensus_distance(rounds, steps=10, dimensions=512)
    # The variance of a mean of 2^k independent points, less that of the mean of all.
    expected = (0.5 ** np.arange(11) - 0.5**10) / (1 - 0.5**10)
    np.testing.assert_allclose((distances[:9] / distances[0]) ** 2, expected[:9], rtol=0.1)
    assert distances[10] < 1e-14
    ring = make_rounds("ring", num_ranks=32)
    late = consensus_distance(ring, steps=400)
    assert late[400] / late[398] == pytest.approx(contraction(ring), abs=1e-6)


def test_link_bytes_are_those_of_pairs_and_rings():
    pair, all_four = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    assert link_bytes(pair, 100) == {(0, 1): 100, (1, 0): 100, (2, 3): 100, (3, 2): 100}
    assert link_bytes(all_four, 100) == {(0, 1): 150, (1, 2): 150, (2, 3): 150, (3, 0): 150}
    assert link_bytes(((0,), (1, 2)), 100) == {(1, 2): 100, (2, 1): 100}
    assert busiest_links(link_bytes(pair, 100), ranks_per_node=2) == (100, 0, 0)
    assert busiest_links(link_bytes(all_four, 100), ranks_per_node=2) == (150, 150, 150)
    across = ((0, 2), (1, 3))
    assert busiest_links(link_bytes(across, 100), ranks_per_node=2) == (0, 100, 200)


@pytest.mark.parametrize(
    ("topology", "ranks", "ranks_per_node", "words"),
    [
        ("exp", 6, 1, r"a power of two of ranks,.* \(\.\.\., 2, 4, 8, 16, \.\.\.\), not 6;"),
        ("alternating-exp-ring", 12, 4, r"of two of nodes \(1, 2, 4, 8, \.\.\.\), not 3 \(12"),
        ("complete", 6, 4, "6 ranks cannot be spread over nodes of 4"),
        ("star", 6, 1, "--topology star is none of complete, exp, ring, alternating-exp-ring"),
    ],
)  # fmt: skip
def test_an_invalid_size_of_a_topology_is_refused_with_the_valid_ones(
    topology, ranks, ranks_per_node, words
):
    with pytest.raises(ConfigError, match=words):
        make_rounds(topology, num_ranks=ranks, ranks_per_node=ranks_per_node)
