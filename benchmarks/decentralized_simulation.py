"""Simulate topologies on large clusters: distance from the mean and traffic, by arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gossip_convergence import (
    busiest_links,
    consensus_distance,
    contraction,
    link_bytes,
)
from benchmarks.report import Goal, Section, table
from llm.extensions.decentralized.rounds import Round, make_rounds
from tests.support.decentralized import mixing_matrix

TOPOLOGIES = ("complete", "exp", "ring", "alternating-exp-ring")
_DIMENSIONS = 8
_EXACT = 1e-9
_LARGEST_ERROR = 1e-12


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The properties of a topology for a number of ranks.

    Attributes:
        rounds: Rounds of a period.
        factor: Contraction of the distance from the mean in a round, averaged over a period; 0 if
            a period makes all ranks equal.
        distance: Distance from the mean if each step moves every rank by 1 at random.
        out_of_node: Sizes of the model that the busiest node sends out in a step, on average.
        error: Largest deviation of the matrices from symmetric and doubly stochastic.
    """

    rounds: int
    factor: float
    distance: float
    out_of_node: float
    error: float


def simulate(topology: str, *, ranks: int, ranks_per_node: int) -> Simulated:
    """Run the rounds of a topology on random points.

    Args:
        topology: One of `TOPOLOGIES`.
        ranks: Number of ranks.
        ranks_per_node: Ranks of a node.
    """
    rounds = make_rounds(topology, num_ranks=ranks, ranks_per_node=ranks_per_node)
    steps = max(200, min(4 * len(rounds), 1000), 2 * ranks)
    distances = consensus_distance(rounds, steps=steps, noise=1.0, dimensions=_DIMENSIONS)
    factor = contraction(rounds)
    return Simulated(
        rounds=len(rounds),
        factor=0.0 if factor < _EXACT else factor ** (1 / len(rounds)),
        distance=float(distances[-100:].mean()),
        out_of_node=_out_of_node(rounds, ranks_per_node),
        error=max(_error(groups) for groups in rounds),
    )


def _out_of_node(rounds: Sequence[Round], ranks_per_node: int) -> float:
    """Return the mean over the rounds of the bytes of the node that sends most."""
    total: dict[tuple[int, int], float] = {}
    for groups in rounds:
        for link, carried in link_bytes(groups, 1.0).items():
            total[link] = total.get(link, 0.0) + carried / len(rounds)
    return busiest_links(total, ranks_per_node=ranks_per_node)[2]


def _error(groups: Round) -> float:
    matrix = mixing_matrix(groups)
    sums = np.concatenate([matrix.sum(axis=0), matrix.sum(axis=1)])
    return float(max(np.abs(matrix - matrix.T).max(), np.abs(sums - 1).max()))


def simulation_section(sizes: Sequence[int], *, ranks_per_node: int, plot: Path | None) -> Section:
    """Simulate every topology on every number of ranks.

    Args:
        sizes: Numbers of ranks, powers of two.
        ranks_per_node: Ranks of a node.
        plot: Image to draw; needs matplotlib.
    """
    found = {
        topology: [simulate(topology, ranks=n, ranks_per_node=ranks_per_node) for n in sizes]
        for topology in TOPOLOGIES
    }
    rows = [
        [
            topology,
            str(ranks),
            str(one.rounds),
            "exact" if one.factor == 0 else f"{one.factor:.6f}",
            f"{one.distance:.2f}",
            f"{one.out_of_node:.3g}",
        ]
        for topology, of_sizes in found.items()
        for ranks, one in zip(sizes, of_sizes, strict=True)
    ]
    if plot is not None:
        draw(plot, sizes, found)
    error = max(one.error for of_sizes in found.values() for one in of_sizes)
    lines = [
        f"Nodes of {ranks_per_node} ranks that average as ranks of the world. Contraction is per "
        "round, over a period; `exact` where a period makes all ranks equal. The distance from the "
        "mean is simulated, with a random move of size 1 of every rank in each step, at the end of "
        "200 steps, or of twice as many as there are ranks if that is more. Bytes are "
        "those that the busiest node sends out in a step, in sizes of the model.",
        "",
        *table(
            ("topology", "ranks", "rounds", "contraction", "distance", "bytes out of a node"), rows
        ),
    ]
    goal = Goal(
        what=f"matrices of up to {max(sizes):,} ranks symmetric and doubly stochastic: within "
        f"{_LARGEST_ERROR:g}",
        measured=f"{error:.1g}",
        met=error <= _LARGEST_ERROR,
    )
    return Section(title="Larger clusters, simulated", lines=lines, goals=[goal])


def draw(path: Path, sizes: Sequence[int], found: dict[str, list[Simulated]]) -> None:
    """Draw distance and bytes by number of ranks, and the largest topologies' distance by step."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(12, 3.6), layout="constrained")
    axes: list[Any] = list(figure.subplots(1, 3))
    for topology, of_sizes in found.items():
        axes[0].loglog(sizes, [one.distance for one in of_sizes], marker="o", label=topology)
        axes[1].semilogx(sizes, [one.out_of_node for one in of_sizes], marker="o")
        rounds = make_rounds(topology, num_ranks=sizes[-1], ranks_per_node=min(4, sizes[-1]))
        distances = consensus_distance(rounds, steps=40, dimensions=_DIMENSIONS)
        axes[2].semilogy(np.maximum(distances, 1e-16))
    axes[0].set(title="distance from the mean while training", xlabel="ranks")
    axes[1].set(title="sent out of a node in a step, models", xlabel="ranks")
    axes[2].set(title=f"distance of {sizes[-1]:,} ranks left alone", xlabel="steps")
    axes[2].set_ylim(1e-3, 2)
    axes[0].legend()
    figure.savefig(path, dpi=110)
