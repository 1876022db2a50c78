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
class RankPlan:
    """What this rank writes in each save.

    Attributes:
        local_plan: The tensors, and shards of them, that this rank would write alone.
        paths: The paths of the tensors that it holds, written or not.
        final_plan: The tensors that it writes: of several writers of a shard, one does.
    """

    local_plan: SavePlan
    paths: tuple[str, ...]
    final_plan: SavePlan

    @classmethod
    def agree(cls, snapshot: Snapshot, *, group: "ProcessGroup | None") -> "RankPlan":
        """Return the plan of this rank; every rank of the group calls it.

        Args:
            snapshot: The state.
            group: All ranks; None for a single process.

        Raises:
            CheckpointError: No rank writes a tensor; only rank 0 raises it.
            ValueError: The ranks do not write all of a tensor; only rank 0 raises it.
        """
        local_plan, paths = _plan_alone(snapshot), tuple(snapshot.file_index_by_path)
        if group is None:
            [final_plan] = _divide_plans([(local_plan, paths)])
            return cls(local_plan=local_plan, paths=paths, final_plan=final_plan)
        is_main = dist.get_rank(group) == 0
        entries: list[Any] = [None] * dist.get_world_size(group)
        final_plans: list[Any] = [*entries]
        error: Exception | None = None
        dist.gather_object((local_plan, paths), entries if is_main else None, group=group)
        if is_main:
            try:
                final_plans = _divide_plans(entries)
            except Exception as failure:  # raised below: the others wait for their plans
                error = failure
        received: list[Any] = [None]
        dist.scatter_object_list(received, final_plans if is_main else None, group=group)
        if error is not None:
            raise error
        return cls(local_plan=local_plan, paths=paths, final_plan=received[0])

    def fits(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot has the same tensors on this rank."""
        has_same_paths = self.paths == tuple(snapshot.file_index_by_path)
        return has_same_paths and self.local_plan.items == _plan_alone(snapshot).items

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


def _plan_alone(snapshot: Snapshot) -> SavePlan:
    """Return the plan of this rank if it wrote all of its tensors of a snapshot."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(snapshot.copies.tensors))
    return planner.create_local_plan()


def _divide_plans(entries: Sequence[tuple[SavePlan, tuple[str, ...]]]) -> list[SavePlan]:
    """Return what each rank writes, so that each shard is written once.

    Args:
        entries: `RankPlan.local_plan` and `RankPlan.paths` of each rank.

    Raises:
        CheckpointError: No rank writes a tensor.
        ValueError: The ranks do not write all of a tensor.
    """
    written_paths = {item.index.fqn for plan, _ in entries for item in plan.items}
    unwritten_paths = {path for _, paths in entries for path in paths} - written_paths
    if unwritten_paths:
        raise CheckpointError(f"no rank writes {min(unwritten_paths)}")
    final_plans, _ = DefaultSavePlanner().create_global_plan([plan for plan, _ in entries])
    return final_plans


class _FixedPlanner(DefaultSavePlanner):
    """Returns a plan that is known.

    Args:
        plan: The plan.
    """

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
