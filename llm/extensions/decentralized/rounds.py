"""Topologies of gossip as rounds of disjoint groups of replicas.

Gossip replaces the mean over all ranks, which waits for the slowest link, by a mean over a small
group in each step. The groups change from round to round and repeat after a period. In a round
every rank is in exactly one group and takes the group's uniform mean: the matrix of a round is
symmetric and doubly stochastic, and the mean over all ranks never changes.

All functions are pure and need neither torch nor numpy: options are checked with them.
"""

from typing import Literal, get_args

from llm.errors import ConfigError

Topology = Literal["complete", "exp", "ring", "alternating-exp-ring"]
TOPOLOGIES: tuple[str, ...] = get_args(Topology)

Round = tuple[tuple[int, ...], ...]
"""Disjoint groups that cover all ranks; a group of one rank keeps its weights."""


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
        return _alternating_rounds(ranks // ranks_per_node, ranks_per_node)
    if topology == "complete" or ranks <= 2:
        return [(tuple(range(ranks)),)]
    return _exponential_rounds(ranks) if topology == "exp" else _ring_rounds(ranks)


def _exponential_rounds(ranks: int) -> list[Round]:
    distances = [2**i for i in range(ranks.bit_length() - 1)]
    return [
        tuple((rank, rank ^ distance) for rank in range(ranks) if rank < rank ^ distance)
        for distance in distances
    ]


def _ring_rounds(ranks: int) -> list[Round]:
    if ranks % 2 == 0:
        even = tuple((rank, rank + 1) for rank in range(0, ranks, 2))
        odd = tuple(_sorted_pair(rank, (rank + 1) % ranks) for rank in range(1, ranks, 2))
        return [even, odd]
    # With rank i idle the others form pairs around the ring, other pairs than with i - 1 idle.
    return [
        (
            (idle_rank,),
            *(
                _sorted_pair((idle_rank + step) % ranks, (idle_rank + step + 1) % ranks)
                for step in range(1, ranks, 2)
            ),
        )
        for idle_rank in range(ranks)
    ]


def _alternating_rounds(nodes: int, ranks_per_node: int) -> list[Round]:
    ranks_by_node = [
        tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node)) for node in range(nodes)
    ]
    if nodes == 1:
        return [tuple(ranks_by_node)]
    rounds = []
    for pairs in _exponential_rounds(nodes):
        for parity in range(2):
            groups: list[tuple[int, ...]] = []
            for pair_index, (node, partner) in enumerate(pairs):
                if pair_index % 2 != parity:
                    groups.append(ranks_by_node[node] + ranks_by_node[partner])
                else:
                    groups += [ranks_by_node[node], ranks_by_node[partner]]
            rounds.append(tuple(groups))
    return rounds


def _sorted_pair(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first < second else (second, first)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _powers_around(number: int) -> str:
    """Return the powers of two next to a number as examples for a message, such as 1, 2, 4, 8."""
    below = 2 ** (number.bit_length() - 1)
    powers = [power for power in (below // 2, below, below * 2, below * 4) if power >= 1]
    return f"..., {', '.join(map(str, powers))}, ..." if powers[0] > 1 else "1, 2, 4, 8, ..."
