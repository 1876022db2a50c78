"""Checkpoints that are written while training goes on, and survive a kill at any moment.

Training is held up only while the state is copied into host memory. A thread then writes it
beside its final place, file by file through `torch.distributed.checkpoint` as safetensors, each
synced, a manifest with sizes and checksums last; the folder is renamed, and its parent synced.
Only then are old checkpoints removed.
"""

import json
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from llm.checkpoint.format import (
    FORMAT_VERSION,
    MANIFEST,
    PLAIN,
    Stateful,
    add_checksum,
    name_of,
    split_state,
)
from llm.checkpoint.load import cause
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.retention import clear_leftovers, commit_checkpoint, prune, sync_file
from llm.checkpoint.snapshot import HostCopies, OwnerRanks, assign_writers
from llm.errors import CheckpointError, NotFiniteError
from llm.runtime.events import event
from llm.runtime.files import sync_folder

_PAUSES = (1.0, 4.0)  # seconds before each further try of a save that failed
_MAX_FAILED_SAVES = 3
"""Checkpoints in a row that may fail to be written before training stops."""

logger = logging.getLogger("llm")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A training state in host memory.

    Attributes:
        step: Optimizer steps done.
        tensors: This rank's share, by path.
        file_of: Number of the file, among those of its rank, that each tensor of any rank is in.
        plain: The rest, as JSON.
        metadata: Plain values for the manifest.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    file_of: dict[str, int]
    plain: str
    metadata: dict[str, Any]


class Saver:
    """Saves the state of a run; every rank makes one and calls it at the same steps.

    Attributes:
        held_up: Seconds for which the last save kept training waiting.

    Args:
        options: Whether to write in the background, and which checkpoints to keep.
        folder: The run's `checkpoints` folder.
        parts: What to save, by name.
        metadata: Plain values to keep in every manifest.
        rank: Rank of this process.
        world_size: Number of processes.
        owner_ranks: Which ranks hold a tensor; all of them unless given.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        folder: Path,
        *,
        parts: Mapping[str, Stateful],
        metadata: Mapping[str, Any],
        rank: int,
        world_size: int,
        owner_ranks: OwnerRanks | None = None,
    ) -> None:
        self.held_up = 0.0
        self._options = options
        self._folder = folder
        self._parts = parts
        self._metadata = metadata
        self._rank = rank
        self._world_size = world_size
        self._owner_ranks = owner_ranks or (lambda path: range(world_size))
        self._failures = 0
        self._error: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self._copies = HostCopies()
        # Its messages go on while the step's own are under way.
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def save(self, *, step: int, eval_loss: float | None) -> None:
        """Save the present state.

        Args:
            step: Optimizer steps done.
            eval_loss: The validation loss at this step, if it is known.

        Raises:
            CheckpointError: Too many saves have failed in a row, or the state is not finite.
        """
        began = time.perf_counter()
        self.finish()
        state, plain = split_state({name: part.state_dict() for name, part in self._parts.items()})
        own, file_of = assign_writers(
            state, rank=self._rank, world_size=self._world_size, owner_ranks=self._owner_ranks
        )
        snapshot = Snapshot(
            step=step,
            tensors=self._copies.copy(own),
            file_of=file_of,
            plain=json.dumps(plain),
            metadata={**self._metadata, "eval_loss": eval_loss},
        )
        self.held_up = time.perf_counter() - began
        if not self._options.async_checkpoint:
            self._save(snapshot)
            self.finish()
            return
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="save")
        self._thread.daemon = True  # a crash does not wait for it: what is half written is nothing
        self._thread.start()

    def finish(self, *, last: bool = False) -> None:
        """Wait until the save that is under way is done.

        Args:
            last: Whether training ends here, so that no later save can make good for this one.

        Raises:
            CheckpointError: The state is not finite, or too many saves have failed in a row.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        self._failures += 1
        if last or isinstance(error, NotFiniteError) or self._failures > _MAX_FAILED_SAVES:
            raise error
        logger.warning(f"{error} Training goes on.")

    def _save(self, snapshot: Snapshot) -> None:
        """Writes a snapshot, trying again where the file system refuses; all ranks in step."""
        began = time.perf_counter()
        try:
            for pause in (*_PAUSES, None):
                problem = self._write(snapshot)
                if problem is None or pause is None:
                    break
                logger.warning(f"{problem}; trying again in {pause:g} seconds.")
                time.sleep(pause)
        except NotFiniteError as error:
            self._error = error
            return
        except Exception as error:  # raised in `finish`, in the thread that trains
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self._error = CheckpointError(
                f"The checkpoint of step {snapshot.step} could not be written to {self._folder} "
                f"({problem}); earlier checkpoints are untouched."
            )
            return
        self._failures = 0
        logger.info(
            f"Saved {self._folder / name_of(snapshot.step)} (held up {self.held_up:.2f} s, "
            f"written in {time.perf_counter() - began:.1f} s).",
            extra=event("save", step=snapshot.step, checkpoint=name_of(snapshot.step)),
        )

    def _write(self, snapshot: Snapshot) -> str | None:
        """One try; returns what went wrong on any rank."""
        final = self._folder / name_of(snapshot.step)
        temporary = self._folder / f".{final.name}.tmp"
        self._check_finite(snapshot)
        problem = self._agree(lambda: self._make_folder(temporary))
        if problem is not None:
            return problem
        files: dict[str, Any] = {}
        problem = self._agree(lambda: files.update(self._write_tensors(snapshot, temporary)))
        if problem is not None:
            return problem
        everyone = self._gathered(files)
        return self._agree(lambda: self._commit(snapshot, everyone, temporary, final))

    def _check_finite(self, snapshot: Snapshot) -> None:
        bad = next(
            (name for name, tensor in snapshot.tensors.items() if not is_finite(tensor)),
            None,
        )
        found = [name for name in self._gathered(bad) if name is not None]
        if found:
            raise NotFiniteError(
                f"The state of step {snapshot.step} is not saved, since {found[0]} is not finite; "
                "go on from an earlier checkpoint with a lower --learning_rate."
            )

    def _make_folder(self, temporary: Path) -> None:
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self._folder.parent)
            clear_leftovers(self._folder)
            temporary.mkdir()

    def _write_tensors(self, snapshot: Snapshot, temporary: Path) -> dict[str, Any]:
        """Size and checksum of each file that this rank has written."""
        # One rank plans for all, and knows by itself only what is shared and its own.
        known = self._gathered(snapshot.file_of)
        file_of = {name: file for ranks in known for name, file in ranks.items()}
        write_tensors(temporary, snapshot.tensors, file_of=file_of, group=self._group)
        return {
            path.name: sync_file(path)
            for path in temporary.glob(f"shard-{self._rank + 1:05d}-*.safetensors")
        }

    def _commit(self, snapshot: Snapshot, files: list[Any], temporary: Path, final: Path) -> None:
        if self._rank != 0:
            return
        described = {name: entry for own in files for name, entry in own.items()}
        write_manifest(temporary, snapshot, files=described, world_size=self._world_size)
        commit_checkpoint(temporary, final)
        try:
            prune(
                self._folder,
                saved=snapshot.step,
                keep_newest=self._options.keep_checkpoints,
                keep_best=self._options.save_top_k,
            )
        except OSError as error:
            logger.warning(f"Old checkpoints in {self._folder} stay: {error.strerror}.")

    def _agree(self, action: Callable[[], None]) -> str | None:
        """Acts on every rank and returns what went wrong on the first that failed."""
        problem = None
        try:
            action()
        except OSError as error:
            problem = f"{error.strerror or error}"
        except Exception as error:
            problem = cause(error)
        return next((found for found in self._gathered(problem) if found is not None), None)

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self._group)
        return values


def write_tensors(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, file_of: Mapping[str, int], group: Any
) -> None:
    """Write tensors on the host into a folder, as safetensors; not synced.

    Args:
        folder: Where to.
        tensors: This rank's, by path.
        file_of: Number of the file, among those of its rank, that each tensor of any rank is in.
        group: The ranks that write together; None writes alone.

    Raises:
        CheckpointError: A file cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=dict(file_of), save_distributed=True
    )
    # All is in host memory already: nothing shall touch, or wait for, a device.
    writer.per_thread_copy_ahead = 0
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # which is no Exception
        raise CheckpointError(cause(error)) from error


def write_manifest(
    folder: Path, snapshot: Snapshot, *, files: dict[str, tuple[int, str]], world_size: int
) -> None:
    """Make a folder of written tensors a checkpoint: the plain values, and what it consists of.

    Args:
        folder: Where the tensors are.
        snapshot: The state; its tensors are not looked at.
        files: Size and checksum of each file with tensors.
        world_size: Number of ranks that wrote them.
    """
    (folder / PLAIN).write_text(snapshot.plain, encoding="utf-8")
    manifest = {
        "format": FORMAT_VERSION,
        "step": snapshot.step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "world_size": world_size,
        "facts": snapshot.metadata,
        "files": {**files, PLAIN: sync_file(folder / PLAIN)},
    }
    sealed = add_checksum(json.dumps(manifest, indent=1))
    (folder / MANIFEST).write_text(sealed, encoding="utf-8")
    sync_file(folder / MANIFEST)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor, or of this rank's part of it, are finite."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # Unlike torch.isfinite, this makes no copy of the tensor's size.
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))
