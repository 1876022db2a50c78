"""Several ranks at one output: each writes its share of the shards, and one of them joins them.

Ranks have no connection. They share the folder of the shards, on a file system with atomic renames
and exclusive creation of files, which needs no locks:

    plan.json       written by the first rank; a rank with another provenance is refused
    begun-3-of-10   rank 3 has started
    rank-3-of-10    rank 3 has written its shards, and its node has written them through
    join-1          the rank that joins the shards touches it; join-2 replaces a rank that has died

A shard costs each rank the same few operations on files for any number of ranks and shards.
"""

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from llm.data.text_identity import Provenance
from llm.errors import ConfigError, DataError
from llm.runtime.claims import Claim
from llm.runtime.world import world_from_environment

_POLL_SECONDS = 0.5
_NOTICE_SECONDS = 20.0  # until the log names the ranks that have not started
_ABSENT_SECONDS = 300.0  # until a rank that has not started is an error
_MAX_NAMED_RANKS = 5  # ranks in a message
_OPTION_BY_PROVENANCE_KEY = {
    "sources": "input",
    "tokenizer_fingerprint": "tokenizer",
    "end_token": "--append_eos",
    "begin_token": "--prepend_bos",
    "dtype": "--format",
    "shuffle_seed": "--shuffle or --seed",
    "validation_percentage": "--validation_split_percentage",
    "part_bytes": "size of shards",
}

logger = logging.getLogger("llm.data")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of the shards that a rank writes: every `world_size`-th one.

    Attributes:
        rank: Index of this process.
        world_size: The number of processes.
        is_launched: Whether srun, mpiexec or torchrun has started all processes together.
    """

    rank: int = 0
    world_size: int = 1
    is_launched: bool = field(default=False, compare=False)

    def shard_indices(self, num_shards: int, *, num_preceding: int = 0) -> Sequence[int]:
        """Return the indices of the shards of an output that this rank writes.

        Args:
            num_shards: Number of shards of the output.
            num_preceding: Number of shards of all preceding outputs, so that different ranks write
                small outputs.
        """
        return range((self.rank - num_preceding) % self.world_size, num_shards, self.world_size)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def find_share(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Share:
    """Return the share of this process.

    Args:
        rank: The option; None reads the variables of srun, mpiexec, torchrun, and job arrays.
        world_size: The option. In a PBS job array, which does not tell its size, it is needed
            even without `rank`.
        environ: The variables of an array.

    Raises:
        ConfigError: The rank does not exist, or the variables of an array do not tell it, or an
            option is missing.
        ParallelError: The variables of a launcher do not tell it.
    """
    array_index = environ.get("PBS_ARRAY_INDEX")
    if rank is None and world_size is not None:
        rank = _parse_pbs_array_rank(array_index, world_size)
    if rank is not None and world_size is not None:
        if rank >= world_size:
            raise ConfigError(
                f"--rank {rank} does not exist with --world_size {world_size}; ranks count from 0 "
                f"to {world_size - 1}."
            )
        return Share(rank=rank, world_size=world_size)
    if array_index is not None:
        raise ConfigError(
            f"This is task {array_index} of a PBS job array, and PBS does not tell how many there "
            "are; give their number as --world_size, or --rank 0 --world_size 1 for a task that "
            "prepares a text alone."
        )
    return _find_launched_share(environ)


def _find_launched_share(environ: Mapping[str, str]) -> Share:
    """Return the share of a rank of a launcher, or of a task of a Slurm job array.

    Raises:
        ConfigError: It is a rank in a task of several.
        ParallelError: The variables of a launcher do not tell the rank.
    """
    world = world_from_environment()
    array_share = _parse_slurm_array_share(environ)
    if world.world_size == 1:
        return array_share
    if array_share.world_size > 1:
        raise ConfigError(
            f"This is rank {world.rank} of {world.world_size} in task {array_share.rank} of "
            f"{array_share.world_size} of a job array; start one process for each task, or give "
            "--rank and --world_size."
        )
    return Share(rank=world.rank, world_size=world.world_size, is_launched=True)


def _parse_pbs_array_rank(array_index: str | None, world_size: int) -> int:
    """Return the rank of a task of a PBS job array of this size."""
    if array_index is None or not re.fullmatch(r"[0-9]{1,9}", array_index):
        raise ConfigError("--world_size needs --rank outside of a PBS job array; give both.")
    if int(array_index) >= world_size:
        raise ConfigError(
            f"PBS_ARRAY_INDEX is {array_index}, and --world_size {world_size} has ranks from 0 "
            f"to {world_size - 1}; submit -J 0-{world_size - 1}, or give --rank too."
        )
    return int(array_index)


def _parse_slurm_array_share(environ: Mapping[str, str]) -> Share:
    """Return the share of a task of a Slurm job array."""
    prefix = "SLURM_ARRAY_TASK_"
    suffixes = ("ID", "COUNT", "MIN", "MAX", "STEP")
    values = [environ.get(prefix + name, "1" if name == "STEP" else "") for name in suffixes]
    if not all(re.fullmatch(r"[0-9]{1,9}", value) for value in values):
        return Share()
    task, num_tasks, first_task, last_task, step = map(int, values)
    if last_task - first_task != (num_tasks - 1) * step:
        raise ConfigError(
            f"The job array has {num_tasks} tasks with numbers from {first_task} to {last_task}, "
            f"which do not tell the rank of task {task}; submit --array=0-{num_tasks - 1}, or give "
            "--rank and --world_size."
        )
    return Share(rank=(task - first_task) // step, world_size=num_tasks)


def agree_on_provenance(folder: Path, provenance: Provenance) -> None:
    """Write the provenance of a folder of shards, or compare it with the other ranks' provenance.

    Raises:
        DataError: The ranks have different input or options.
    """
    plan_path = folder / "plan.json"
    if not plan_path.exists():
        _write_unless_exists(plan_path, json.dumps(provenance))
    try:
        recorded_provenance = json.loads(plan_path.read_text(encoding="utf-8"))
    except ValueError:
        recorded_provenance = {}
    if recorded_provenance == provenance:
        return
    if recorded_provenance.get("format") != provenance["format"]:
        raise DataError(
            f"{folder} holds shards of another version of this program; finish them with it, or "
            "remove the folder."
        )
    changed_keys = [
        key for key, value in provenance.items() if recorded_provenance.get(key) != value
    ]
    options = [_OPTION_BY_PROVENANCE_KEY.get(key, f"--{key}") for key in changed_keys]
    raise DataError(
        f"{folder} was begun with another {' and '.join(options)}; give all ranks the same command "
        "and the same files, or remove the folder if no rank is at work."
    )


def _write_unless_exists(path: Path, text: str) -> None:
    """Write a file completely, unless another rank has been faster."""
    temporary_path = path.with_name(f".plan.{uuid4().hex}")
    temporary_path.write_text(text, encoding="utf-8")
    try:
        os.link(temporary_path, path)
        temporary_path.unlink()
    except FileExistsError:
        temporary_path.unlink()
    except OSError:  # a file system without links
        temporary_path.replace(path)


def mark_started(folder: Path, share: Share) -> None:
    """Record that a rank has started."""
    _start_marker(folder, share.rank, share).touch()


def wait_for_starts(folders: Sequence[Path], share: Share) -> None:
    """Wait until every rank has started, if a launcher starts them together.

    Args:
        folders: The folders of all outputs, since each rank starts with a different one.
        share: The rank.

    Raises:
        DataError: A rank has not started after a long wait.
    """
    start_time = time.monotonic()
    is_logged = False
    while share.is_launched and (absent_ranks := _absent_ranks(folders, share)):
        wait_seconds = time.monotonic() - start_time
        names = _name_ranks(absent_ranks)
        remedy = (
            "If no other process was started, as in the shell of `srun -n "
            f"{share.world_size} --pty bash`, add --rank 0 --world_size 1 to prepare the text alone"
        )
        if wait_seconds > _ABSENT_SECONDS:
            raise DataError(f"{share} has done its part, but {names} did not start. {remedy}.")
        if wait_seconds > _NOTICE_SECONDS and not is_logged:
            logger.warning(f"{share} waits for {names} to start. {remedy}.")
            is_logged = True
        time.sleep(_POLL_SECONDS)


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return the first ranks in words, and how many others there are."""
    names = f"rank {', '.join(map(str, ranks[:_MAX_NAMED_RANKS]))}"
    if len(ranks) > _MAX_NAMED_RANKS:
        names += f" and {len(ranks) - _MAX_NAMED_RANKS:,} others"
    return names


def _absent_ranks(folders: Sequence[Path], share: Share) -> list[int]:
    """Return the ranks that have not started; none if an output is complete."""
    if not all((folder / "plan.json").exists() for folder in folders):
        return []
    return [
        rank
        for rank in range(share.world_size)
        if not any(_start_marker(folder, rank, share).exists() for folder in folders)
    ]


def mark_finished(folder: Path, share: Share) -> None:
    """Record that a rank has written its shards, once they are on the disk."""
    os.sync()  # a crash of this node can lose nothing of the shards now
    _finish_marker(folder, share.rank, share).touch()


def is_finished(folder: Path, share: Share) -> bool:
    """Return whether a rank has written its shards, now or in an earlier job."""
    return _finish_marker(folder, share.rank, share).exists()


def num_ranks_finished(folder: Path, share: Share) -> int:
    """Return how many of the ranks have written their shards."""
    return sum(_finish_marker(folder, rank, share).exists() for rank in range(share.world_size))


def _finish_marker(folder: Path, rank: int, share: Share) -> Path:
    return folder / f"rank-{rank}-of-{share.world_size}"


def _start_marker(folder: Path, rank: int, share: Share) -> Path:
    return folder / f"begun-{rank}-of-{share.world_size}"


def acquire_join(claim: Claim, folder: Path) -> bool:
    """Wait until this rank may join the shards, or another one has finished.

    Args:
        claim: The claim of this rank in the folder, `Claim(folder, "join")`.
        folder: The folder of the shards.

    Returns:
        Whether this rank may join them.
    """
    is_logged = False
    while (folder / "plan.json").exists():
        if claim.try_acquire():
            return True
        if not is_logged:
            logger.info("another rank joins the shards; waiting until it is done or has died")
            is_logged = True
        time.sleep(_POLL_SECONDS)
    return False
