"""Writes the tensors of one rank through `torch.distributed.checkpoint`, without the other ranks.

There, one rank gathers a plan from all ranks, sends each its part, and all receive a description of
the whole checkpoint, in every save. Ranks have divided the tensors already, and the headers of the
files describe the checkpoint, so nothing of this is needed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save


class _RankPlanner(DefaultSavePlanner):
    """Plans the files of this rank."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of this rank, and no description of the checkpoint."""
        return all_plans, Metadata(state_dict_metadata={})


class _RankWriter(HuggingFaceStorageWriter):
    """Writes the files of this rank.

    Args:
        folder: Their folder.
        file_index_by_path: Index (from 1) of the file of each tensor, by path.
        rank: Rank of this process, which is part of their names.

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
        """Add the names of the files to the plan of this rank."""
        return [dataclasses.replace(plan, storage_data=self._storage_data) for plan in plans]

    def finish(self, metadata: Metadata, results: Sequence[Sequence[Any]]) -> None:
        """Record the names of the files."""
        self.file_names = sorted(
            {result.storage_data.relative_path for written in results for result in written}
        )


def write_rank_files(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    file_index_by_path: Mapping[str, int],
    *,
    rank: int,
) -> list[str]:
    """Write the tensors of this rank; return the names of its files.

    Args:
        folder: The folder of the checkpoint.
        tensors: Tensors or shards in host memory, by path.
        file_index_by_path: Index (from 1) of the file of each tensor on the rank that writes it.
        rank: Rank of this process.
    """
    writer = _RankWriter(folder, file_index_by_path, rank=rank)
    save(dict(tensors), storage_writer=writer, planner=_RankPlanner(), no_dist=True)
    return writer.file_names
