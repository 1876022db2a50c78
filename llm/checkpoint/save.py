"""Saves checkpoints while training continues; a kill at any moment leaves older ones valid.

Training waits only while the state is copied into host memory; a GPU makes the copies while it
computes the next gradient. A thread then writes them to a temporary folder, as safetensors through
`torch.distributed.checkpoint`, and syncs each file; it writes a manifest with sizes and checksums
last. Then it renames the folder and syncs its parent. Only after that it removes old checkpoints.

With `--stage_checkpoints`, each rank writes its files to a node-local folder first, and copies them
from there (`staging.py`).
"""

import contextlib
import json
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from llm.checkpoint.format import (
    STATE_FILE,
    Checkpoint,
    Stateful,
    checkpoint_name,
    split_state,
    tag_tuples,
    write_manifest,
)
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.retention import clear_leftovers, commit_checkpoint, prune_checkpoints
from llm.checkpoint.snapshot import (
    HostCopies,
    OwnerRanks,
    Snapshot,
    assign_writers,
    copy_to_host,
    is_finite,
)
from llm.checkpoint.staging import (
    StagedCheckpoint,
    StagingFolder,
    copy_staged_files,
    open_staging_folder,
    remove_staging_record,
    staging_root,
    sync_parents,
)
from llm.errors import CheckpointError, NotFiniteError, PeerLostError, one_line_with_path
from llm.runtime.agreement import gather_results, is_shared
from llm.runtime.files import sync_file, sync_folder
from llm.runtime.logging import event

if TYPE_CHECKING:
    from llm.checkpoint.rank_writer import LocalPlan, RankPlan

_RETRY_DELAYS = (1.0, 4.0)
"""Seconds to wait before each retry of a failed save."""

_MAX_FAILED_SAVES = 3
"""Number of consecutive failed checkpoints before training stops."""

_NOTABLE_SECONDS = 0.05
"""Seconds of waiting for a copy that are worth a line."""

T = TypeVar("T")

logger = logging.getLogger("llm")


class Saver:
    """Saves the state of a run; every rank creates a Saver and calls it at the same steps.

    Args:
        options: Whether to write in the background, and which checkpoints to keep.
        folder: The run's `checkpoints` folder.
        parts: Objects to save, by name.
        metadata: Plain values for every manifest.
        rank: Rank of this process.
        world_size: Number of ranks.
        owner_ranks: Ranks that hold a tensor; by default all.
        extra_files: Contents of further files of every checkpoint, by their path in it; rank 0
            writes them.
        blocking_paths: Paths of tensors to copy before the device begins the next step.
        flush_metrics: Writes the metrics up to the step of a save, which a resumed run does not
            report again; rank 0 calls it.

    Attributes:
        blocked_seconds: Seconds that training waited for the last save.
        write_times: With several ranks, for each save that nobody has compared yet, the seconds
            that each rank wrote; 0 for a rank that writes nothing.
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
        extra_files: Mapping[str, bytes] | None = None,
        blocking_paths: Container[str] = (),
        flush_metrics: Callable[[], None] = lambda: None,
    ) -> None:
        self.blocked_seconds = 0.0
        self.write_times: deque[tuple[float, ...]] = deque()
        self._options = options
        self._folder = folder
        self._parts = parts
        self._metadata = metadata
        self._rank = rank
        self._world_size = world_size
        self._owner_ranks = owner_ranks or (lambda path: range(world_size))
        self._extra_files = extra_files or {}
        self._blocking_paths = blocking_paths
        self._flush_metrics = flush_metrics
        self._plan: RankPlan | None = None
        self._num_failures = 0
        self._error: CheckpointError | PeerLostError | None = None
        self._thread: threading.Thread | None = None
        self._staging: StagingFolder | None = None
        self._training_may_continue = threading.Event()  # the last save is staged, or has ended
        self._buffers: dict[str, torch.Tensor] = {}
        self._pending_copies: HostCopies | None = None
        # A separate group: the thread communicates while training uses the default group.
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def open_staging(self) -> None:
        """Create this rank's staging folder if the options ask for one; every rank calls it.

        Checkpoints that an earlier start has staged are abandoned.

        Raises:
            LLMError: The folder for staged files, or the run's folder, cannot be written to.
        """
        if self._options.stage_checkpoints is not None:
            if self._staging is not None:
                self._staging.close()
            node_folder = staging_root(self._options.stage_checkpoints)
            self._staging = open_staging_folder(node_folder, self._folder)

    def save(self, *, step: int, eval_loss: float | None) -> None:
        """Save the current state; call `before_update` before it changes.

        Args:
            step: Optimizer steps done.
            eval_loss: The validation loss at this step, if known.

        Raises:
            CheckpointError: Too many saves have failed in a row, or the state is not finite.
            PeerLostError: Another rank has ended during the last save.
        """
        start_time = time.perf_counter()
        self.finish()  # the copies below overwrite buffers that the last save may still be writing
        waited_seconds = time.perf_counter() - start_time
        if self._staging is not None and waited_seconds >= _NOTABLE_SECONDS:
            logger.info(
                f"The save of step {step} waited {waited_seconds:.1f} s for the copy of the last "
                "checkpoint."
            )
        snapshot = self._take_snapshot(step=step, eval_loss=eval_loss)
        self.blocked_seconds = time.perf_counter() - start_time
        if not self._options.async_checkpoint and self._staging is None:
            self._save_snapshot(snapshot)
            self.finish()
            return
        self._training_may_continue.clear()
        self._thread = threading.Thread(target=self._save_snapshot, args=(snapshot,), name="save")
        self._thread.daemon = True  # on a crash, do not wait for a half-written folder
        self._thread.start()
        if not self._options.async_checkpoint:
            self._training_may_continue.wait()

    def _take_snapshot(self, *, step: int, eval_loss: float | None) -> Snapshot:
        """Return the state of all parts; the copies of this rank's tensors may still be running."""
        tensors, plain_values = split_state(
            {name: part.state_dict() for name, part in self._parts.items()}
        )
        local_tensors, file_index_by_path = assign_writers(
            tensors, rank=self._rank, world_size=self._world_size, owner_ranks=self._owner_ranks
        )
        self._pending_copies = copy_to_host(
            local_tensors, self._buffers, blocking_paths=self._blocking_paths
        )
        return Snapshot(
            step=step,
            copies=self._pending_copies,
            file_index_by_path=file_index_by_path,
            plain=_encode_plain_values(plain_values),
            metadata={
                **self._metadata,
                "eval_loss": eval_loss,
                "keep_every": self._options.keep_every,
            },
        )

    def before_update(self) -> None:
        """Make later operations on the device wait for the copies of the last save.

        Call it in each step, between the gradient and the update. The host does not wait.
        """
        if self._pending_copies is not None:
            self._pending_copies.wait_on_device()
            self._pending_copies = None

    @property
    def is_state_refused(self) -> bool:
        """Whether `finish` will raise NotFiniteError; ranks may learn it at different times."""
        return isinstance(self._error, NotFiniteError)

    def finish(self, *, is_final: bool = False) -> None:
        """Wait for the background save, if one is running, and raise or log its error.

        Args:
            is_final: Whether training ends here, so that no later save can replace a failed one.

        Raises:
            CheckpointError: The state is not finite, or too many saves have failed in a row.
            PeerLostError: Another rank has ended during the save.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._pending_copies = None
        error, self._error = self._error, None
        if error is None:
            if is_final:
                self._close_staging()
            return
        self._num_failures += 1
        is_fatal = is_final or isinstance(error, NotFiniteError | PeerLostError)
        if is_fatal or self._num_failures > _MAX_FAILED_SAVES:
            raise error
        logger.warning(f"{error} Training continues.")

    def _close_staging(self) -> None:
        """Remove the folder for staged files: all copies are complete."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
            if self._rank == 0:
                with contextlib.suppress(OSError):  # a resume then looks for staged files in vain
                    remove_staging_record(self._folder)

    def _save_snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot once its copies are complete; keep the error for `finish`."""
        start_time = time.perf_counter()
        staged_checkpoint: StagedCheckpoint | None = None
        try:
            self._check_snapshot(snapshot)
            if self._staging is not None:
                staged_checkpoint = self._stage_checkpoint(snapshot, self._staging)
            if staged_checkpoint is not None:
                if not self._options.async_checkpoint:  # training has waited for it
                    self.blocked_seconds += staged_checkpoint.seconds
                self._training_may_continue.set()  # while the staged files are copied
            self._write_or_retry(snapshot, staged_checkpoint)
        except (NotFiniteError, PeerLostError) as error:
            self._error = error
            return
        except Exception as error:  # raised by `finish`, in the training thread
            self._remove_unfinished()
            self._error = self._make_save_error(snapshot.step, error, staged_checkpoint)
            return
        finally:
            self._training_may_continue.set()
        self._num_failures = 0
        if self._staging is not None and staged_checkpoint is not None:
            self._staging.remove(range(snapshot.step + 1))
        write_seconds = time.perf_counter() - start_time
        self._log_save(snapshot.step, staged_checkpoint, write_seconds=write_seconds)

    def _make_save_error(
        self, step: int, error: Exception, staged_checkpoint: StagedCheckpoint | None
    ) -> CheckpointError:
        """Return the error of a save that failed, with the place of its staged files."""
        is_named = isinstance(error, CheckpointError)
        problem = str(error) if is_named else f"{type(error).__name__}: {error}"
        staging_note = ""
        if staged_checkpoint is not None:
            staging_note = f" It stays in {staged_checkpoint.checkpoint.path}."
        return CheckpointError(
            f"The checkpoint of step {step} could not be written to {self._folder} "
            f"({problem}); earlier checkpoints are untouched.{staging_note}"
        )

    def _log_save(
        self, step: int, staged_checkpoint: StagedCheckpoint | None, *, write_seconds: float
    ) -> None:
        """Log that a checkpoint has its final name."""
        staging_note = ""
        if staged_checkpoint is not None:
            staging_note = f"staged in {staged_checkpoint.seconds:.1f} s, "
        logger.info(
            f"Saved {self._folder / checkpoint_name(step)} (blocked training for "
            f"{self.blocked_seconds:.2f} s, {staging_note}written in {write_seconds:.1f} s).",
            extra=event("save", step=step, checkpoint=checkpoint_name(step)),
        )

    def _stage_checkpoint(
        self, snapshot: Snapshot, staging: StagingFolder
    ) -> StagedCheckpoint | None:
        """Write this rank's files to its node-local folder.

        Returns:
            The staged checkpoint; None if a rank has failed: the log says why.
        """
        start_time = time.perf_counter()

        def prepare_folder() -> None:
            staging.make_temporary_folder(snapshot.step)
            if self._rank == 0:
                with contextlib.suppress(OSError):  # the later copy flushes them again
                    self._flush_metrics()

        try:
            self._on_all_ranks(prepare_folder)
            temporary_path = staging.temporary_path(snapshot.step)
            checkpoint, local_files = self._write_files(snapshot, temporary_path)
            if self._group is not None:  # each node has the manifest of all files
                checkpoint_slot = [checkpoint]
                dist.broadcast_object_list(checkpoint_slot, src=0, group=self._group)
                [checkpoint] = checkpoint_slot
            self._on_all_ranks(lambda: staging.commit(checkpoint))
        except CheckpointError as error:
            staging.remove(range(snapshot.step, snapshot.step + 1))
            logger.warning(
                f"The checkpoint of step {snapshot.step} could not be staged ({error}); it is "
                f"written to {self._folder} at once."
            )
            return None
        staging.remove(range(snapshot.step))
        return StagedCheckpoint(
            checkpoint=replace(checkpoint, path=staging.step_path(snapshot.step)),
            local_files=local_files,
            seconds=time.perf_counter() - start_time,
        )

    def _write_or_retry(
        self, snapshot: Snapshot, staged_checkpoint: StagedCheckpoint | None
    ) -> None:
        """Write a checkpoint, and retry if the file system fails; all ranks retry together.

        Raises:
            CheckpointError: The last attempt has failed.
        """
        for delay in _RETRY_DELAYS:
            try:
                self._write_checkpoint(snapshot, staged_checkpoint)
            except CheckpointError as error:
                self._remove_unfinished()
                logger.warning(f"{error}; trying again in {delay:g} seconds.")
                time.sleep(delay)
            else:
                return
        self._write_checkpoint(snapshot, staged_checkpoint)

    def _remove_unfinished(self) -> None:
        """Remove a failed save, so that a full disk has room for logs and the status."""
        if self._rank == 0:
            with contextlib.suppress(OSError):
                clear_leftovers(self._folder)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        """Wait until the snapshot is complete, and refuse it if its checkpoint would be damaged.

        Raises:
            NotFiniteError: The state is not finite on some rank; raised on all ranks.
            CheckpointError: The copies fail, or ranks do not write all of a tensor; raised on all
                ranks.
        """
        local_plans: list[LocalPlan] = []

        def check_local_state() -> bool:
            """Return whether this rank holds or writes other tensors than in the last save."""
            from llm.checkpoint.rank_writer import LocalPlan

            snapshot.copies.wait_on_host()
            self._check_finite(snapshot)
            local_plans.append(LocalPlan.of(snapshot))
            return self._plan is None or self._plan.local_plan != local_plans[0]

        # All ranks learn of an error here. Otherwise the others would wait in the next exchange.
        if any(self._on_all_ranks(check_local_state)):
            self._on_all_ranks(lambda: self._make_plan(local_plans[0]))

    def _check_finite(self, snapshot: Snapshot) -> None:
        """Refuse to save a state with infinite or NaN values on this rank."""
        tensors = snapshot.copies.tensors.items()
        infinite_name = next((name for name, tensor in tensors if not is_finite(tensor)), None)
        if infinite_name is not None:
            raise NotFiniteError(
                f"The state of step {snapshot.step} is not saved because {infinite_name} is not "
                "finite; resume from an earlier checkpoint with a lower --learning_rate."
            )

    def _make_plan(self, local_plan: "LocalPlan") -> None:
        """Divide the tensors among the ranks, for this and later saves; every rank calls it."""
        from llm.checkpoint.rank_writer import RankPlan

        self._plan = RankPlan.divide(local_plan, group=self._group)

    def _write_checkpoint(
        self, snapshot: Snapshot, staged_checkpoint: StagedCheckpoint | None
    ) -> None:
        """Write or copy a checkpoint without a retry; the error of any rank is raised on all."""
        temporary_path = self._folder / f".{checkpoint_name(snapshot.step)}.tmp"
        # Each of the three calls ends with an exchange, which is also a barrier: no rank writes
        # before the folder exists, rank 0 renames it only when all ranks' files are on the disk,
        # and no rank returns before the rename.
        self._on_all_ranks(lambda: self._make_folder(temporary_path))
        if staged_checkpoint is None:
            checkpoint, _ = self._write_files(snapshot, temporary_path)
        else:
            checkpoint = staged_checkpoint.checkpoint
            local_files = staged_checkpoint.local_files
            self._on_all_ranks(
                lambda: copy_staged_files(checkpoint.path, temporary_path, local_files)
            )
        self._on_all_ranks(lambda: self._commit_files(replace(checkpoint, path=temporary_path)))

    def _make_folder(self, temporary_path: Path) -> None:
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self._folder.parent)
            clear_leftovers(self._folder)
            self._flush_metrics()
            temporary_path.mkdir()

    def _write_files(
        self, snapshot: Snapshot, folder: Path
    ) -> tuple[Checkpoint, dict[str, tuple[int, str]]]:
        """Write the files of all ranks; every rank calls it.

        Returns:
            The checkpoint, which on other ranks than 0 lacks the files that are not tensors; and
            size in bytes and checksum of each file that this rank has written.

        Raises:
            CheckpointError: A rank has failed; raised on all ranks.
        """
        plain_files: dict[str, tuple[int, str]] = {}

        def write_local_files() -> tuple[dict[str, tuple[int, str]], float]:
            """Write this rank's tensors, and on rank 0 the other files, too."""
            tensor_files, seconds = self._write_tensors(snapshot, folder)
            if self._rank == 0:
                plain_files.update(self._write_plain_files(snapshot, folder))
            return tensor_files, seconds

        files_by_rank, write_times = zip(*self._on_all_ranks(write_local_files), strict=True)
        if self._group is not None:
            self.write_times.append(write_times)
        all_files = dict(plain_files)
        for tensor_files in files_by_rank:
            all_files |= tensor_files
        checkpoint = Checkpoint(
            path=folder,
            step=snapshot.step,
            saved_time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            world_size=self._world_size,
            metadata=snapshot.metadata,
            files=all_files,
        )
        return checkpoint, files_by_rank[self._rank] | plain_files

    def _write_plain_files(self, snapshot: Snapshot, folder: Path) -> dict[str, tuple[int, str]]:
        """Write and sync all files that are not tensors; return size and checksum of each."""
        contents = {STATE_FILE: snapshot.plain.encode(), **self._extra_files}
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        plain_files = {name: sync_file(folder / name) for name in contents}
        sync_parents(folder, contents)
        return plain_files

    def _write_tensors(
        self, snapshot: Snapshot, folder: Path
    ) -> tuple[dict[str, tuple[int, str]], float]:
        """Write and sync this rank's tensors.

        Returns:
            Size in bytes and checksum of each file; and the seconds that it took, 0 without files.
        """
        assert self._plan is not None  # `_check_snapshot` makes it
        start_time = time.perf_counter()
        file_names = self._plan.write(snapshot, folder, rank=self._rank)
        written_files = {file_name: sync_file(folder / file_name) for file_name in file_names}
        return written_files, time.perf_counter() - start_time if written_files else 0.0

    def _commit_files(self, checkpoint: Checkpoint) -> None:
        """Write the manifest and rename the checkpoint; rank 0 does it.

        Args:
            checkpoint: The checkpoint, with the path of the temporary folder.
        """
        if self._rank == 0:
            # Written last: a folder with a manifest is complete.
            write_manifest(checkpoint)
            commit_checkpoint(checkpoint.path, self._folder / checkpoint_name(checkpoint.step))
            prune_checkpoints(self._folder, self._options, saved_step=checkpoint.step)

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; return all results, ordered by rank.

        Raises:
            CheckpointError: The error of the first rank that fails, on all ranks; its text is
                never empty.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        def run_and_convert_error() -> T:
            try:
                return action()
            except (
                Exception,
                CheckpointException,
            ) as error:  # CheckpointException is a BaseException
                if is_shared(error) or isinstance(error, NotFiniteError):
                    raise
                raise CheckpointError(one_line_with_path(error)) from error

        return gather_results(run_and_convert_error, group=self._group)


def _encode_plain_values(values_by_part: Mapping[str, Any]) -> str:
    """Return the state without its tensors as JSON.

    Raises:
        CheckpointError: JSON does not hold a value of a part.
    """
    texts = []
    for part_name, values in values_by_part.items():
        try:
            texts.append(f"{json.dumps(part_name)}: {json.dumps(tag_tuples(values))}")
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"The state of {part_name} cannot be saved ({error}); let its state_dict "
                "return tensors, numbers, texts, and lists, tuples and dictionaries of them."
            ) from error
    return f"{{{', '.join(texts)}}}"
