"""Topologies of gossip as rounds of disjoint groups: convergence, and bytes on each link.

Gossip replaces the mean over all ranks, which waits for the slowest link, by a mean over a small
group in each step. The groups change from round to round and repeat after a period. In a round
every rank is in exactly one group and takes the group's uniform mean: the matrix of a round is
symmetric and doubly stochastic, and the mean over all ranks never changes.

All functions are pure and need neither torch nor a network.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from llm.errors import ConfigError
from llm.parallel.options import Topology

TOPOLOGIES: tuple[str, ...] = get_args(Topology)

Round = tuple[tuple[int, ...], ...]
"""Disjoint groups that cover all ranks; a group of one rank keeps its weights."""

Matrix = npt.NDArray[np.float64]


def check_topology(topology: str, *, ranks: int, ranks_per_node: int) -> None:
    """Refuse a number of ranks that a topology does not support.

    Args:
        topology: One of `TOPOLOGIES`.
        ranks: Number of ranks that average with each other.
        ranks_per_node: Number of consecutive ranks on each node.

    Raises:
        ConfigError: Names the sizes that the topology allows.
    """
    if topology not in TOPOLOGIES:
        raise ConfigError(f"--topology {topology} is none of {', '.join(TOPOLOGIES)}.")
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ConfigError(
            f"{ranks} ranks cannot be spread over nodes of {ranks_per_node}; start the same number "
            "of ranks on every node."
        )
    if topology == "exp" and not _is_power_of_two(ranks):
        raise ConfigError(
            f"--topology exp takes a power of two of ranks, or of nodes where these average "
            f"({_powers_around(ranks)}), not {ranks}; ring and complete take any number."
        )
    nodes = ranks // ranks_per_node
    if topology == "alternating-exp-ring" and not _is_power_of_two(nodes):
        raise ConfigError(
            f"--topology alternating-exp-ring takes a power of two of nodes "
            f"({_powers_around(nodes)}), not {nodes} ({ranks} ranks in nodes of {ranks_per_node}); "
            "ring and complete take any number."
        )


def make_rounds(topology: str, *, ranks: int, ranks_per_node: int = 1) -> list[Round]:
    """Return the rounds of one period.

    - complete: all ranks in one group. All are equal after one round.
    - exp: pairs of j and j xor 2^i, for a power of two of ranks. All are equal after log2 n rounds.
    - ring: pairs with the next rank, then with the previous one, in two rounds; an odd number of
      ranks takes n rounds, and each round leaves another rank idle.
    - alternating-exp-ring: nodes form pairs as ranks do in exp. In one round half of the pairs
      average over both nodes and the others inside each node, in the next round the other way
      round, so that the network between nodes is used evenly. All are equal after 2 log2 nodes
      rounds.

    Args:
        topology: One of `TOPOLOGIES`.
        ranks: Number of ranks that average with each other.
        ranks_per_node: Number of consecutive ranks on each node.

    Raises:
        ConfigError: The topology does not allow that number of ranks.
    """
    check_topology(topology, ranks=ranks, ranks_per_node=ranks_per_node)
    if topology == "alternating-exp-ring":
        return _alternating(ranks // ranks_per_node, ranks_per_node)
    if topology == "complete" or ranks <= 2:
        return [(tuple(range(ranks)),)]
    return _exp(ranks) if topology == "exp" else _ring(ranks)


def _exp(ranks: int) -> list[Round]:
    distances = [2**i for i in range(ranks.bit_length() - 1)]
    return [tuple((j, j ^ d) for j in range(ranks) if j < j ^ d) for d in distances]


def _ring(ranks: int) -> list[Round]:
    if ranks % 2 == 0:
        even = tuple((j, j + 1) for j in range(0, ranks, 2))
        odd = tuple(_pair(j, (j + 1) % ranks) for j in range(1, ranks, 2))
        return [even, odd]
    # With rank i idle the others form pairs around the ring, other pairs than with i - 1 idle.
    return [
        (
            (idle,),
            *(
                _pair((idle + step) % ranks, (idle + step + 1) % ranks)
                for step in range(1, ranks, 2)
            ),
        )
        for idle in range(ranks)
    ]


def _alternating(nodes: int, ranks_per_node: int) -> list[Round]:
    members = [
        tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node)) for node in range(nodes)
    ]
    if nodes == 1:
        return [tuple(members)]
    rounds = []
    for pairs in _exp(nodes):
        for parity in range(2):
            groups: list[tuple[int, ...]] = []
            for number, (one, other) in enumerate(pairs):
                if number % 2 != parity:
                    groups.append(members[one] + members[other])
                else:
                    groups += [members[one], members[other]]
            rounds.append(tuple(groups))
    return rounds


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _powers_around(number: int) -> str:
    below = 2 ** (number.bit_length() - 1)
    powers = [power for power in (below // 2, below, below * 2, below * 4) if power >= 1]
    return f"..., {', '.join(map(str, powers))}, ..." if powers[0] > 1 else "1, 2, 4, 8, ..."


def mixing_matrix(groups: Round) -> Matrix:
    """Return W of a round, float64 [ranks, ranks]: `x_i <- sum_j W[i, j] x_j`."""
    ranks = sum(map(len, groups))
    matrix = np.zeros((ranks, ranks))
    for group in groups:
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


def average(values: Matrix, groups: Round) -> Matrix:
    """Apply one round to `values` [ranks, dimensions], without its matrix."""
    mixed = np.empty_like(values)
    for size in {len(group) for group in groups}:
        members = np.array([group for group in groups if len(group) == size])
        mixed[members] = values[members].mean(axis=1, keepdims=True)
    return mixed


def contraction(rounds: Sequence[Round]) -> float:
    """Return the factor that shrinks the distance from the mean per period, in the long run.

    It is the largest modulus of the eigenvalues of the rounds' product, without the eigenvalue of
    the mean: 0 if all ranks are equal after a period, cos^2(2 pi / n) for the ring of an even n.
    """
    ranks = sum(map(len, rounds[0]))
    # After the first round ranks of one group are equal. So one dimension for each group is enough
    # for all eigenvalues of the product other than 0, and the matrix is much smaller.
    basis = np.zeros((ranks, len(rounds[0])))
    for number, group in enumerate(rounds[0]):
        basis[list(group), number] = len(group) ** -0.5
    product = basis - basis.mean(axis=0)
    for groups in rounds[1:]:
        product = average(product, groups)
    return float(np.abs(np.linalg.eigvals(basis.T @ product)).max())


def consensus_distance(
    rounds: Sequence[Round], *, steps: int, noise: float = 0.0, dimensions: int = 64
) -> Matrix:
    """Simulate the distance of ranks from their mean.

    Ranks start at independent random points. Each step is a round, followed by an independent
    random move of every rank, as by gradients of different samples.

    Args:
        rounds: The rounds of one period.
        steps: Number of steps to simulate.
        noise: Standard deviation of a rank's move.
        dimensions: Dimensions of the points; the result varies less with more of them.

    Returns:
        Root of the mean squared distance from the mean after each step, [steps + 1].
    """
    ranks = sum(map(len, rounds[0]))
    generator = np.random.default_rng(0)
    points = generator.standard_normal((ranks, dimensions))
    distances = [_distance(points)]
    for step in range(steps):
        points = average(points, rounds[step % len(rounds)])
        if noise:
            points += noise * generator.standard_normal(points.shape)
        distances.append(_distance(points))
    return np.array(distances)


def _distance(points: Matrix) -> float:
    return float(np.sqrt(np.square(points - points.mean(axis=0)).mean()))


def link_bytes(groups: Round, num_bytes: float) -> dict[tuple[int, int], float]:
    """Return the bytes that each link from one rank to another carries in a round.

    A pair sends all weights both ways. A larger group of g ranks runs a ring all-reduce: each rank
    sends 2 (g - 1) / g of the weights to the next one.

    Args:
        groups: A round.
        num_bytes: Size of the weights.
    """
    links = {}
    for group in groups:
        size = len(group)
        if size == 1:
            continue
        for position, rank in enumerate(group):
            links[rank, group[(position + 1) % size]] = 2 * (size - 1) / size * num_bytes
    return links


def node_link_bytes(
    groups: Round, num_bytes: float, *, ranks_per_node: int
) -> dict[tuple[int, int], float]:
    """Return the bytes that each link between ranks carries where nodes average with nodes.

    Each rank exchanges an equal slice with its counterparts on other nodes. Inside a node of L
    ranks, each sends 3 (L - 1) / L of the model's size: two thirds for the all-reduce of gradients,
    one third for the all-gather of the averaged slices.

    Args:
        groups: A round of nodes.
        num_bytes: Size of the weights.
        ranks_per_node: L.
    """
    links = {}
    for (source, target), carried in link_bytes(groups, num_bytes / ranks_per_node).items():
        for local in range(ranks_per_node):
            links[source * ranks_per_node + local, target * ranks_per_node + local] = carried
    if ranks_per_node > 1:
        inside = 3 * (ranks_per_node - 1) / ranks_per_node * num_bytes
        for rank in range(sum(map(len, groups)) * ranks_per_node):
            first = rank - rank % ranks_per_node
            links[rank, first + (rank + 1 - first) % ranks_per_node] = inside
    return links


def busiest_links(
    links: dict[tuple[int, int], float], *, ranks_per_node: int
) -> tuple[float, float, float]:
    """Return the most bytes on a link inside a node, on one between nodes, and out of a node.

    Args:
        links: Result of `link_bytes`.
        ranks_per_node: Number of consecutive ranks on each node.

    Returns:
        Bytes in this order; 0 without the link.
    """
    inside, between, out_of_node = 0.0, 0.0, dict[int, float]()
    for (source, target), carried in links.items():
        node = source // ranks_per_node
        if node == target // ranks_per_node:
            inside = max(inside, carried)
        else:
            between = max(between, carried)
            out_of_node[node] = out_of_node.get(node, 0.0) + carried
    return inside, between, max(out_of_node.values(), default=0.0)
