"""Who computes what: K-FAC's work spread over ranks, after KAISA (Pauloski et al. 2021).

The ranks form a grid. Each layer belongs to a column, whose ranks keep its bases and compute its
update; a row is one rank of each column, and its ranks tell one another the updates. One column
is KAISA's COMM-OPT (all ranks keep everything and no update is sent), as many columns as ranks is
MEM-OPT (each basis is kept once), and what is between is HYBRID-OPT. Each factor has one owner in
its column, who alone keeps the average and decomposes it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from llm.errors import ConfigError

KFACStrategy = Literal["comm-opt", "hybrid-opt", "mem-opt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Columns, rows and owners.

    Attributes:
        world_size: Number of ranks.
        num_columns: Number of columns; rank r is in column r % num_columns.
        column_of: Column of each group of factors, by the group's name.
        owner_of: Rank that averages and decomposes each factor, by the factor's name.
        turn_of: When in the interval between two updates of its basis each factor's is due, from
            0 to below 1.
    """

    world_size: int
    num_columns: int
    column_of: Mapping[str, int]
    owner_of: Mapping[str, int]
    turn_of: Mapping[str, float]

    def column_ranks(self, column: int) -> list[int]:
        """The ranks that keep a column's bases."""
        return list(range(column, self.world_size, self.num_columns))

    def row_ranks(self, rank: int) -> list[int]:
        """The ranks that tell one another their updates, by column."""
        first = rank - rank % self.num_columns
        return list(range(first, first + self.num_columns))


def assign(
    groups: Mapping[str, Sequence[tuple[str, float]]],
    *,
    world_size: int,
    strategy: KFACStrategy,
) -> Assignment:
    """Give each group of factors a column and each factor an owner, the costliest first.

    Args:
        groups: Factors that are needed together, each with its name and cost, by group.
        world_size: Number of ranks.
        strategy: Whether all ranks, half of them or one keep a basis.

    Raises:
        ConfigError: An odd number of ranks has no half.
    """
    num_columns = {"comm-opt": 1, "hybrid-opt": min(2, world_size), "mem-opt": world_size}[strategy]
    if world_size % num_columns:
        raise ConfigError(
            f"--kfac_strategy hybrid-opt divides the ranks in two halves, and {world_size} is odd; "
            "use comm-opt or mem-opt, or an even number of ranks."
        )
    costs = {name: sum(cost for _, cost in factors) for name, factors in groups.items()}
    column_loads = [0.0] * num_columns
    loads = [0.0] * world_size
    column_of, owner_of = {}, {}
    for group in sorted(groups, key=lambda name: (-costs[name], name)):
        column = column_loads.index(min(column_loads))
        column_loads[column] += costs[group]
        column_of[group] = column
        ranks = range(column, world_size, num_columns)
        for name, cost in sorted(groups[group], key=lambda item: (-item[1], item[0])):
            owner = min(ranks, key=lambda rank: loads[rank])
            loads[owner] += cost
            owner_of[name] = owner
    return Assignment(
        world_size=world_size,
        num_columns=num_columns,
        column_of=column_of,
        owner_of=owner_of,
        turn_of=_turns([factor for factors in groups.values() for factor in factors]),
    )


def _turns(factors: list[tuple[str, float]]) -> dict[str, float]:
    """Spread factors over an interval by their cost.

    Factors of about the same cost, which lie with different owners, come one after another. The
    turns do not depend on the layout, and so neither does a run's course.
    """
    whole = sum(cost for _, cost in factors)
    turns = {}
    done = 0.0
    for name, cost in sorted(factors, key=lambda item: (-item[1], item[0])):
        turns[name] = done / whole
        done += cost
    return turns
