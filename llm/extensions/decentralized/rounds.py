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


def check_topology(topology: str, *, num_ranks: int, ranks_per_node: int) -> None:
    """Refuse a number of ranks that a topology does not support.

    Args:
        topology: One of `TOPOLOGIES`.
        num_ranks: Number of ranks that average with each other.
        ranks_per_node: Number of consecutive ranks on each node.

    Raises:
        ConfigError: Names the sizes that the topology allows.
    """
    if topology not in TOPOLOGIES:
        raise ConfigError(f"--topology {topology} is none of {', '.join(TOPOLOGIES)}.")
    if ranks_per_node < 1 or num_ranks % ranks_per_node:
        raise ConfigError(
            f"{num_ranks} ranks cannot be spread over nodes of {ranks_per_node}; start the same "
            "number of ranks on every node."
        )
    if topology == "exp" and not _is_power_of_two(num_ranks):
        raise ConfigError(
            f"--topology exp takes a power of two of ranks, or of nodes where these average "
            f"({_powers_around(num_ranks)}), not {num_ranks}; ring and complete take any number."
        )
    num_nodes = num_ranks // ranks_per_node
    if topology == "alternating-exp-ring" and not _is_power_of_two(num_nodes):
        raise ConfigError(
            f"--topology alternating-exp-ring takes a power of two of nodes "
            f"({_powers_around(num_nodes)}), not {num_nodes} ({num_ranks} ranks in nodes of "
            f"{ranks_per_node}); ring and complete take any number."
        )


def make_rounds(topology: str, *, num_ranks: int, ranks_per_node: int = 1) -> list[Round]:
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
        num_ranks: Number of ranks that average with each other.
        ranks_per_node: Number of consecutive ranks on each node.

    Raises:
        ConfigError: The topology does not allow that number of ranks.
    """
    check_topology(topology, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    if topology == "alternating-exp-ring":
        return _make_alternating_rounds(num_ranks // ranks_per_node, ranks_per_node)
    if topology == "complete" or num_ranks <= 2:
        return [(tuple(range(num_ranks)),)]
    make_pairs = _make_exponential_rounds if topology == "exp" else _make_ring_rounds
    return make_pairs(num_ranks)


def _make_exponential_rounds(num_ranks: int) -> list[Round]:
    distances = [2**i for i in range(num_ranks.bit_length() - 1)]
    return [
        tuple((rank, rank ^ distance) for rank in range(num_ranks) if rank < rank ^ distance)
        for distance in distances
    ]


def _make_ring_rounds(num_ranks: int) -> list[Round]:
    """Return the rounds of pairs of neighbors in a ring; with an odd number one rank is idle."""
    if num_ranks % 2 == 0:
        pairs_from_even = tuple((rank, rank + 1) for rank in range(0, num_ranks, 2))
        pairs_from_odd = tuple(
            tuple(sorted((rank, (rank + 1) % num_ranks))) for rank in range(1, num_ranks, 2)
        )
        return [pairs_from_even, pairs_from_odd]
    # With rank i idle the others form pairs around the ring, other pairs than with i - 1 idle.
    return [
        (
            (idle_rank,),
            *(
                tuple(sorted(((idle_rank + step) % num_ranks, (idle_rank + step + 1) % num_ranks)))
                for step in range(1, num_ranks, 2)
            ),
        )
        for idle_rank in range(num_ranks)
    ]


def _make_alternating_rounds(num_nodes: int, ranks_per_node: int) -> list[Round]:
    """Return rounds where half of the pairs of nodes average together, and the others alone."""
    ranks_by_node = [
        tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node))
        for node in range(num_nodes)
    ]
    if num_nodes == 1:
        return [tuple(ranks_by_node)]
    rounds = []
    for pairs in _make_exponential_rounds(num_nodes):
        for parity in range(2):
            groups: list[tuple[int, ...]] = []
            for pair_index, (node, partner) in enumerate(pairs):
                if pair_index % 2 != parity:
                    groups.append(ranks_by_node[node] + ranks_by_node[partner])
                else:
                    groups += [ranks_by_node[node], ranks_by_node[partner]]
            rounds.append(tuple(groups))
    return rounds


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _powers_around(number: int) -> str:
    """Return the powers of two next to a number as examples for a message, such as 1, 2, 4, 8."""
    below = 2 ** (number.bit_length() - 1)
    powers = [power for power in (below // 2, below, below * 2, below * 4) if power >= 1]
    return f"..., {', '.join(map(str, powers))}, ..." if powers[0] > 1 else "1, 2, 4, 8, ..."
