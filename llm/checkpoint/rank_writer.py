"""Writes the tensors of one rank through `torch.distributed.checkpoint`.

There, rank 0 gathers a plan from all ranks, sends each its part, and all receive a description of
the whole checkpoint, in every save. Here ranks agree on a plan in the first save, and again if
their tensors change. The headers of the files describe the checkpoint.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from llm.checkpoint.snapshot import Snapshot
from llm.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """What a rank would write alone.

    Attributes:
        save_plan: The tensors, and shards of them, that it would write.
        paths: The paths of the tensors that it holds, written or not.
    """

    save_plan: SavePlan
    paths: tuple[str, ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> "LocalPlan":
        """Return the plan of this rank for a snapshot."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(snapshot.copies.tensors))
        return cls(save_plan=planner.create_local_plan(), paths=tuple(snapshot.file_index_by_path))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What this rank writes in each save.

    Attributes:
        local_plan: The plan that the ranks began with: another one needs another agreement.
        final_plan: The tensors that it writes: of several writers of a shard, one does.
    """

    local_plan: LocalPlan
    final_plan: SavePlan

    @classmethod
    def divide(cls, local_plan: LocalPlan, *, group: "ProcessGroup | None") -> "RankPlan":
        """Divide the tensors among the ranks, and return the plan of this rank.

        Every rank of the group calls it: rank 0 gathers the local plans and sends each its part.

        Args:
            local_plan: What this rank would write alone.
            group: All ranks; None for a single process.

        Raises:
            CheckpointError: No rank writes a tensor; the other ranks do not learn which.
            ValueError: The ranks do not write all of a tensor; raised on rank 0.
        """
        if group is None:
            return cls(local_plan=local_plan, final_plan=_divide_plans([local_plan])[0])
        is_main = dist.get_rank(group) == 0
        local_plans: list[Any] = [None] * dist.get_world_size(group)
        final_plans: list[Any] = [*local_plans]
        planning_error: Exception | None = None
        dist.gather_object(local_plan, local_plans if is_main else None, group=group)
        if is_main:
            try:
                final_plans = _divide_plans(local_plans)
            except Exception as error:  # raised below: the others wait for their plans
                planning_error = error
        scatter_output: list[Any] = [None]
        dist.scatter_object_list(scatter_output, final_plans if is_main else None, group=group)
        if planning_error is not None:
            raise planning_error
        (final_plan,) = scatter_output
        if final_plan is None:  # all ranks keep their former plans, which fit together
            raise CheckpointError("rank 0 could not divide the tensors among the ranks")
        return cls(local_plan=local_plan, final_plan=final_plan)

    def write(self, snapshot: Snapshot, folder: Path, *, rank: int) -> list[str]:
        """Write the files of this rank; return their names.

        Args:
            snapshot: The state.
            folder: The folder of the checkpoint.
            rank: Rank of this process, which is part of their names.
        """
        writer = _RankWriter(folder, snapshot.file_index_by_path, rank=rank)
        save(
            dict(snapshot.copies.tensors),
            storage_writer=writer,
            planner=_FixedPlanner(self.final_plan),
            no_dist=True,
        )
        return writer.file_names


def _divide_plans(local_plans: Sequence[LocalPlan]) -> list[SavePlan]:
    """Return what each rank writes, so that each shard is written once.

    Raises:
        CheckpointError: No rank writes a tensor.
        ValueError: The ranks do not write all of a tensor.
    """
    written_paths = {item.index.fqn for plan in local_plans for item in plan.save_plan.items}
    unwritten_paths = {path for plan in local_plans for path in plan.paths} - written_paths
    if unwritten_paths:
        raise CheckpointError(f"no rank writes {min(unwritten_paths)}")
    save_plans = [plan.save_plan for plan in local_plans]
    final_plans, _ = DefaultSavePlanner().create_global_plan(save_plans)
    return final_plans


class _FixedPlanner(DefaultSavePlanner):
    """Returns a plan that is known."""

    def __init__(self, plan: SavePlan) -> None:
        super().__init__()
        self._plan = plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan, and no description of the checkpoint."""
        return [self._plan], Metadata(state_dict_metadata={})


class _RankWriter(HuggingFaceStorageWriter):
    """Writes the files of a rank.

    Args:
        folder: Their folder.
        file_index_by_path: Index (from 1) of the file of each tensor, by path.
        rank: The rank, which is part of their names.

    Attributes:
        file_names: The files, once they are written.
    """

    def __init__(self, folder: Path, file_index_by_path: Mapping[str, int], *, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.file_names: list[str] = []
        self._storage_data = {
            "fqn_to_index_mapping": file_index_by_path,
            "shard_index": rank + 1,
        }
        # The tensors are in host memory: the writer must not use a device or wait for it.
        self.per_thread_copy_ahead = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the names of the files to the plan."""
        return [dataclasses.replace(plan, storage_data=self._storage_data) for plan in plans]

    def finish(self, metadata: Metadata, results: Sequence[Sequence[Any]]) -> None:
        """Record the names of the files."""
        self.file_names = sorted(
            {result.storage_data.relative_path for written in results for result in written}
        )
