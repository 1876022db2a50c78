"""How fast the replicas of a topology converge, and how many bytes each link carries.

All functions are pure and need neither torch nor a network.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llm.extensions.decentralized.rounds import Round

Matrix = npt.NDArray[np.float64]


def average(values: Matrix, groups: Round) -> Matrix:
    """Apply one round to `values` [ranks, dimensions]: each becomes the mean of its group."""
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
    distances = [_rms_distance(points)]
    for step in range(steps):
        points = average(points, rounds[step % len(rounds)])
        if noise:
            points += noise * generator.standard_normal(points.shape)
        distances.append(_rms_distance(points))
    return np.array(distances)


def _rms_distance(points: Matrix) -> float:
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
        bytes_in_node = 3 * (ranks_per_node - 1) / ranks_per_node * num_bytes
        for rank in range(sum(map(len, groups)) * ranks_per_node):
            first = rank - rank % ranks_per_node
            links[rank, first + (rank + 1 - first) % ranks_per_node] = bytes_in_node
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
    in_node, between_nodes, out_of_node = 0.0, 0.0, dict[int, float]()
    for (source, target), carried in links.items():
        node = source // ranks_per_node
        if node == target // ranks_per_node:
            in_node = max(in_node, carried)
        else:
            between_nodes = max(between_nodes, carried)
            out_of_node[node] = out_of_node.get(node, 0.0) + carried
    return in_node, between_nodes, max(out_of_node.values(), default=0.0)
