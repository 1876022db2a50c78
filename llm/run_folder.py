"""The folder of a run: whose it is, what state the run is in, how to repeat it."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Literal

from llm.errors import CheckpointError, ConfigError, DataError
from llm.events import append_event
from llm.files import try_lock, write_whole

Status = Literal["running", "finished", "preempted", "failed"]

RUN_FILES = (
    "config.toml",
    "status.json",
    "log.txt",
    "metrics.jsonl",
    "events.jsonl",
    "all_results.json",
    "tensorboard",
    "profile",
    "checkpoints",
)


class RunFolder:
    """The folder that a run writes to.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.log = path / "log.txt"

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that holds another run or cannot be written to; writes nothing.

        Raises:
            ConfigError: The folder is taken, read-only, or its path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--output_dir {self.path} is a file; name a folder.")
        there = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not os.access(there, os.W_OK):
            raise ConfigError(f"--output_dir {self.path}: {there} is not writable for you.")
        taken = [name for name in RUN_FILES if (self.path / name).exists()]
        if taken and not (resume or overwrite):
            raise ConfigError(
                f"--output_dir {self.path} holds a run already ({', '.join(taken)}): go on with "
                "it by --resume_from_checkpoint, remove it by --overwrite_output_dir, or name "
                "another folder."
            )

    def check_unfinished(self) -> None:
        """Refuse to start afresh over a run that has ended, in the name of resuming it.

        Raises:
            ConfigError: The run is finished, and left no checkpoint to go on from.
        """
        try:
            status = json.loads((self.path / "status.json").read_text(encoding="utf-8"))["status"]
        except (OSError, ValueError, KeyError):
            return
        if status == "finished":
            raise ConfigError(
                f"--resume_from_checkpoint: {self.path} holds a finished run without checkpoints, "
                "so there is nothing to go on from; remove it by --overwrite_output_dir, or name "
                "another folder."
            )

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends, however it ends.

        Raises:
            ConfigError: Another process writes to it, such as the same job started twice.
            DataError: It cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            try_lock(self._lock.fileno())
        except BlockingIOError as error:
            raise ConfigError(
                f"--output_dir {self.path} is in use by another process; wait for it, or name "
                "another folder."
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"--output_dir {self.path} cannot be written to: {error.strerror}.")

    def open(self, *, overwrite: bool, config: str) -> None:
        """Clear the folder of a former run, and note the configuration.

        Raises:
            DataError: It cannot be written to.
        """
        try:
            if overwrite:
                for name in RUN_FILES:
                    item = self.path / name
                    if item.is_dir() and not item.is_symlink():
                        shutil.rmtree(item)
                    else:
                        item.unlink(missing_ok=True)
            for leftover in self.path.glob(".*.tmp"):  # of a start that was killed
                leftover.unlink()
            write_whole(self.path / "config.toml", config)
        except OSError as error:
            raise self._unwritable(error) from error

    def say(self, status: Status, *, reason: str | None = None, step: int | None = None) -> None:
        """Write `status.json`, since launchers hide the exit codes; an end is an event too."""
        facts = {
            "status": status,
            "reason": reason,
            "step": step,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_whole(self.path / "status.json", json.dumps(facts, indent=1) + "\n")
        if status != "running":
            append_event(self.events, "stop", step=step, status=status, reason=reason)

    def cut_metrics(self, *, step: int) -> None:
        """Drop the metrics after a step, before training goes on from there.

        A line that was cut short by a kill is dropped as well.
        """
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                break
        write_whole(self.metrics, "".join(kept))


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
    changed = [
        f"{name} was {saved[name]!r} and is {value!r}"
        for name, value in current.items()
        if name in saved and saved[name] != value and name not in allowed
    ]
    if changed:
        raise CheckpointError(
            f"The run cannot be resumed with other settings: {'; '.join(changed)}. Give them their "
            "old values, allow a change with --change_on_resume NAME, or start another run in "
            "another --output_dir."
        )
