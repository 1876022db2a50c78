"""The folder of a run: its owner, status and configuration."""

import contextlib
import errno
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from llm.checkpoint.format import STAGING_RECORD
from llm.checkpoint.retention import clear_leftovers
from llm.config.options import is_too_long
from llm.errors import CheckpointError, ConfigError, DataError, explain_os_error
from llm.runtime.claims import HEARTBEAT_TIMEOUT_SECONDS, Claim
from llm.runtime.files import delete, sync, sync_folder, try_lock, write_whole
from llm.runtime.logging import append_event, list_first

logger = logging.getLogger("llm")

Status = Literal["running", "finished", "preempted", "failed"]

_RUN_FILES = (
    "config.toml",
    "status.json",
    "log.txt",
    "metrics.jsonl",
    "events.jsonl",
    "goodput.json",
    "all_results.json",
)
_FILE_PATTERNS_BY_FOLDER = {
    "checkpoints": (
        r"step_\d+(\.replaced)?(\.superseded)?|\.step_.*\.tmp|best|\.best\.link"
        rf"|{re.escape(STAGING_RECORD)}|\.{re.escape(STAGING_RECORD)}\.[0-9a-f]+\.tmp"
    ),
    "tensorboard": r"events\.out\.tfevents\..*",
    "stacks": r"rank_\d+\.txt|(nccl|gloo)_rank_\d+",
    "wandb": r"run\.json",  # W&B manages its other files
    "profile": r"rank\d+\.trace\.json\.gz|profile\.txt",
}
"""Patterns of the file names that a run writes to each of its folders."""
OWNER_CLAIM_NAME = ".owner"
"""Name of the claim to a folder on a file system without locks."""
IN_USE = "is in use by"
"""Words of the refusal of a folder that another run writes to; `llm-trainers sweep` reads them."""
_UNKNOWN_OWNER = "another process"
_LOCK_SECONDS = 0.3  # longer than `has_lock_holder` takes
_CLAIM_POLL_SECONDS = 0.5  # between two looks at another run's sign of life
MODEL_FILE_PATTERN = (
    r"README\.md|(generation_)?config\.json|model(-\d+-of-\d+)?\.safetensors"
    r"|model\.safetensors\.index\.json|tokenizer(_config)?\.json|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tekken\.json|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model"
    r"|chat_template\.(jinja|json)|additional_chat_templates|(configuration|modeling|tokenization)_\w+\.py"
)
"""Pattern of the file names in an exported model with its tokenizer."""
_MAX_LISTED_FILES = 8
"""Maximum number of files that an error names; it counts the others."""
_TEMPORARY_FILE_PATTERN = rf"\.({'|'.join(_RUN_FILES)}|README\.md)\.[0-9a-f]+\.tmp"


class RunFolder:
    """The folder that a run writes to; it need not exist yet.

    Attributes:
        is_open: Whether this start writes to it. Until then, failures leave the folder unchanged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_open = False
        self.checkpoints = path / "checkpoints"
        self._abandoned = path / ".checkpoints.abandoned"
        self.stacks = path / "stacks"
        self.wandb = path / "wandb" / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.goodput = path / "goodput.json"
        self.log = path / "log.txt"
        self.lock_path = path / ".lock"

    def check_contents(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder with files that the run may not replace, or without write access.

        Args:
            resume: The run in the folder is resumed.
            overwrite: The run in the folder is removed.

        Raises:
            ConfigError: The folder holds another run, or files that this run would replace; or as
                for `check_usable`.
        """
        if is_too_long(str(self.path)):  # a default; other paths were checked before
            raise ConfigError(
                f"The name of the folder {self.path} is too long; give an --output_dir."
            )
        self.check_usable()
        training_files, model_files = self._list_run_files()
        # If a rank hangs while the run starts, it leaves stacks in a folder without a status.
        run_files = [path for path in training_files if path.parent != self.stacks]
        if run_files + model_files and not self._holds_run():
            raise self._other_files_error(run_files + model_files)
        if run_files and not (resume or overwrite):
            raise self._existing_run_error(run_files)
        if not run_files:
            self._check_no_surrounding_run()
        if overwrite:
            self._check_no_links(training_files)

    def _check_no_surrounding_run(self) -> None:
        """Refuse a folder within the files of another run."""
        surrounding_run = find_surrounding_run(self.path)
        if surrounding_run is not None:
            raise ConfigError(
                f"--output_dir {self.path} is within the files of the run {surrounding_run}; name "
                "a folder outside of them."
            )

    def _check_no_links(self, training_files: list[Path]) -> None:
        """Refuse to overwrite a run with files in a folder that is a link."""
        folders = {path.parent for path in training_files if path.parent != self.path}
        links = sorted(folder for folder in folders if folder.is_symlink())
        if links:
            raise ConfigError(
                f"{links[0]} is a link, and --overwrite_output_dir removes nothing through a link: "
                "remove the link or its target, or name another --output_dir."
            )

    def _existing_run_error(self, run_files: list[Path]) -> ConfigError:
        """Return the error for a folder with a run that is neither resumed nor removed."""
        names = list(dict.fromkeys(path.relative_to(self.path).parts[0] for path in run_files))
        return ConfigError(
            f"--output_dir {self.path} holds a run already ({', '.join(names)}): continue it "
            "with --resume_from_checkpoint, remove it with --overwrite_output_dir, or name "
            "another folder."
        )

    def _other_files_error(self, paths: list[Path]) -> ConfigError:
        """Return the error for a folder without a run, but with files that a run would replace."""
        names = [str(path.relative_to(self.path)) for path in paths]
        return ConfigError(
            f"--output_dir {self.path} holds no run, but files that this run would replace "
            f"({list_first(names, _MAX_LISTED_FILES)}); move them away, or name another folder."
        )

    def check_usable(self) -> None:
        """Refuse a folder that cannot be created or written to; every rank calls it, none writes.

        Raises:
            ConfigError: Names the file, link or folder in the way.
        """
        # Unlike Path.exists, os.path.exists does not raise if access is denied.
        parents = (self.path, *self.path.absolute().parents)
        existing_path = next(path for path in parents if os.path.lexists(path))
        if not os.path.exists(existing_path):
            raise ConfigError(
                f"--output_dir {self.path}: {existing_path} is a link to "
                f"{os.readlink(existing_path)}, which does not exist; create that folder, or name "
                "another one."
            )
        if not os.path.isdir(existing_path):
            raise ConfigError(
                f"--output_dir {self.path}: {existing_path} is a file; name a folder."
            )
        # Some file systems, such as /proc, grant access but take no files; `lock` refuses them.
        if not os.access(existing_path, os.W_OK | os.X_OK):
            raise ConfigError(
                f"--output_dir {self.path}: {existing_path} cannot be written to (you lack the "
                "permission, or the file system is read-only); name another folder."
            )

    def _holds_run(self) -> bool:
        has_checkpoints = any(self.checkpoints.glob("step_*/manifest.json"))
        return "pid" in self._read_status() or has_checkpoints or self._abandoned.exists()

    def _list_run_files(self) -> tuple[list[Path], list[Path]]:
        """Return the files in this folder that belong to a training, and to an exported model.

        Raises:
            ConfigError: The folder cannot be read.
        """
        try:
            training_files = self._list_training_files()
            entries = sorted(self.path.iterdir()) if self.path.is_dir() else []
        except OSError as error:
            raise ConfigError(
                f"--output_dir {self.path}: {error.filename} cannot be read ({error.strerror})."
            ) from error
        model_files = [path for path in entries if re.fullmatch(MODEL_FILE_PATTERN, path.name)]
        return training_files, model_files

    def _list_training_files(self) -> list[Path]:
        """Return the files in this folder that a run writes before it exports its model."""
        candidate_paths = [self.path / name for name in _RUN_FILES]
        for name, pattern in _FILE_PATTERNS_BY_FOLDER.items():
            folder = self.path / name
            if folder.is_dir():
                entries = sorted(folder.iterdir())
                candidate_paths += [path for path in entries if re.fullmatch(pattern, path.name)]
            else:  # a file or a link with the name of the folder, or nothing
                candidate_paths.append(folder)
        return [path for path in candidate_paths if os.path.lexists(path)]

    def would_overwrite(self, input_path: Path) -> bool:
        """Return whether a fresh run in this folder might remove or replace an input.

        Args:
            input_path: A file or a folder; it and its contents may be links.

        Raises:
            ConfigError: This folder cannot be read.
        """
        training_files, model_files = self._list_run_files()
        run_folders = [self.path / name for name in _FILE_PATTERNS_BY_FOLDER]
        run_paths = _path_spellings(*run_folders, *training_files, *model_files)
        input_paths = _path_spellings(input_path, *_find_links(input_path))
        is_in_run = any(
            path in run_paths or not run_paths.isdisjoint(path.parents) for path in input_paths
        )
        return is_in_run or os.path.realpath(input_path) == os.path.realpath(self.path)

    def check_not_finished(self) -> None:
        """Refuse to resume a finished run without checkpoints, which would start it again.

        Raises:
            ConfigError: The run is finished.
        """
        if self._read_status().get("status") == "finished" and not self._abandoned.exists():
            raise ConfigError(
                f"--resume_from_checkpoint: {self.path} holds a finished run without checkpoints, "
                "so there is nothing to resume from; remove it with --overwrite_output_dir, or "
                "name another folder."
            )

    def _read_status(self) -> dict[str, object]:
        """Return the contents of `status.json`; empty if it is missing or damaged."""
        try:
            status = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return status if isinstance(status, dict) else {}

    def has_lock_holder(self) -> bool:
        """Return whether a run holds the lock; False on a file system without locks."""
        try:
            with self.lock_path.open("rb") as lock_file:
                try_lock(lock_file.fileno(), shared=True)
        except BlockingIOError:
            return True
        except OSError:  # there is no lock, or it cannot be read
            pass
        return False

    def read_lock_owner(self) -> str:
        """Return the process that has last held the lock, in words."""
        with contextlib.suppress(OSError):
            return self.lock_path.read_text(encoding="utf-8", errors="replace") or _UNKNOWN_OWNER
        return _UNKNOWN_OWNER

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other runs for the context, or until this process ends.

        If the context ends before `open`, the files and folders of the lock are removed.

        Raises:
            ConfigError: Another process writes to it, such as the same job started twice.
            DataError: It cannot be written to.
        """
        created_paths = [
            path for path in (self.lock_path, *self.lock_path.parents) if not os.path.lexists(path)
        ]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Appending keeps the text of another owner, for the message below.
            lock_file = self.lock_path.open("a+", encoding="utf-8")
        except OSError as error:
            raise self._unwritable_error(error) from error
        try:
            claim = self._take_ownership(lock_file)
            try:
                yield
            finally:
                claim.release()
                if not self.is_open:
                    _remove_lock(self.lock_path, created_paths)
        finally:
            with contextlib.suppress(OSError):  # an error here would hide what ended the run
                lock_file.close()

    def _take_ownership(self, lock_file: IO[str]) -> Claim:
        """Lock the folder, or acquire its claim on a file system without locks; note the owner."""
        claim = Claim(self.path, OWNER_CLAIM_NAME, on_loss=self._end_process)
        try:
            # `has_lock_holder` of another program holds the lock for a moment.
            if not try_lock(lock_file.fileno(), seconds=_LOCK_SECONDS):
                self._wait_for_claim(claim, lock_file)
            lock_file.truncate(0)
            start_time = time.strftime("%Y-%m-%d %H:%M:%S")
            lock_file.write(f"process {os.getpid()} on {socket.gethostname()} since {start_time}")
            lock_file.flush()
        except BlockingIOError as error:
            raise self._in_use_error() from error
        except OSError as error:
            raise self._unwritable_error(error) from error
        return claim

    def _wait_for_claim(self, claim: Claim, lock_file: IO[str]) -> None:
        """Acquire a claim; wait until its last owner has given no sign of life for some time."""
        has_logged = False
        while not claim.try_acquire():
            if claim.has_rival:
                raise self._in_use_error()
            if not has_logged:
                logger.warning(
                    f"{self.path} is on a file system without locks, and its last run has not "
                    f"ended by itself: waiting up to {HEARTBEAT_TIMEOUT_SECONDS:g} seconds for a "
                    "sign of life."
                )
            has_logged = True
            time.sleep(_CLAIM_POLL_SECONDS)

    def _in_use_error(self) -> ConfigError:
        return ConfigError(
            f"--output_dir {self.path} {IN_USE} {self.read_lock_owner()}; wait for it, end "
            "it, or name another folder."
        )

    def _end_process(self) -> None:
        """End this process, which would write into the folder of another one."""
        logger.error(
            f"error: Another run writes to {self.path}, because this process was stopped for more "
            f"than {HEARTBEAT_TIMEOUT_SECONDS:g} seconds; this one ends."
        )
        os._exit(2)

    def _unwritable_error(self, error: OSError) -> DataError:
        return DataError(f"--output_dir: {explain_os_error(error)}")

    def open(self, *, overwrite: bool, config: str) -> None:
        """Claim the folder: remove an earlier run, and write this run's status and configuration.

        Raises:
            DataError: It cannot be written to.
        """
        try:
            if overwrite:
                self._abandon_run()
            if self._abandoned.exists():  # now, or by a start that was killed in between
                self._remove_records()
            self._remove_temporary_files()
            clear_leftovers(self.checkpoints)  # now, since the next lines need room on the disk
            if self.checkpoints.is_dir():
                (self.checkpoints / STAGING_RECORD).unlink(missing_ok=True)  # abandons staged ones
            self.write_status("running")
            self._remove_abandoned_checkpoints()
            write_whole(self.path / "config.toml", config)
        except OSError as error:
            raise self._unwritable_error(error) from error

    def _remove_temporary_files(self) -> None:
        """Remove the temporary files of a killed process at the top of the folder."""
        for path in self.path.glob(".*.tmp"):
            if re.fullmatch(_TEMPORARY_FILE_PATTERN, path.name):
                path.unlink()

    def _abandon_run(self) -> None:
        """Rename the checkpoints folder of the former run, so that no start resumes that run.

        The renamed folder tells each start that the former run must be removed. It exists until
        `_remove_abandoned_checkpoints`.
        """
        if self.checkpoints.exists() and not self._abandoned.exists():
            self.checkpoints.rename(self._abandoned)
        self._abandoned.mkdir(exist_ok=True)
        sync_folder(self.path)

    def _remove_records(self) -> None:
        """Remove the files of the former run, except its abandoned checkpoints."""
        for path in self._list_training_files():
            if path.name != "status.json":  # which marks the folder as a run
                delete(path)
        for name in _FILE_PATTERNS_BY_FOLDER:
            with contextlib.suppress(OSError):  # missing, or it contains files of the user
                (self.path / name).rmdir()

    def _remove_abandoned_checkpoints(self) -> None:
        """Remove abandoned checkpoints, and move the user's files back to `checkpoints`."""
        if not self._abandoned.exists():
            return
        for path in self._abandoned.iterdir():
            if re.fullmatch(_FILE_PATTERNS_BY_FOLDER["checkpoints"], path.name):
                delete(path)
            else:
                self.checkpoints.mkdir(exist_ok=True)
                path.rename(self.checkpoints / path.name)
        self._abandoned.rmdir()

    def write_status(
        self, status: Status, *, reason: str | None = None, step: int | None = None
    ) -> None:
        """Write `status.json`, because launchers hide exit codes; log an event if the run ends.

        Raises:
            OSError: It cannot be written.
        """
        record = {
            "status": status,
            "reason": reason,
            "step": step,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        _write_despite_full_disk(self.path / "status.json", json.dumps(record, indent=1) + "\n")
        if status != "running":
            try:
                append_event(self.events, "stop", step=step, status=status, reason=reason)
            except OSError as error:  # the status counts, and it is written
                logger.warning(f"The end of the run has no event: {explain_os_error(error)}")


def _write_despite_full_disk(path: Path, text: str) -> None:
    """Write a small file as a whole; on a full disk, overwrite the existing file in place.

    Raises:
        OSError: It cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        # The block with the previous content can still be overwritten.
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
            sync(file)


def _remove_lock(lock_path: Path, created_paths: list[Path]) -> None:
    """Remove the file of a lock and the folders that were made for it, unless others use them."""
    with contextlib.suppress(OSError):
        for path in created_paths:
            if path == lock_path:
                path.unlink()
            else:
                path.rmdir()


def find_surrounding_run(path: Path) -> Path | None:
    """Return the run with checkpoints or logs in the folder of a path, or None."""
    real_path = Path(os.path.realpath(path))
    for folder in (real_path, *real_path.parents):
        if folder.name in _FILE_PATTERNS_BY_FOLDER and RunFolder(folder.parent)._holds_run():
            return folder.parent
    return None


def _find_links(folder: Path) -> list[Path]:
    """Return the symbolic links in a folder, at any depth; none if it is a file."""
    links = []
    for parent, folders, files in os.walk(folder):
        entries = [Path(parent, name) for name in (*folders, *files)]
        links += [entry for entry in entries if entry.is_symlink()]
    return links


def _path_spellings(*paths: Path) -> set[Path]:
    """Return the absolute paths, with links in their folders resolved, and fully resolved."""
    spellings = set()
    for path in paths:
        # Unlike Path.resolve, realpath accepts links that point to themselves.
        parent, target = os.path.realpath(path.parent), os.path.realpath(path)
        spellings |= {Path(os.path.abspath(path)), Path(parent, path.name), Path(target)}
    return spellings


def describe_changes(
    saved_options: dict[str, object], current_options: dict[str, object]
) -> list[str]:
    """Return a clause for each option that both have and that differs."""
    return [
        f"{name} was {saved_options[name]!r} and is {value!r}"
        for name, value in current_options.items()
        if name in saved_options and saved_options[name] != value
    ]


def check_options_unchanged(
    saved_options: dict[str, object],
    current_options: dict[str, object],
    *,
    allowed_names: tuple[str, ...],
    branch_from: Path | None = None,
) -> None:
    """Refuse to resume a run, or to branch from it, if a fixed option has changed.

    Args:
        saved_options: The fixed options of the checkpoint.
        current_options: The fixed options of this start.
        allowed_names: Options that may differ nevertheless.
        branch_from: The parent's checkpoint, if the start begins a branch.

    Raises:
        CheckpointError: An option differs; the message lists all of them.
    """
    checked_options = {
        name: value for name, value in current_options.items() if name not in allowed_names
    }
    changes = describe_changes(saved_options, checked_options)
    if changes and branch_from is not None:
        raise CheckpointError(
            f"A branch of {branch_from} cannot change these settings: {'; '.join(changes)}. Leave "
            "them out, or allow a change with --change_on_resume NAME."
        )
    if changes:
        raise CheckpointError(
            f"The run cannot be resumed with other settings: {'; '.join(changes)}. Use the old "
            "values, allow a change with --change_on_resume NAME, or start another run in another "
            "--output_dir."
        )
