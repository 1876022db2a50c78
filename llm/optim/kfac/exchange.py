"""What ranks tell one another for K-FAC: factors to their owners, bases, updates."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llm.optim.kfac.assignment import Assignment
from llm.optim.kfac.factors import Factor


class Exchange:
    """Collective operations along the columns and rows of an assignment.

    Every rank must make one, and call each function at the same time; with one rank nothing is
    sent. What goes to the same ranks goes in one flat tensor.

    Args:
        assignment: Who owns and keeps what.
        rank: Rank of this process.

    Attributes:
        rank: The same.
    """

    def __init__(self, assignment: Assignment, *, rank: int) -> None:
        self._assignment = assignment
        self.rank = rank
        # Forming groups is collective: every rank takes part in those of the others.
        columns = [assignment.column_ranks(c) for c in range(assignment.num_columns)]
        self._columns = [_new_group(ranks) for ranks in columns]
        rows = [assignment.row_ranks(r) for r in range(0, assignment.world_size, len(columns))]
        self._row = [_new_group(ranks) for ranks in rows][rank // len(columns)]

    def reduce(self, factors: Sequence[Factor]) -> dict[str, tuple[list[Tensor], Tensor]]:
        """Add up over ranks what the factors have recorded, each at its owner.

        Returns:
            Sums and number of tokens of those that this rank owns, by name.
        """
        if self._assignment.world_size == 1:
            return {factor.name: factor.drain() for factor in factors}
        own = {}
        for owner, theirs in self._by_owner(factors).items():
            parts = []
            for factor in theirs:
                sums, count = factor.drain()
                parts += [count.reshape(1), *(_pack(block) for block in sums)]
            flat = torch.cat(parts)
            dist.reduce(flat, dst=owner)
            if owner == self.rank:
                own = _unpack_all(flat, theirs)
        return own

    def add_up(self, count: Tensor) -> Tensor:
        """The sum over all ranks: live with one rank, else a copy."""
        if self._assignment.world_size == 1:
            return count
        total = count.clone()
        dist.all_reduce(total)
        return total

    def share_solutions(self, factors: Sequence[Factor]) -> None:
        """Tell bases and eigenvalues from their owners to all ranks of their columns.

        Args:
            factors: Those with new ones at their owners; others receive them in place.
        """
        for owner, theirs in self._by_owner(factors).items():
            column = owner % self._assignment.num_columns
            if column != self.rank % self._assignment.num_columns:
                continue
            tensors = [tensor for factor in theirs for tensor in (*factor.bases, *factor.values)]
            _broadcast(tensors, source=owner, group=self._columns[column])

    def share_updates(self, updates: Mapping[int, Sequence[Tensor]]) -> None:
        """Tell updates from each column to the others, in place.

        Args:
            updates: The tensors of each column, filled where this rank is in that column.
        """
        for column, source in enumerate(self._assignment.row_ranks(self.rank)):
            _broadcast(list(updates.get(column, ())), source=source, group=self._row)

    def gather(self, factor: Factor) -> dict[str, Tensor]:
        """All that its owner keeps of a factor, on every rank: live with one rank, else copies."""
        if self._assignment.world_size == 1:
            return factor.tensors()
        found = factor.tensors()
        if not factor.owned:
            found = Factor(
                factor.name, size=factor.size, max_dim=max(factor.widths), device=factor.device
            ).tensors()
        copies = {key: tensor.clone() for key, tensor in found.items()}
        source = self._assignment.owner_of[factor.name]
        _broadcast(list(copies.values()), source=source, group=dist.group.WORLD)
        return {key: tensor.cpu() for key, tensor in copies.items()}

    def _by_owner(self, factors: Sequence[Factor]) -> dict[int, list[Factor]]:
        found: dict[int, list[Factor]] = {}
        for factor in factors:
            found.setdefault(self._assignment.owner_of[factor.name], []).append(factor)
        return dict(sorted(found.items()))


def _new_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """A process group, or None where there is nobody to talk to."""
    if len(ranks) == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(ranks)
    return group


def _broadcast(tensors: list[Tensor], *, source: int, group: dist.ProcessGroup | None) -> None:
    if group is None or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=source, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _pack(block: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row."""
    rows, columns = torch.triu_indices(len(block), len(block), device=block.device)
    return block[rows, columns]


def _unpack(triangle: Tensor, width: int) -> Tensor:
    rows, columns = torch.triu_indices(width, width, device=triangle.device)
    block = triangle.new_zeros(width, width)
    block[rows, columns] = triangle
    block[columns, rows] = triangle
    return block


def _unpack_all(flat: Tensor, factors: list[Factor]) -> dict[str, tuple[list[Tensor], Tensor]]:
    found = {}
    for factor in factors:
        sizes = [1, *(w * (w + 1) // 2 for w in factor.widths)]
        (count, *triangles), flat = flat[: sum(sizes)].split(sizes), flat[sum(sizes) :]
        blocks = [_unpack(t, w) for t, w in zip(triangles, factor.widths, strict=True)]
        found[factor.name] = (blocks, count.squeeze(0))
    return found
