"""Shows the rounds, the convergence and the traffic of a topology of gossip.

`python -m benchmarks.topology --topology exp --ranks 16 --ranks_per_node 4`

Exit codes: 0 on success; 2 for an option that cannot work, or a file that cannot be written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.gossip_convergence import (
    busiest_links,
    consensus_distance,
    contraction,
    link_bytes,
    node_link_bytes,
)
from llm.config.command_line import parse_options
from llm.config.options import option, option_group
from llm.config.program import program
from llm.errors import ConfigError
from llm.extensions.decentralized.rounds import Round, Topology, check_topology, make_rounds

_SHOWN_ROUNDS = 24
_SHOWN_GROUPS = 32
_BYTES_PER_PARAMETER = 4
_EXACT = 1e-9


@option_group("Topology")
class TopologyOptions:
    """The topology to show, and the number of ranks."""

    topology: Topology = option("exp", "Topology of the groups that average in each round.")
    ranks: int = option(
        8, "Number of ranks that average with each other.", at_least=1, at_most=1024
    )
    ranks_per_node: int | None = option(
        None, "Ranks per node; by default all ranks are on one node.", at_least=1
    )
    gossip_group: Literal["world", "nodes"] = option(
        "world", "Replicas that average: ranks, or nodes with exactly averaged gradients."
    )
    parameters: str = option(
        "",
        "Number of parameters of the model, such as 124M or 7B; traffic is then shown in bytes of "
        "float32 weights, otherwise in model sizes.",
    )
    plot: str = option(
        "",
        "Plot the rounds and the distance from the mean to this .png or .svg file; needs "
        "matplotlib.",
        path=True,
    )


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    options = parse_options(
        TopologyOptions,
        argv,
        prog="python -m benchmarks.topology",
        description="Show the groups of ranks that average, how fast they converge, and the "
        "traffic on links.",
    )
    lines = _describe_topology(options)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _describe_topology(options: TopologyOptions) -> list[str]:
    ranks, ranks_per_node = options.ranks, options.ranks_per_node or options.ranks
    size = _parse_model_bytes(options.parameters)
    if options.plot and Path(options.plot).suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {options.plot} must end with .png or .svg.")
    nodes = options.gossip_group == "nodes"
    if nodes:
        check_topology("complete", num_ranks=ranks, ranks_per_node=ranks_per_node)
        rounds = make_rounds(options.topology, num_ranks=ranks // ranks_per_node)
    else:
        rounds = make_rounds(options.topology, num_ranks=ranks, ranks_per_node=ranks_per_node)
    lines = [f"{options.topology}: {ranks} ranks, {ranks_per_node} in a node"]
    if nodes:
        lines[0] += f", {ranks // ranks_per_node} nodes that average"
    lines += [
        f"round {n}: {_format_groups(r)}" for n, r in enumerate(rounds[:_SHOWN_ROUNDS], start=1)
    ]
    if len(rounds) > _SHOWN_ROUNDS:
        lines.append(f"... {len(rounds)} rounds in all")
    lines += [
        "",
        *_convergence_lines(rounds),
        "",
        *_traffic_lines(rounds, ranks_per_node, size, nodes=nodes),
    ]
    if options.plot:
        _plot_rounds(rounds, Path(options.plot), title=lines[0])
        lines += ["", f"Drawn: {options.plot}"]
    return lines


def _format_groups(groups: Round) -> str:
    """Return a round as text, such as 0-1  2-3."""
    texts = ["-".join(map(str, group)) for group in groups[:_SHOWN_GROUPS]]
    more = len(groups) - len(texts)
    return "  ".join(texts) + (f"  and {more} groups more" if more else "")


def _convergence_lines(rounds: list[Round]) -> list[str]:
    """Return lines on the convergence of ranks, alone and while they train."""
    factor = contraction(rounds)
    period = f"{len(rounds)} round{'s' if len(rounds) > 1 else ''}"
    if factor < _EXACT:
        contracts = f"contraction: 0; all are equal after {period}"
    else:
        contracts = (
            f"contraction: {factor:.6g} in {period}, {factor ** (1 / len(rounds)):.6g} per round"
        )
    steps = max(200, min(4 * len(rounds), 1000))
    settled = consensus_distance(rounds, steps=steps, noise=1.0, dimensions=16)[-100:].mean()
    return [
        contracts,
        f"distance from the mean where each step moves all by 1 at random: {settled:.2f} "
        f"(simulated, after {steps} steps)",
    ]


def _traffic_lines(
    rounds: list[Round], ranks_per_node: int, size: float | None, *, nodes: bool
) -> list[str]:
    """Return a table of the bytes on the busiest links in each round."""
    unit = 1.0 if size is None else size
    counted = "in sizes of the model" if size is None else f"the model has {_format_bytes(size)}"
    columns = "{:>10}  {:>15}  {:>15}  {:>15}"
    members = sum(map(len, rounds[0]))
    of_rounds = [
        node_link_bytes(groups, unit, ranks_per_node=ranks_per_node)
        if nodes
        else link_bytes(groups, unit)
        for groups in rounds
    ]
    everyone = (tuple(range(members * ranks_per_node if nodes else members)),)
    mean: dict[tuple[int, int], float] = {}
    for links in of_rounds:
        for link, carried in links.items():
            mean[link] = mean.get(link, 0.0) + carried / len(rounds)
    rows = [(f"round {number}", links) for number, links in enumerate(of_rounds, start=1)]
    rows = [*rows[:_SHOWN_ROUNDS], ("mean", mean), ("all-reduce", link_bytes(everyone, unit))]
    return [
        f"bytes that the busiest link carries in one direction ({counted})",
        columns.format("", "inside a node", "between nodes", "out of a node"),
        *(
            columns.format(
                name,
                *(
                    f"{carried:.3g}" if size is None else _format_bytes(carried)
                    for carried in busiest_links(links, ranks_per_node=ranks_per_node)
                ),
            )
            for name, links in rows
        ),
    ]


def _parse_model_bytes(text: str) -> float | None:
    """Return the bytes of a model from its number of parameters, such as 124M."""
    if not text:
        return None
    factors = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    factor = factors.get(text[-1].upper(), 1.0)
    try:
        number = float(text[:-1] if factor > 1 else text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--parameters expects a number such as 124M or 7B, not '{text}'.")
    return number * factor * _BYTES_PER_PARAMETER


def _format_bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _plot_rounds(rounds: list[Round], path: Path, *, title: str) -> None:
    """Plot a panel for each round, with a line between ranks that average; then the distance."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib.") from error
    plotted_rounds = rounds[:7]
    ranks = sum(map(len, rounds[0]))
    angles = 2 * np.pi * np.arange(ranks) / ranks
    x, y = np.sin(angles), np.cos(angles)
    figure = matplotlib.figure.Figure(
        figsize=(2.6 * len(plotted_rounds) + 4, 3.2), layout="constrained"
    )
    figure.suptitle(title)
    axes: list[Any] = list(
        figure.subplots(
            1, len(plotted_rounds) + 1, width_ratios=[1.0] * len(plotted_rounds) + [1.5]
        )
    )
    for number, (panel, groups) in enumerate(zip(axes, plotted_rounds, strict=False), start=1):
        for group in groups:
            corners = [*group, group[0]]
            panel.plot(x[corners], y[corners], linewidth=1, color="tab:blue")
        panel.plot(x, y, "o", markersize=max(1.0, 8 - ranks / 32), color="black")
        if ranks <= 32:
            for rank in range(ranks):
                panel.annotate(
                    str(rank), (1.16 * x[rank], 1.16 * y[rank]), ha="center", va="center"
                )
        limits = (-1.3, 1.3)
        panel.set(title=f"round {number} of {len(rounds)}", aspect="equal")
        panel.set(xlim=limits, ylim=limits)
        panel.axis("off")
    distances = consensus_distance(rounds, steps=max(20, 2 * len(rounds)))
    axes[-1].semilogy(np.maximum(distances, 1e-16), marker=".")
    axes[-1].set(title="distance from the mean", xlabel="round", ylim=(1e-17, 10))
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
