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
_NOTICE_SECONDS = 20.0  # of waiting for a rank that has not started
_ABSENT_SECONDS = 300.0  # until such a rank counts as missing
_MOST_NAMED = 5  # ranks in a message
_NAMES = {
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
        rank: The number of this process, counted from 0.
        world_size: The number of processes.
        is_launched: Whether srun, mpiexec or torchrun started all of them together.
    """

    rank: int = 0
    world_size: int = 1
    is_launched: bool = field(default=False, compare=False)

    def numbers(self, num_shards: int, *, first: int = 0) -> Sequence[int]:
        """Return which shards of an output this rank writes.

        Args:
            num_shards: Shards of the output.
            first: Shards of all outputs before it, so that small outputs have different ranks.
        """
        return range((self.rank - first) % self.world_size, num_shards, self.world_size)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def find_share(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Share:
    """Return the share of this process.

    Args:
        rank: The user's choice; None looks at the variables of srun, mpiexec, torchrun, and
            job arrays.
        world_size: The user's choice. A PBS job array, which does not tell its size, needs it
            without `rank`.
        environ: The variables of an array.

    Raises:
        ConfigError: The rank does not exist, or the variables of an array do not tell it, or an
            option is missing.
        ParallelError: The variables of a launcher do not tell it.
    """
    index = environ.get("PBS_ARRAY_INDEX")
    if rank is None and world_size is not None:
        if index is None or not re.fullmatch(r"[0-9]{1,9}", index):
            raise ConfigError("--world_size needs --rank outside of a PBS job array; give both.")
        if int(index) >= world_size:
            raise ConfigError(
                f"PBS_ARRAY_INDEX is {index}, and --world_size {world_size} has ranks from 0 to "
                f"{world_size - 1}; submit -J 0-{world_size - 1}, or give --rank too."
            )
        rank = int(index)
    if rank is not None and world_size is not None:
        if rank >= world_size:
            raise ConfigError(
                f"--rank {rank} does not exist with --world_size {world_size}; ranks count from 0 "
                f"to {world_size - 1}."
            )
        return Share(rank=rank, world_size=world_size)
    if index is not None:
        raise ConfigError(
            f"This is task {index} of a PBS job array, and PBS does not tell how many there are; "
            "give their number as --world_size, or --rank 0 --world_size 1 for a task that "
            "prepares a text alone."
        )
    world = world_from_environment()
    array = _array_share(environ)
    if world.world_size == 1:
        return array
    if array.world_size > 1:
        raise ConfigError(
            f"This is rank {world.rank} of {world.world_size} in task {array.rank} of "
            f"{array.world_size} of a job array; start one process for each task, or give --rank "
            "and --world_size."
        )
    return Share(rank=world.rank, world_size=world.world_size, is_launched=True)


def _array_share(environ: Mapping[str, str]) -> Share:
    """Return the share of a task of a Slurm job array."""
    prefix = "SLURM_ARRAY_TASK_"
    names = ("ID", "COUNT", "MIN", "MAX", "STEP")
    values = [environ.get(prefix + name, "1" if name == "STEP" else "") for name in names]
    if not all(re.fullmatch(r"[0-9]{1,9}", value) for value in values):
        return Share()
    task, count, first_task, last_task, step = map(int, values)
    if last_task - first_task != (count - 1) * step:
        raise ConfigError(
            f"The job array has {count} tasks with numbers from {first_task} to {last_task}, which "
            f"do not tell the rank of task {task}; submit --array=0-{count - 1}, or give --rank "
            "and --world_size."
        )
    return Share(rank=(task - first_task) // step, world_size=count)


def share_provenance(folder: Path, provenance: Provenance) -> None:
    """Write the provenance of a folder of shards, or compare it with the other ranks' provenance.

    Raises:
        DataError: The ranks have different input or options.
    """
    plan_path = folder / "plan.json"
    if not plan_path.exists():
        temporary = folder / f".plan.{uuid4().hex}"
        temporary.write_text(json.dumps(provenance), encoding="utf-8")
        try:
            os.link(temporary, plan_path)  # fails if another rank has been faster
            temporary.unlink()
        except FileExistsError:
            temporary.unlink()
        except OSError:  # a file system without links
            temporary.replace(plan_path)
    try:
        earlier = json.loads(plan_path.read_text(encoding="utf-8"))
    except ValueError:
        earlier = {}
    if earlier == provenance:
        return
    if earlier.get("format") != provenance["format"]:
        raise DataError(
            f"{folder} holds shards of another version of this program; finish them with it, or "
            "remove the folder."
        )
    different = [key for key, value in provenance.items() if earlier.get(key) != value]
    changed = [_NAMES.get(key, f"--{key}") for key in different]
    raise DataError(
        f"{folder} was begun with another {' and '.join(changed)}; give all ranks the same command "
        "and the same files, or remove the folder if no rank is at work."
    )


def mark_begun(folder: Path, share: Share) -> None:
    """Note that a rank has started."""
    _start_marker(folder, share.rank, share).touch()


def wait_for_starts(folders: Sequence[Path], share: Share) -> None:
    """Wait until every rank has started, if a launcher starts them together.

    Args:
        folders: The folders of all outputs, since each rank begins with another one.
        share: The rank.

    Raises:
        DataError: Some have not, after a long wait.
    """
    began = time.monotonic()
    is_logged = False
    while share.is_launched and (absent := _absent_ranks(folders, share)):
        waited = time.monotonic() - began
        names = f"rank {', '.join(map(str, absent[:_MOST_NAMED]))}"
        if len(absent) > _MOST_NAMED:
            names += f" and {len(absent) - _MOST_NAMED:,} others"
        how_alone = (
            "If no other process was started, as in the shell of `srun -n "
            f"{share.world_size} --pty bash`, add --rank 0 --world_size 1 to prepare the text alone"
        )
        if waited > _ABSENT_SECONDS:
            raise DataError(f"{share} has done its part, but {names} did not start. {how_alone}.")
        if waited > _NOTICE_SECONDS and not is_logged:
            logger.warning(f"{share} waits for {names} to start. {how_alone}.")
            is_logged = True
        time.sleep(_POLL_SECONDS)


def _absent_ranks(folders: Sequence[Path], share: Share) -> list[int]:
    """Return the ranks that have not started; none if an output is complete."""
    if not all((folder / "plan.json").exists() for folder in folders):
        return []
    return [
        rank
        for rank in range(share.world_size)
        if not any(_start_marker(folder, rank, share).exists() for folder in folders)
    ]


def mark_done(folder: Path, share: Share) -> None:
    """Note that a rank has written its shards, once they are on the disk."""
    os.sync()  # a crash of this node can lose nothing of the shards now
    _marker_path(folder, share.rank, share).touch()


def is_marked(folder: Path, share: Share) -> bool:
    """Return whether a rank has written its shards, now or in an earlier job."""
    return _marker_path(folder, share.rank, share).exists()


def ranks_done(folder: Path, share: Share) -> int:
    """Return how many of the ranks have written their shards."""
    return sum(_marker_path(folder, rank, share).exists() for rank in range(share.world_size))


def _marker_path(folder: Path, rank: int, share: Share) -> Path:
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
    is_first_look = True
    while (folder / "plan.json").exists():
        if claim.try_acquire():
            return True
        if is_first_look:
            logger.info("another rank joins the shards; waiting until it is done or has died")
        is_first_look = False
        time.sleep(_POLL_SECONDS)
    return False
