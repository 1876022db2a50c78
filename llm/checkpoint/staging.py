"""Checkpoints in node-local folders, until their copies in the run's folder are complete.

    ROOT/llm-staged-ID-RANK/    belongs to one rank
      run.json                  names the run's folder; locked while the rank lives
      step_00000020/            the files that this rank wrote, and the manifest of all files

`staged.json` in the run's `checkpoints` folder has the ID of the last start; it exists until that
start ends with all copies complete. Folders with another ID are abandoned: their run has started
again, gone back, or ended.
"""

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from llm.checkpoint.format import (
    MANIFEST,
    STAGING_RECORD,
    Checkpoint,
    checkpoint_name,
    checkpoint_step,
    list_checkpoint_folders,
    read_manifest,
    write_manifest,
)
from llm.checkpoint.load import list_checkpoints
from llm.checkpoint.retention import (
    clear_leftovers,
    commit_checkpoint,
    remove_checkpoint,
)
from llm.checkpoint.run_folder import RunFolder
from llm.errors import CheckpointError, ConfigError, explain_os_error
from llm.runtime.agreement import gather, on_all_ranks, on_rank0
from llm.runtime.files import checksum, delete, sync_file, sync_folder, try_lock, write_whole
from llm.runtime.logging import SAME_ON_ALL_RANKS, list_first
from llm.runtime.world import world_from_environment

_FOLDER_PREFIX = "llm-staged-"
_RUN_FILE = "run.json"
_REMOVED_FOLDERS = f".{_FOLDER_PREFIX}*.removed"
_MAX_NAMED_HOSTS = 4
_LOCK_SECONDS = 10.0

logger = logging.getLogger("llm")


def staging_root(option: str) -> Path:
    """Return the node-local folder of `--stage_checkpoints` on this node.

    Args:
        option: The option, perhaps with environment variables, which may differ between nodes.

    Raises:
        ConfigError: A variable is not set, or the folder is missing or not writable.
    """
    root, host = Path(os.path.expandvars(option)), socket.gethostname()
    if unset_variable := re.search(r"\$(\w+|\{[^}]*\})", str(root)):
        raise ConfigError(
            f"--stage_checkpoints {option}: the environment variable {unset_variable[0]} is not "
            f"set on {host}; set it for all ranks, or name another folder."
        )
    if not root.is_dir():
        raise ConfigError(
            f"--stage_checkpoints {root} is not a folder on {host}; create it on every node, or "
            "name another one."
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--stage_checkpoints {root} cannot be written to on {host}; name another folder."
        )
    return root


@dataclass(frozen=True, kw_only=True)
class StagedCheckpoint:
    """A checkpoint in the node-local folders of all ranks.

    Attributes:
        checkpoint: The checkpoint; its path is the folder of this rank.
        local_files: Size in bytes and checksum of each file in the folder of this rank.
        seconds: Seconds that this rank needed for it.
    """

    checkpoint: Checkpoint
    local_files: dict[str, tuple[int, str]]
    seconds: float


class StagingFolder:
    """The node-local folder of one rank.

    Args:
        path: The folder, which must not exist yet.
        checkpoints: The run's `checkpoints` folder.
    """

    def __init__(self, path: Path, checkpoints: Path) -> None:
        self._path = path
        self._checkpoints = checkpoints
        self._run_file: IO[str] | None = None

    def create(self) -> None:
        """Create the folder, and lock it until this process ends.

        Raises:
            OSError: It cannot be created.
        """
        self._path.mkdir(mode=0o700)
        self._run_file = (self._path / _RUN_FILE).open("x", encoding="utf-8")
        try:
            # Another run that starts now may have locked it, to see whether it is abandoned.
            try_lock(self._run_file.fileno(), seconds=_LOCK_SECONDS)
            self._run_file.write(json.dumps({"checkpoints": os.path.abspath(self._checkpoints)}))
            self._run_file.flush()
        except OSError as error:  # the system does not name the file
            self.close()
            raise OSError(error.errno, error.strerror, self._run_file.name) from error

    def step_path(self, step: int) -> Path:
        """Return the folder of a complete staged checkpoint."""
        return self._path / checkpoint_name(step)

    def temporary_path(self, step: int) -> Path:
        """Return the folder of a staged checkpoint until it is complete."""
        return self._path / f".{checkpoint_name(step)}.tmp"

    def make_temporary_folder(self, step: int) -> None:
        """Create the folder for the files of a checkpoint, which does not count yet."""
        self.temporary_path(step).mkdir()

    def commit(self, checkpoint: Checkpoint) -> None:
        """Write the manifest to the temporary folder, and give the folder the name that counts.

        Args:
            checkpoint: The checkpoint with the files of all ranks.
        """
        temporary_path = self.temporary_path(checkpoint.step)
        write_manifest(replace(checkpoint, path=temporary_path))
        commit_checkpoint(temporary_path, self.step_path(checkpoint.step))

    def remove(self, steps: range) -> None:
        """Remove the staged checkpoints of some steps, complete or not."""
        with contextlib.suppress(OSError):  # the node's disk fails; the end of the run tries again
            for path in list_checkpoint_folders(self._path):
                if checkpoint_step(path) in steps:
                    remove_checkpoint(path)
            clear_leftovers(self._path)

    def close(self) -> None:
        """Remove the folder."""
        with contextlib.suppress(OSError):  # the node's disk fails
            if self._run_file is not None:
                self._run_file.close()
        _remove_folder(self._path)


def open_staging_folder(root: Path, checkpoints: Path) -> StagingFolder:
    """Create this rank's staging folder, and abandon what former starts have staged.

    Every rank calls it, while rank 0 holds the lock of the run's folder.

    Args:
        root: The node-local folder.
        checkpoints: The run's `checkpoints` folder.

    Raises:
        LLMError: A folder cannot be written to on one of the nodes.
    """
    ids, hosts = zip(*gather((secrets.token_hex(16), socket.gethostname())), strict=True)
    rank, start_id = world_from_environment().rank, ids[0]

    def write_record() -> None:
        """Name this start in the run's folder, so that folders of former starts are abandoned."""
        if rank == 0:
            checkpoints.mkdir(parents=True, exist_ok=True)
            for leftover in checkpoints.glob(f".{STAGING_RECORD}.*.tmp"):  # from a killed process
                leftover.unlink()
            record = {"id": start_id, "root": str(root), "hosts": sorted(set(hosts))}
            write_whole(checkpoints / STAGING_RECORD, json.dumps(record, indent=1) + "\n")

    folder = StagingFolder(root / f"{_FOLDER_PREFIX}{start_id}-{rank:05d}", checkpoints)
    on_all_ranks(write_record)
    on_all_ranks(folder.create)
    _remove_abandoned(root)
    return folder


def _remove_abandoned(root: Path) -> None:
    """Remove staged checkpoints that no start will complete, whichever run they belong to."""
    for path in (*root.glob(f"{_FOLDER_PREFIX}*"), *root.glob(_REMOVED_FOLDERS)):
        # Another rank may remove it at the same time, or a run that we cannot read may need it.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if _belongs_to_user(path) and (path.match(_REMOVED_FOLDERS) or _is_abandoned(path)):
                _remove_folder(path)


def _remove_folder(path: Path) -> None:
    """Remove the folder of a rank; after a kill in between, the next start removes the rest."""
    removed_path = path
    with contextlib.suppress(OSError):  # the node's disk fails
        if not path.match(_REMOVED_FOLDERS):
            removed_path = path.rename(path.with_name(f".{path.name}.removed"))
        delete(removed_path)


def _belongs_to_user(path: Path) -> bool:
    """Return whether a path is a folder of this user, and no link to one."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_abandoned(path: Path) -> bool:
    """Return whether no start will complete the checkpoints in the folder of a rank.

    Raises:
        OSError: The rank lives, or a file cannot be read.
    """
    with (path / _RUN_FILE).open("r+", encoding="utf-8") as run_file:
        try_lock(run_file.fileno())
        checkpoints = Path(json.load(run_file)["checkpoints"])
    record = _read_staging_record(checkpoints)
    if record is None:  # the run has ended, unless its file system is not mounted
        return checkpoints.parent.is_dir()
    return not path.name.startswith(f"{_FOLDER_PREFIX}{record['id']}-")


def _read_staging_record(checkpoints: Path) -> dict[str, Any] | None:
    """Return what the last start has recorded about its staged checkpoints; None without a record.

    Raises:
        OSError: The record cannot be read.
    """
    try:
        record = json.loads((checkpoints / STAGING_RECORD).read_bytes())
        return {"id": str(record["id"]), "root": str(record["root"]), "hosts": [*record["hosts"]]}
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None


def remove_staging_record(checkpoints: Path) -> None:
    """Abandon all staged checkpoints of a run.

    Raises:
        OSError: The record cannot be removed.
    """
    (checkpoints / STAGING_RECORD).unlink(missing_ok=True)


def copy_staged_files(
    staged_path: Path, target_folder: Path, files: Mapping[str, tuple[int, str]]
) -> None:
    """Copy files of a staged checkpoint, sync them, and compare them with their checksums.

    Args:
        staged_path: The folder of the staged checkpoint.
        target_folder: The folder to write to.
        files: Size in bytes and checksum of each file to copy.

    Raises:
        CheckpointError: A copy does not match its checksum.
        OSError: A file cannot be read or written.
    """
    for name, entry in files.items():
        path = target_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(staged_path / name, path)
        if sync_file(path) != entry:
            raise CheckpointError(f"{staged_path / name} does not match its checksum")
    sync_parents(target_folder, files)


def sync_parents(folder: Path, names: Mapping[str, object]) -> None:
    """Sync the folders in a checkpoint's folder that contain some of its files."""
    for parent in {parent for name in names for parent in Path(name).parents[:-1]}:
        sync_folder(folder / parent)


@dataclass(frozen=True, kw_only=True)
class _StagedPart:
    """The files of a staged checkpoint on this node.

    Attributes:
        checkpoint: The manifest of the whole checkpoint.
        folder_by_file: The staged folder of each file on this node.
    """

    checkpoint: Checkpoint
    folder_by_file: dict[str, Path]


def complete_staged_checkpoint(folder: RunFolder, option: str | None) -> None:
    """Complete the copy of the newest staged checkpoint that the last start has left.

    Every rank calls it, before the run looks for its newest checkpoint. A staged checkpoint can be
    completed if the nodes of this start have all of its files.

    Args:
        folder: The run's folder.
        option: The value of `--stage_checkpoints`.

    Raises:
        CheckpointError: The copy cannot be written.
        ConfigError: Another process uses the run's folder.
    """
    record = on_rank0(lambda: _read_staging_record(folder.checkpoints))
    if record is None:
        return
    staging_clause = _describe_last_staging(record)
    if option is None:
        logger.warning(
            f"{staging_clause}. Without --stage_checkpoints, this start takes none of them.",
            extra=SAME_ON_ALL_RANKS,
        )
        return
    root = staging_root(option)
    with contextlib.ExitStack() as stack:
        on_rank0(lambda: stack.enter_context(folder.lock()))
        newest_step = on_rank0(
            lambda: max((saved.step for saved in list_checkpoints(folder.checkpoints)), default=0)
        )
        local_parts = _find_local_parts(root, record["id"], later_than=newest_step)
        ranks_by_file_and_key = _gather_file_ranks(local_parts)
        for key, ranks_by_file in sorted(ranks_by_file_and_key.items(), reverse=True):
            if _copy_if_complete(key, local_parts.get(key), ranks_by_file, folder.checkpoints):
                return
        if not ranks_by_file_and_key and not {*record["hosts"]} <= {*gather(socket.gethostname())}:
            logger.warning(
                f"{staging_clause}. This start does not have all of these nodes, and no staged "
                f"checkpoint is later than step {newest_step}, the newest complete one.",
                extra=SAME_ON_ALL_RANKS,
            )


def _describe_last_staging(record: dict[str, Any]) -> str:
    """Return a clause about where the last start staged its checkpoints, with some of its hosts."""
    host_list = list_first(record["hosts"], _MAX_NAMED_HOSTS)
    return (
        f"The last start staged its checkpoints in {record['root']} on {host_list}, and did not "
        "end well"
    )


def _gather_file_ranks(local_parts: Mapping[str, _StagedPart]) -> dict[str, dict[str, list[int]]]:
    """Return the ranks that can read each file of each staged checkpoint; every rank calls it.

    Returns:
        Ranks by file, by step and checksum of the manifest.
    """
    files_by_key = {key: [*part.folder_by_file] for key, part in local_parts.items()}
    ranks_by_file_and_key: dict[str, dict[str, list[int]]] = {}
    for rank, rank_files_by_key in enumerate(gather(files_by_key)):
        for key, files in rank_files_by_key.items():
            ranks_by_file = ranks_by_file_and_key.setdefault(key, {})
            for file in files:
                ranks_by_file.setdefault(file, []).append(rank)
    return ranks_by_file_and_key


def _find_local_parts(root: Path, start_id: str, *, later_than: int) -> dict[str, _StagedPart]:
    """Return the checkpoints after the step `later_than` that a start has staged on this node.

    Returns:
        Checkpoints by step and checksum of the manifest, as one text.
    """
    parts: dict[str, _StagedPart] = {}
    for rank_folder in sorted(root.glob(f"{_FOLDER_PREFIX}{start_id}-*")):
        paths = list_checkpoint_folders(rank_folder) if _belongs_to_user(rank_folder) else []
        for path in paths:
            with contextlib.suppress(CheckpointError, OSError):
                checkpoint = read_manifest(path)
                key = f"{checkpoint.step:018d} {checksum(path / MANIFEST)}"
                if checkpoint.step > later_than:
                    part = parts.setdefault(
                        key, _StagedPart(checkpoint=checkpoint, folder_by_file={})
                    )
                    local_files = (file for file in checkpoint.files if (path / file).is_file())
                    part.folder_by_file.update(dict.fromkeys(local_files, path))
    return parts


def _copy_if_complete(
    key: str, part: _StagedPart | None, ranks_by_file: dict[str, list[int]], checkpoints: Path
) -> bool:
    """Copy a staged checkpoint to the run's folder if all files are there; every rank calls it.

    Args:
        key: Step and checksum of the manifest.
        part: The files on this node, if it has any.
        ranks_by_file: For each file, the ranks that can read it.
        checkpoints: The run's `checkpoints` folder.

    Returns:
        Whether the checkpoint is complete now. If not, the log says why.

    Raises:
        CheckpointError: The copy cannot be written.
    """
    step = int(key.split()[0])
    local_files: dict[str, tuple[int, str]] = {}
    local_problem = None
    if part is not None:
        local_files = _choose_local_files(part, ranks_by_file)
        local_problem = _find_missing_file(part, ranks_by_file) or _find_damage(part, local_files)
    problem = next((text for text in gather(local_problem) if text is not None), None)
    if problem is not None:
        line = f"The staged checkpoint of step {step} is not used: {problem}."
        logger.warning(line, extra=SAME_ON_ALL_RANKS)
        return False
    committing_rank = min((min(ranks) for ranks in ranks_by_file.values()), default=0)
    _copy_on_all_ranks(step, part, local_files, checkpoints, committing_rank=committing_rank)
    logger.info(
        f"Completed {checkpoints / checkpoint_name(step)} from its staged files: the last start "
        "ended during its copy."
    )
    return True


def _find_missing_file(part: _StagedPart, ranks_by_file: Mapping[str, object]) -> str | None:
    """Return which file of the manifest no rank can read, or None."""
    missing_files = part.checkpoint.files.keys() - ranks_by_file.keys()
    return f"no node of this start has {min(missing_files)}" if missing_files else None


def _choose_local_files(
    part: _StagedPart, ranks_by_file: Mapping[str, list[int]]
) -> dict[str, tuple[int, str]]:
    """Return size and checksum of this rank's share of the files, divided among their readers."""
    local_rank = world_from_environment().rank
    return {
        file: part.checkpoint.files[file]
        for file_index, (file, ranks) in enumerate(sorted(ranks_by_file.items()))
        if ranks[file_index % len(ranks)] == local_rank
    }


def _copy_on_all_ranks(
    step: int,
    part: _StagedPart | None,
    local_files: Mapping[str, tuple[int, str]],
    checkpoints: Path,
    *,
    committing_rank: int,
) -> None:
    """Copy a staged checkpoint to the run's folder and commit it; every rank calls it.

    Raises:
        CheckpointError: The copy cannot be written.
    """
    is_committing = world_from_environment().rank == committing_rank
    temporary_path = checkpoints / f".{checkpoint_name(step)}.tmp"

    def make_folder() -> None:
        if is_committing:
            clear_leftovers(checkpoints)
            temporary_path.mkdir()

    def copy_local_files() -> None:
        for file, size_and_checksum in local_files.items():
            assert part is not None
            copy_staged_files(part.folder_by_file[file], temporary_path, {file: size_and_checksum})

    def commit() -> None:
        if is_committing:
            assert part is not None
            write_manifest(replace(part.checkpoint, path=temporary_path))
            commit_checkpoint(temporary_path, checkpoints / checkpoint_name(step))

    for phase in (make_folder, copy_local_files, commit):
        on_all_ranks(functools.partial(_explain_copy_errors, phase, step))


def _find_damage(part: _StagedPart, files: Mapping[str, tuple[int, str]]) -> str | None:
    """Return which staged file is damaged, or None."""
    for file, (_, digest) in files.items():
        folder = part.folder_by_file[file]
        try:
            if checksum(folder / file) != digest:
                return f"{folder / file} does not match its checksum"
        except OSError as error:
            return f"{folder / file} cannot be read ({error.strerror})"
    return None


def _explain_copy_errors(phase: Callable[[], None], step: int) -> None:
    """Run a phase of the copy of a staged checkpoint.

    Raises:
        CheckpointError: The operating system refuses it.
    """
    try:
        phase()
    except OSError as error:
        raise CheckpointError(
            f"The staged checkpoint of step {step} cannot be copied to the run's folder: "
            f"{explain_os_error(error)} Repair this and start again, or give it up: name an "
            "earlier checkpoint with --resume_from_checkpoint PATH."
        ) from error
