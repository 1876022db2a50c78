"""K-FAC's work spread over ranks, after KAISA (Pauloski et al. 2021, arXiv:2107.01739).

Each factor has an owner, the only rank that keeps its average and decomposes it. If every rank
holds whole weights, owners send the bases to all ranks, which compute all updates (KAISA's
COMM-OPT). If weights are sharded, one rank owns the factors of a layer and computes its update
(MEM-OPT).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llm.extensions.kfac.factors import Factor
from llm.extensions.matrix_optim.matrix_owners import FactorRanks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Assignment of factors to ranks and to steps of the interval.

    Attributes:
        owner_by_factor: Rank that averages and decomposes each factor, by the factor's name.
        phase_by_factor: Position of a factor's decomposition in the update interval, in [0, 1), by
            the factor's name.
    """

    owner_by_factor: Mapping[str, int]
    phase_by_factor: Mapping[str, float]


def assign_factors(
    groups: Mapping[str, Mapping[str, float]],
    *,
    world_size: int,
    keeps_groups_together: bool,
    model_groups: Mapping[str, Mapping[str, float]] | None = None,
) -> Assignment:
    """Give each factor an owner, the costliest first.

    Args:
        groups: The cost of each factor by its name, in groups of factors that are needed together.
        world_size: Number of ranks.
        keeps_groups_together: Whether one rank owns all factors of a group.
        model_groups: The groups of the whole model, if `groups` belong to a pipeline stage.
    """
    cost_by_rank = [0.0] * world_size
    owner_by_factor: dict[str, int] = {}
    cost_by_group = {name: sum(costs.values()) for name, costs in groups.items()}
    for group, _ in _sort_by_cost(cost_by_group):
        owner = cost_by_rank.index(min(cost_by_rank))
        for factor, cost in _sort_by_cost(groups[group]):
            if not keeps_groups_together:
                owner = cost_by_rank.index(min(cost_by_rank))
            owner_by_factor[factor] = owner
            cost_by_rank[owner] += cost
    phase_by_factor = _spread_phases((model_groups or groups).values())
    return Assignment(owner_by_factor=owner_by_factor, phase_by_factor=phase_by_factor)


def _spread_phases(groups: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the position of each factor in the update interval, spread by cost.

    It does not depend on the number of ranks, so this number does not affect a run's results.

    Args:
        groups: The cost of each factor of the whole model by its name, in groups.
    """
    costs = {name: cost for factors in groups for name, cost in factors.items()}
    phase_by_factor, preceding_cost, total_cost = {}, 0.0, sum(costs.values())
    for factor, cost in _sort_by_cost(costs):
        phase_by_factor[factor] = preceding_cost / total_cost
        preceding_cost += cost
    return phase_by_factor


def _sort_by_cost(costs: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (name, cost), the costliest first, then by name: the same order on every rank."""
    return sorted(costs.items(), key=lambda item: (-item[1], item[0]))


class Exchange:
    """Collective operations between the owners of factors and the other ranks.

    Every rank must create one and call its methods in the same order; with one rank nothing is
    sent. Tensors with the same source and destination are sent as one flat tensor.

    Args:
        assignment: Owners of the factors.
        ranks: The ranks of the assignment.
        broadcasts_bases: Whether bases are sent to all ranks; false if weights are sharded.

    Attributes:
        counts_failures: Whether this rank continues a count that was saved as a sum over ranks.
    """

    def __init__(
        self, assignment: Assignment, ranks: FactorRanks, *, broadcasts_bases: bool
    ) -> None:
        self._assignment = assignment
        self._ranks = ranks
        self._broadcasts_bases = broadcasts_bases and ranks.size > 1
        self._is_single_process = broadcasts_bases and ranks.size == 1
        self.counts_failures = ranks.counts_failures

    def reduce_step_sums(self, factors: Sequence[Factor]) -> dict[str, tuple[list[Tensor], Tensor]]:
        """Sum the factors' records over ranks, each at its owner.

        Returns:
            Sums and number of tokens of the factors that this rank owns, by name.
        """
        ranks = self._ranks
        if ranks.size == 1 and ranks.replicas is None:
            return {factor.name: factor.pop_step_sums() for factor in factors}
        sums_and_counts = {}
        for owner, owned_factors in self._group_by_owner(factors).items():
            packed_tensors: list[Tensor] = []
            for factor in owned_factors:
                packed_tensors += _pack_triangles(*factor.pop_step_sums())
            flat = torch.cat(packed_tensors)
            if ranks.size > 1:
                dist.reduce(flat, group=ranks.group, group_dst=owner)
            if owner == ranks.rank:
                if ranks.replicas is not None:
                    dist.all_reduce(flat, group=ranks.replicas)
                sums_and_counts = _unpack_triangles(flat, owned_factors)
        return sums_and_counts

    def sum_count(self, count: Tensor) -> Tensor:
        """Return the sum of a count over all ranks; replicas count once."""
        if self._is_single_process:
            return count
        total = count.clone()
        dist.all_reduce(total)
        return total / self._ranks.num_replicas

    def broadcast_bases(self, factors: Sequence[Factor]) -> None:
        """Send bases and eigenvalues from their owners to all ranks, if they are kept there.

        Args:
            factors: Factors with new bases at their owners; other ranks receive them in place.
        """
        if not self._broadcasts_bases:
            return
        for owner, owned_factors in self._group_by_owner(factors).items():
            tensors = [
                tensor
                for factor in owned_factors
                for tensor in (*factor.bases, *factor.eigenvalues)
            ]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(flat, src=owner)
            received_values = flat.split([tensor.numel() for tensor in tensors])
            for tensor, values in zip(tensors, received_values, strict=True):
                tensor.copy_(values.view(tensor.shape))

    def _group_by_owner(self, factors: Sequence[Factor]) -> dict[int, list[Factor]]:
        """Group factors by owner, the owners in the same order on every rank."""
        factors_by_owner: dict[int, list[Factor]] = {}
        for factor in factors:
            owner = self._assignment.owner_by_factor[factor.name]
            factors_by_owner.setdefault(owner, []).append(factor)
        return dict(sorted(factors_by_owner.items()))


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
