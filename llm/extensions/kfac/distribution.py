"""K-FAC's work spread over ranks, after KAISA (Pauloski et al. 2021, arXiv:2107.01739).

Each factor has an owner, the only rank that keeps its average and decomposes it. If every rank
holds whole weights, owners send the bases to all ranks, which compute all updates (KAISA's
COMM-OPT). If weights are sharded, one rank owns the factors of a layer and computes its update
(MEM-OPT).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llm.extensions.kfac.factors import Factor
from llm.extensions.matrix_optim.matrix_owners import FactorRanks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Assignment of factors to ranks and to steps of the interval.

    Attributes:
        owner_of: Rank that averages and decomposes each factor, by the factor's name.
        phase_of: Position of a factor's decomposition in the update interval, in [0, 1), by the
            factor's name.
    """

    owner_of: Mapping[str, int]
    phase_of: Mapping[str, float]


def assign(
    groups: Mapping[str, Mapping[str, float]],
    *,
    world_size: int,
    together: bool,
    everywhere: Mapping[str, Mapping[str, float]] | None = None,
) -> Assignment:
    """Give each factor an owner, the costliest first.

    Args:
        groups: Factors that are needed together, by group: the cost of each by its name.
        world_size: Number of ranks.
        together: Whether one rank owns all factors of a group.
        everywhere: The groups of the whole model, if `groups` belong to a pipeline stage.
    """
    loads = [0.0] * world_size
    owner_of: dict[str, int] = {}
    for group, _ in _costliest_first({name: sum(groups[name].values()) for name in groups}):
        owner = loads.index(min(loads))
        for factor, cost in _costliest_first(groups[group]):
            owner = owner_of[factor] = owner if together else loads.index(min(loads))
            loads[owner] += cost
    # The phases spread the factors over an interval by cost. They do not depend on the number of
    # ranks, so the number of ranks does not affect a run's results.
    every = (everywhere or groups).values()
    costs = {name: cost for factors in every for name, cost in factors.items()}
    phase_of, done, total = {}, 0.0, sum(costs.values())
    for factor, cost in _costliest_first(costs):
        phase_of[factor] = done / total
        done += cost
    return Assignment(owner_of=owner_of, phase_of=phase_of)


def _costliest_first(costs: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort by cost, then by name: every rank must get the same order."""
    return sorted(costs.items(), key=lambda item: (-item[1], item[0]))


class Exchange:
    """Collective operations between the owners of factors and the other ranks.

    Every rank must create one and call its methods in the same order; with one rank nothing is
    sent. Tensors with the same source and destination are sent as one flat tensor.

    Args:
        assignment: Owners of the factors.
        ranks: The ranks of the assignment.
        broadcasts: Whether bases are sent to all ranks; false if weights are sharded.

    Attributes:
        counts_failures: Whether this rank carries on a count that was saved as a sum over ranks.
    """

    def __init__(self, assignment: Assignment, ranks: FactorRanks, *, broadcasts: bool) -> None:
        self._assignment = assignment
        self._ranks = ranks
        self._broadcasts = broadcasts and ranks.size > 1
        self._is_alone = broadcasts and ranks.size == 1
        self.counts_failures = ranks.counts_failures

    def reduce(self, factors: Sequence[Factor]) -> dict[str, tuple[list[Tensor], Tensor]]:
        """Sum the factors' records over ranks, each at its owner.

        Returns:
            Sums and number of tokens of the factors that this rank owns, by name.
        """
        ranks = self._ranks
        if ranks.size == 1 and ranks.replicas is None:
            return {factor.name: factor.drain() for factor in factors}
        sums_and_counts = {}
        for owner, owned in self._by_owner(factors).items():
            flat = torch.cat(
                [tensor for factor in owned for tensor in _pack_triangles(*factor.drain())]
            )
            if ranks.size > 1:
                dist.reduce(flat, group=ranks.group, group_dst=owner)
            if owner == ranks.rank:
                if ranks.replicas is not None:
                    dist.all_reduce(flat, group=ranks.replicas)
                sums_and_counts = _unpack_triangles(flat, owned)
        return sums_and_counts

    def all_reduce(self, count: Tensor) -> Tensor:
        """Return the sum over all ranks, counting replicas once."""
        if self._is_alone:
            return count
        total = count.clone()
        dist.all_reduce(total)
        return total / self._ranks.num_replicas

    def broadcast_bases(self, factors: Sequence[Factor]) -> None:
        """Send bases and eigenvalues from their owners to all ranks, if they are kept there.

        Args:
            factors: Factors with new bases at their owners; other ranks receive them in place.
        """
        for owner, owned in self._by_owner(factors).items() if self._broadcasts else ():
            tensors = [tensor for f in owned for tensor in (*f.bases, *f.values)]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(flat, src=owner)
            for tensor, values in zip(
                tensors, flat.split([t.numel() for t in tensors]), strict=True
            ):
                tensor.copy_(values.view(tensor.shape))

    def _by_owner(self, factors: Sequence[Factor]) -> dict[int, list[Factor]]:
        """Group factors by owner, the owners in the same order on every rank."""
        by_owner: dict[int, list[Factor]] = {}
        for factor in factors:
            by_owner.setdefault(self._assignment.owner_of[factor.name], []).append(factor)
        return dict(sorted(by_owner.items()))


def _pack_triangles(sums: Sequence[Tensor], count: Tensor) -> list[Tensor]:
    """Return the count and each symmetric block's upper triangle, which halves the message."""
    packed = [count.reshape(1)]
    for block in sums:
        rows, columns = torch.triu_indices(len(block), len(block), device=block.device)
        packed.append(block[rows, columns])
    return packed


def _unpack_triangles(
    flat: Tensor, factors: Sequence[Factor]
) -> dict[str, tuple[list[Tensor], Tensor]]:
    """Undo `_pack_triangles` for the concatenation of several factors."""
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
