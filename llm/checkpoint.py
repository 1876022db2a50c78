"""Checkpoints that are whole or do not exist.

A checkpoint is written beside its final place, each file synced, a manifest with
sizes and checksums last; then it is renamed, and the folder synced. What has no
valid manifest does not count. Tensors go through `torch.distributed.checkpoint`,
so they know no rank layout; everything else is JSON.
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from llm.errors import CheckpointError

logger = logging.getLogger("llm")

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PLAIN = "state.json"


class Stateful(Protocol):
    """Anything that can say and take back its state."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint with a readable manifest.

    Attributes:
        path: Its folder.
        step: Optimizer steps done when it was saved.
        facts: What was said about it: validation loss, configuration, batch.
        files: Size in bytes and SHA-256 of each file.
    """

    path: Path
    step: int
    facts: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def problem(self, *, read: bool = False) -> str | None:
        """Why the checkpoint is not valid, or None.

        Args:
            read: Compare the checksums too, not only names and sizes.
        """
        for name, (size, digest) in self.files.items():
            path = self.path / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if read and _sha256(path) != digest:
                return f"{name} does not match its checksum"
        return None


def save(
    folder: Path,
    *,
    step: int,
    parts: Mapping[str, Stateful],
    facts: Mapping[str, Any],
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
) -> Path:
    """Write a checkpoint; every rank calls it.

    Args:
        folder: The run's `checkpoints` folder.
        step: Optimizer steps done.
        parts: What to save, by name.
        facts: Plain values to keep in the manifest.
        rank: Rank of this process.
        world_size: Number of processes.
        barrier: Waits for all ranks.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It could not be written; what was there before is untouched.
    """
    final = folder / f"step_{step:08d}"
    temporary = folder / f".step_{step:08d}.tmp"
    try:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob(".*.tmp"):
                shutil.rmtree(stale)
            temporary.mkdir()
        barrier()
        tensors, plain = _split({name: part.state_dict() for name, part in parts.items()})
        _write_tensors(temporary, tensors, world_size=world_size)
        files = _describe_files(temporary, rank=rank, world_size=world_size)
        if rank == 0:
            _write_synced(temporary / PLAIN, json.dumps(plain))
            files[PLAIN] = _describe(temporary / PLAIN)
            manifest = {"format": FORMAT_VERSION, "step": step, "facts": facts, "files": files}
            _write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1))
            _put_in_place(temporary, final)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {folder}: {error.strerror}. "
            "Earlier checkpoints are untouched."
        ) from error
    barrier()
    return final


def _write_tensors(folder: Path, tensors: dict[str, Any], *, world_size: int) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(tensors, storage_writer=writer, no_dist=world_size == 1)


def _describe_files(folder: Path, *, rank: int, world_size: int) -> dict[str, Any]:
    """Size and checksum of every file; each rank reads those it wrote."""
    own = {path.name: _describe(path) for path in folder.glob(f"__{rank}_*")}
    if rank == 0:
        own[".metadata"] = _describe(folder / ".metadata")
    if world_size == 1:
        return own
    gathered: list[dict[str, Any]] = [{} for _ in range(world_size)]
    torch.distributed.all_gather_object(gathered, own)
    return {name: entry for files in gathered for name, entry in files.items()}


def _put_in_place(temporary: Path, final: Path) -> None:
    sync_folder(temporary)
    if final.exists():
        # The same step was saved by an earlier start of this run, and was passed over on resume.
        replaced = final.with_name(f".{final.name}.replaced.tmp")
        final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced)
    else:
        temporary.rename(final)
    sync_folder(final.parent)


def found(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a run's `checkpoints` folder that are whole, oldest first.

    A folder without a manifest, or whose files have other sizes, does not count.
    """
    checkpoints = []
    for path in sorted(folder.glob("step_*")):
        try:
            checkpoint = read_manifest(path)
        except CheckpointError:
            continue
        if checkpoint.problem() is None:
            checkpoints.append(checkpoint)
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def newest_valid(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as it was written; None if there is none.

    A damaged one is passed over with a line in the log.
    """
    for path in sorted(folder.glob("step_*"), reverse=True):
        try:
            return read_valid(path)
        except CheckpointError as error:
            logger.info(f"A checkpoint is passed over. {error}")
    return None


def read_valid(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and compare every byte with it.

    Raises:
        CheckpointError: There is no manifest, or a file is missing or damaged.
    """
    checkpoint = read_manifest(path)
    problem = checkpoint.problem(read=True)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}.")
    return checkpoint


def read_manifest(path: Path) -> Checkpoint:
    """Read what a checkpoint says about itself.

    Raises:
        CheckpointError: There is no manifest, or it is damaged or of another format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest['format']}; this version reads "
                f"{FORMAT_VERSION}."
            )
        files = {name: (size, digest) for name, (size, digest) in manifest["files"].items()}
        return Checkpoint(path=path, step=manifest["step"], facts=manifest["facts"], files=files)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}.") from error


def load(checkpoint: Checkpoint, parts: Mapping[str, Stateful]) -> None:
    """Bring every part to the state that it had when the checkpoint was saved.

    Raises:
        CheckpointError: The checkpoint holds other parts or tensors of other shapes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    plain = json.loads((checkpoint.path / PLAIN).read_text(encoding="utf-8"))
    missing = parts.keys() - plain.keys()
    if missing:
        raise CheckpointError(f"{checkpoint.path} holds no {', '.join(sorted(missing))}.")
    # Read straight into the live tensors: no second copy of the model is made.
    tensors, _ = _split({name: part.state_dict() for name, part in parts.items()})
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    reader = FileSystemReader(checkpoint.path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=not distributed)
    except (CheckpointException, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model or optimizer: {reason}"
        ) from error
    for name, part in parts.items():
        part.load_state_dict(_merge(plain[name], tensors, prefix=name))


def prune(folder: Path, *, keep_newest: int | None, keep_best: int) -> None:
    """Remove old checkpoints, and let the link `best` point to the best one that is left.

    Kept are the `keep_newest` newest (None: all) and the `keep_best` of the lowest
    validation loss. The newest is never removed.
    """
    checkpoints = found(folder)
    rated = sorted(
        (c for c in checkpoints if c.facts.get("eval_loss") is not None),
        key=lambda checkpoint: (float(checkpoint.facts["eval_loss"]), checkpoint.step),
    )
    best = rated[:keep_best]
    # Asked for the best ones only, nothing but the newest is kept besides them.
    newest = keep_newest if keep_newest is not None else (1 if keep_best else len(checkpoints))
    kept = {c.path for c in best} | {c.path for c in checkpoints[-max(1, newest) :]}
    if best:
        _point(folder / "best", best[0].path.name)
    for checkpoint in checkpoints:
        if checkpoint.path not in kept:
            # Renamed first, so that a kill in between leaves nothing that looks whole.
            doomed = checkpoint.path.with_name(f".{checkpoint.path.name}.pruned.tmp")
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed)


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    sync_folder(link.parent)


def _split(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a nested dict apart: tensors by their path, and the plain rest."""
    tensors: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, Mapping):
            inner, plain[key] = _split(value)
            tensors.update({f"{key}/{path}": tensor for path, tensor in inner.items()})
        else:
            plain[key] = value
    return tensors, plain


def _merge(plain: dict[str, Any], tensors: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
    """Undo `_split` for the tensors whose path starts with the prefix."""
    tree = plain
    for path, tensor in tensors.items():
        first, *keys = path.split("/")
        if first != prefix:
            continue
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = tensor
    return tree


def _describe(path: Path) -> tuple[int, str]:
    return path.stat().st_size, _sha256(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
