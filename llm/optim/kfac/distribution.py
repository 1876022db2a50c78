"""K-FAC's work spread over ranks, after KAISA (Pauloski et al. 2021, arXiv:2107.01739).

The ranks form a grid. Each layer belongs to a column, whose ranks keep its bases and compute its
update; a row has one rank of each column, and its ranks exchange their updates. One column is
KAISA's COMM-OPT (every rank keeps every basis, and no update is sent), as many columns as ranks is
MEM-OPT (each basis is kept once), and anything between is HYBRID-OPT. Each factor has an owner in
its column, the one rank that keeps its average and decomposes it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from llm.errors import ConfigError
from llm.optim.kfac.factors import Factor
from llm.optim.whole import FactorRanks

KFACStrategy = Literal["comm-opt", "hybrid-opt", "mem-opt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which rank computes what, and when in an interval.

    Attributes:
        world_size: Number of ranks.
        num_columns: Number of columns; rank r is in column r % num_columns.
        column_of: Column of each group of factors, by the group's name.
        owner_of: Rank that averages and decomposes each factor, by the factor's name.
        phase_of: Position of a factor's decomposition in the interval between two of them, in
            [0, 1), by the factor's name.
    """

    world_size: int
    num_columns: int
    column_of: Mapping[str, int]
    owner_of: Mapping[str, int]
    phase_of: Mapping[str, float]

    def column_ranks(self, column: int) -> list[int]:
        """Return the ranks that keep a column's bases."""
        return list(range(column, self.world_size, self.num_columns))

    def row_ranks(self, rank: int) -> list[int]:
        """Return the ranks that exchange their updates with a rank, by column."""
        first = rank - rank % self.num_columns
        return list(range(first, first + self.num_columns))


def assign(
    groups: Mapping[str, Mapping[str, float]],
    *,
    world_size: int,
    strategy: KFACStrategy,
    everywhere: Mapping[str, Mapping[str, float]] | None = None,
) -> Assignment:
    """Give each group of factors a column and each factor an owner, the costliest first.

    Args:
        groups: Factors that are needed together, by group: the cost of each by its name.
        world_size: Number of ranks.
        strategy: Whether all ranks, half of them or one keep a basis.
        everywhere: The groups of the whole model, if `groups` are those of a pipeline stage.

    Raises:
        ConfigError: An odd number of ranks has no half.
    """
    num_columns = {"comm-opt": 1, "hybrid-opt": min(2, world_size), "mem-opt": world_size}[strategy]
    if world_size % num_columns:
        raise ConfigError(
            f"--kfac_strategy hybrid-opt divides the ranks in two halves, and {world_size} is odd; "
            "use comm-opt or mem-opt, or an even number of ranks."
        )
    column_loads, rank_loads = [0.0] * num_columns, [0.0] * world_size
    column_of, owner_of = {}, {}
    for group, load in _costliest_first({name: sum(groups[name].values()) for name in groups}):
        column = column_of[group] = column_loads.index(min(column_loads))
        column_loads[column] += load
        for factor, cost in _costliest_first(groups[group]):
            ranks = range(column, world_size, num_columns)
            owner = owner_of[factor] = min(ranks, key=lambda rank: rank_loads[rank])
            rank_loads[owner] += cost
    # The phases spread the factors over an interval by their cost. They do not depend on the
    # number of ranks or the strategy, so that neither changes the course of a run.
    every = (everywhere or groups).values()
    costs = {name: cost for factors in every for name, cost in factors.items()}
    phase_of, done, total = {}, 0.0, sum(costs.values())
    for factor, cost in _costliest_first(costs):
        phase_of[factor] = done / total
        done += cost
    return Assignment(
        world_size=world_size,
        num_columns=num_columns,
        column_of=column_of,
        owner_of=owner_of,
        phase_of=phase_of,
    )


def _costliest_first(costs: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort by cost, and by name where costs are equal: every rank must get the same order."""
    return sorted(costs.items(), key=lambda item: (-item[1], item[0]))


class Exchange:
    """Collective operations along the columns and rows of an assignment.

    Every rank must make one and call its methods in the same order; with one rank nothing is sent.
    Tensors with the same source and destination are sent as one flat tensor.

    Args:
        assignment: Which ranks own and keep what.
        rank: Rank of this process.
        ranks: Where weights are sharded, the ranks of the assignment, each a column of its own.
            Nothing but statistics is sent then: `llm.parallel` sends gradients and updates.

    Attributes:
        rank: The same.
        column: Its column.
        is_first: Whether this rank carries on a count that was saved as a sum over ranks.
    """

    def __init__(
        self, assignment: Assignment, *, rank: int, ranks: FactorRanks | None = None
    ) -> None:
        self._assignment = assignment
        self._is_alone = ranks is None and assignment.world_size == 1
        self._ranks = ranks or FactorRanks(
            rank=rank, size=assignment.world_size, is_first=rank == 0
        )
        self.rank = rank
        self.column = rank % assignment.num_columns
        self.is_first = self._ranks.is_first
        self._column: dist.ProcessGroup | None = None
        self._row: dist.ProcessGroup | None = None
        if ranks is None:
            # Collective: every rank calls `new_group` for every group, in the same order.
            num_columns = assignment.num_columns
            columns = [assignment.column_ranks(c) for c in range(num_columns)]
            self._column = [_new_group(column) for column in columns][self.column]
            rows = [assignment.row_ranks(r) for r in range(0, assignment.world_size, num_columns)]
            self._row = [_new_group(row) for row in rows][rank // num_columns]

    def reduce(self, factors: Sequence[Factor]) -> dict[str, tuple[list[Tensor], Tensor]]:
        """Sum over ranks what the factors have recorded, each at its owner.

        Returns:
            Sums and number of tokens of the factors that this rank owns, by name.
        """
        ranks = self._ranks
        if ranks.size == 1 and ranks.replicas is None:
            return {factor.name: factor.drain() for factor in factors}
        own = {}
        for owner, owned in self._by_owner(factors).items():
            flat = torch.cat([tensor for factor in owned for tensor in _pack(*factor.drain())])
            if ranks.size > 1:
                dist.reduce(flat, group=ranks.group, group_dst=owner)
            if owner == self.rank:
                if ranks.replicas is not None:
                    dist.all_reduce(flat, group=ranks.replicas)
                own = _unpack(flat, owned)
        return own

    def all_reduce(self, count: Tensor) -> Tensor:
        """Return the sum over all ranks, replicas once: the tensor itself with one rank."""
        if self._is_alone:
            return count
        total = count.clone()
        dist.all_reduce(total)
        return total / self._ranks.num_replicas

    def broadcast_bases(self, factors: Sequence[Factor]) -> None:
        """Send bases and eigenvalues from their owners to all ranks of their columns.

        Args:
            factors: Those with new ones at their owners; other ranks receive them in place.
        """
        for owner, owned in self._by_owner(factors).items():
            if owner % self._assignment.num_columns == self.column:
                tensors = [tensor for f in owned for tensor in (*f.bases, *f.values)]
                _broadcast(tensors, source=owner, group=self._column)

    def broadcast_updates(self, updates: Mapping[int, Sequence[Tensor]]) -> None:
        """Send updates from each column to the others, in place.

        Args:
            updates: The tensors of each column, filled where this rank is in that column.
        """
        for column, source in enumerate(self._assignment.row_ranks(self.rank)):
            _broadcast(list(updates.get(column, ())), source=source, group=self._row)

    def _by_owner(self, factors: Sequence[Factor]) -> dict[int, list[Factor]]:
        """Group factors by owner, the owners in the same order on every rank."""
        by_owner: dict[int, list[Factor]] = {}
        for factor in factors:
            by_owner.setdefault(self._assignment.owner_of[factor.name], []).append(factor)
        return dict(sorted(by_owner.items()))


def _new_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """Return a new process group, or None for a single rank."""
    group: dist.ProcessGroup | None = dist.new_group(ranks) if len(ranks) > 1 else None
    return group


def _broadcast(tensors: list[Tensor], *, source: int, group: dist.ProcessGroup | None) -> None:
    if group is None or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=source, group=group)
    for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def _pack(sums: Sequence[Tensor], count: Tensor) -> list[Tensor]:
    """Return the count and each symmetric block's upper triangle, which is half of what to send."""
    packed = [count.reshape(1)]
    for block in sums:
        rows, columns = torch.triu_indices(len(block), len(block), device=block.device)
        packed.append(block[rows, columns])
    return packed


def _unpack(flat: Tensor, factors: Sequence[Factor]) -> dict[str, tuple[list[Tensor], Tensor]]:
    """Undo `_pack` for the concatenation of several factors."""
    unpacked = {}
    for factor in factors:
        sizes = [1, *(width * (width + 1) // 2 for width in factor.widths)]
        (count, *triangles), flat = flat[: sum(sizes)].split(sizes), flat[sum(sizes) :]
        blocks = []
        for width, triangle in zip(factor.widths, triangles, strict=True):
            rows, columns = torch.triu_indices(width, width, device=flat.device)
            blocks.append(flat.new_zeros(width, width))
            blocks[-1][rows, columns] = blocks[-1][columns, rows] = triangle
        unpacked[factor.name] = (blocks, count.squeeze(0))
    return unpacked
