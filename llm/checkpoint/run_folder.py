"""The folder of a run: whose it is, what state the run is in, how to repeat it."""

import contextlib
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Literal

from llm.config.options import is_too_long
from llm.errors import CheckpointError, ConfigError, DataError
from llm.runtime.events import append_event
from llm.runtime.files import try_lock, write_whole

Status = Literal["running", "finished", "preempted", "failed"]

_FILES = (
    "config.toml",
    "status.json",
    "log.txt",
    "metrics.jsonl",
    "events.jsonl",
    "all_results.json",
)
_FOLDERS = {
    "checkpoints": r"step_\d+(\.replaced|\.superseded)?|\.step_.*\.tmp|best|\.best\.link",
    "tensorboard": r"events\.out\.tfevents\..*",
    "stacks": r"rank_\d+\.txt",
    "profile": r"rank\d+\.trace\.json\.gz|profile\.txt",
}
"""What a run writes to each of its folders."""
MODEL_FILES = (
    r"README\.md|(generation_)?config\.json|model(-\d+-of-\d+)?\.safetensors"
    r"|model\.safetensors\.index\.json|tokenizer(_config)?\.json|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tekken\.json|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model"
    r"|chat_template\.(jinja|json)|(configuration|modeling|tokenization)_\w+\.py"
)
"""What an exported model and its tokenizer consist of."""
_LEFTOVERS = rf"\.({'|'.join(_FILES)}|README\.md)\.\d+\.tmp"


class RunFolder:
    """The folder that a run writes to.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.stacks = path / "stacks"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.log = path / "log.txt"

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that is taken or cannot be written to; writes nothing.

        Args:
            resume: Go on with the run that it holds.
            overwrite: Remove the run that it holds.

        Raises:
            ConfigError: The folder holds another run, or files of no run that this one would
                replace; it is read-only, or its path is a file.
        """
        if is_too_long(str(self.path)):  # the default one: others were looked at before
            raise ConfigError(f"The folder {self.path} has too long a name; give an --output_dir.")
        # Unlike Path.exists, os.path's take a folder that may not be entered.
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"--output_dir {self.path} is a file; name a folder.")
        parents = (self.path, *self.path.absolute().parents)
        there = next(path for path in parents if os.path.exists(path))
        if not os.access(there, os.W_OK):
            raise ConfigError(f"--output_dir {self.path}: {there} is not writable for you.")
        try:
            trained, exported = self._of_training(), self._of_model()
        except OSError as error:
            raise ConfigError(
                f"--output_dir {self.path}: {error.filename} cannot be read ({error.strerror})."
            ) from error
        is_run = "pid" in self._status() or any(self.checkpoints.glob("step_*/manifest.json"))
        if trained + exported and not is_run:
            names = [str(path.relative_to(self.path)) for path in trained + exported]
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ConfigError(
                f"--output_dir {self.path} holds no run, but files that this one would replace "
                f"({', '.join(names[:8])}{more}); move them away, or name another folder."
            )
        if trained and not (resume or overwrite):
            names = list(dict.fromkeys(path.relative_to(self.path).parts[0] for path in trained))
            raise ConfigError(
                f"--output_dir {self.path} holds a run already ({', '.join(names)}): go on with "
                "it by --resume_from_checkpoint, remove it by --overwrite_output_dir, or name "
                "another folder."
            )
        folders = {path.parent for path in trained if path.parent != self.path}
        links = sorted(folder for folder in folders if folder.is_symlink())
        if overwrite and links:
            raise ConfigError(
                f"{links[0]} is a link, and --overwrite_output_dir removes nothing through a link: "
                "remove it or what it leads to, or name another --output_dir."
            )

    def _own_files(self) -> tuple[list[Path], list[Path]]:
        """`_of_training` and `_of_model`; a ConfigError where a folder cannot be read."""
        try:
            return self._of_training(), self._of_model()
        except OSError as error:
            raise ConfigError(
                f"--output_dir {self.path}: {error.filename} cannot be read ({error.strerror})."
            ) from error

    def _of_training(self) -> list[Path]:
        """What there is of what a run writes before it exports its model."""
        found = [self.path / name for name in _FILES]
        for name, written in _FOLDERS.items():
            folder = self.path / name
            if folder.is_dir():
                found += [p for p in sorted(folder.iterdir()) if re.fullmatch(written, p.name)]
            else:
                found.append(folder)
        return [path for path in found if os.path.lexists(path)]

    def _of_model(self) -> list[Path]:
        """What there is of what the export of a model replaces."""
        there = sorted(self.path.iterdir()) if self.path.is_dir() else []
        return [path for path in there if re.fullmatch(MODEL_FILES, path.name)]

    def endangers(self, source: Path) -> bool:
        """Whether a run that starts anew in this folder may remove or replace an input.

        Args:
            source: A file or folder; it, and what lies in it, may be a link.

        Raises:
            ConfigError: This folder cannot be read.
        """
        folders = map(self.path.joinpath, _FOLDERS)
        trained, exported = self._own_files()
        own = _places(*folders, *trained, *exported)
        read = _places(source, *_links(source))
        inside = any(place in own or not own.isdisjoint(place.parents) for place in read)
        return inside or os.path.realpath(source) == os.path.realpath(self.path)

    def check_unfinished(self) -> None:
        """Refuse to start afresh over a run that has ended, in the name of resuming it.

        Raises:
            ConfigError: The run is finished, and left no checkpoint to go on from.
        """
        if self._status().get("status") == "finished":
            raise ConfigError(
                f"--resume_from_checkpoint: {self.path} holds a finished run without checkpoints, "
                "so there is nothing to go on from; remove it by --overwrite_output_dir, or name "
                "another folder."
            )

    def _status(self) -> dict[str, object]:
        """What `status.json` says; empty where there is none."""
        try:
            status = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends, however it ends.

        Raises:
            ConfigError: Another process writes to it, such as the same job started twice.
            DataError: It cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a+", encoding="utf-8")  # may be another's
            try_lock(self._lock.fileno())
            self._lock.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
            self._lock.flush()
        except BlockingIOError as error:
            self._lock.seek(0)
            owner = self._lock.read() or "another process"
            raise ConfigError(
                f"--output_dir {self.path} is in use by {owner}; wait for it, end it, or name "
                "another folder."
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"--output_dir {self.path} cannot be written to: {error.strerror}.")

    def open(self, *, overwrite: bool, config: str) -> None:
        """Clear the folder of a former run, say that this one runs, and note the configuration.

        Raises:
            DataError: It cannot be written to.
        """
        try:
            if overwrite:
                # The status shows whose folder it is, even if this is killed half-way.
                for path in self._of_training():
                    if path.name != "status.json":
                        _remove(path)
                for name in _FOLDERS:
                    with contextlib.suppress(OSError):  # absent, or the user's files are in it
                        (self.path / name).rmdir()
            for leftover in self.path.glob(".*.tmp"):  # of a start that was killed
                if re.fullmatch(_LEFTOVERS, leftover.name):
                    leftover.unlink()
            self.say("running")
            write_whole(self.path / "config.toml", config)
        except OSError as error:
            raise self._unwritable(error) from error

    def say(self, status: Status, *, reason: str | None = None, step: int | None = None) -> None:
        """Write `status.json`, since launchers hide the exit codes; an end is an event too."""
        content = {
            "status": status,
            "reason": reason,
            "step": step,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_whole(self.path / "status.json", json.dumps(content, indent=1) + "\n")
        if status != "running":
            append_event(self.events, "stop", step=step, status=status, reason=reason)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _places(*paths: Path) -> set[Path]:
    """Where paths lie: as they are written, and with links followed, but for the last or all."""
    found = set()
    for path in paths:
        # Unlike Path.resolve, realpath takes links that lead to themselves.
        parent, followed = os.path.realpath(path.parent), os.path.realpath(path)
        found |= {Path(os.path.abspath(path)), Path(parent, path.name), Path(followed)}
    return found


def _links(folder: Path) -> list[Path]:
    """The links in a folder and the folders below it."""
    return [
        path
        for parent, folders, files in os.walk(folder)
        for path in (Path(parent, name) for name in (*folders, *files))
        if path.is_symlink()
    ]


def differences(saved: dict[str, object], current: dict[str, object]) -> list[str]:
    """Old and new value of each option that both have and that differs."""
    return [
        f"{name} was {saved[name]!r} and is {value!r}"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]


def check_unchanged(
    saved: dict[str, object], current: dict[str, object], *, allowed: tuple[str, ...]
) -> None:
    """Refuse to resume when a fixed option has changed.

    Args:
        saved: The fixed options of the checkpoint.
        current: The fixed options of this start.
        allowed: Options that may differ all the same.

    Raises:
        CheckpointError: Lists all the differences in one message.
    """
    changed = differences(saved, {n: v for n, v in current.items() if n not in allowed})
    if changed:
        raise CheckpointError(
            f"The run cannot be resumed with other settings: {'; '.join(changed)}. Give them their "
            "old values, allow a change with --change_on_resume NAME, or start another run in "
            "another --output_dir."
        )
