"""What happens to whole checkpoints in a run's `checkpoints` folder: put in place, kept, removed.

All of it is done by renames, so that a kill at any moment leaves a checkpoint whole or out of
sight. Only rank 0 acts here.
"""

import logging
import math
import os
import shutil
from pathlib import Path

from llm.checkpoint.format import REPLACED, Checkpoint, checkpoint_folders, step_of
from llm.checkpoint.load import list_checkpoints
from llm.runtime.files import checksum, sync_folder

BEST = "best"
"""The link to the checkpoint of the lowest validation loss."""

logger = logging.getLogger("llm")


def commit_checkpoint(temporary: Path, final: Path) -> None:
    """Give a checkpoint, whose files are all on the disk, its name."""
    sync_folder(temporary)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        # An earlier start of this run saved the same step: the old checkpoint stays valid until
        # the new one has been renamed.
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)
    if replaced.exists():
        remove(replaced)


def leftovers(folder: Path) -> list[Path]:
    """What saves and removals are writing or have left behind; other names are the user's."""
    return sorted(folder.glob(".step_*.tmp"))


def clear_leftovers(folder: Path) -> None:
    """Remove what a save or a removal has left behind that did not come to its end."""
    for leftover in leftovers(folder):
        shutil.rmtree(leftover)
    for replaced in folder.glob(f"step_*{REPLACED}"):
        if replaced.with_suffix("").exists():
            remove(replaced)


def prune(folder: Path, *, saved: int, keep_newest: int | None, keep_best: int) -> None:
    """Remove old checkpoints, and let the link `best` point to the best one that is left.

    Args:
        folder: The run's `checkpoints` folder.
        saved: Step of the checkpoint that was just written, which is never removed. Later ones
            were passed over when training went on from an earlier one: they are left alone.
        keep_newest: How many of the newest to keep; None keeps all, unless `keep_best` is given.
        keep_best: How many of the lowest validation loss to keep besides.
    """
    checkpoints = [
        checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.step <= saved
    ]
    best = sorted((c for c in checkpoints if math.isfinite(_loss(c))), key=_loss)[:keep_best]
    # Asked for the best ones only, nothing but the newest is kept besides them.
    newest = keep_newest if keep_newest is not None else (1 if keep_best else len(checkpoints))
    kept = {c.path for c in best} | {c.path for c in checkpoints[-max(1, newest) :]}
    if best:
        _point(folder / BEST, best[0].path.name)
    for checkpoint in checkpoints:
        if checkpoint.path not in kept:
            remove(checkpoint.path)


def mark_superseded(folder: Path, *, after: int) -> None:
    """Rename the checkpoints of a branch that was left, so that no resume takes them for newest.

    Args:
        folder: The run's `checkpoints` folder.
        after: Step from which training went on; what is later is of that branch.
    """
    for path in checkpoint_folders(folder):
        if (step_of(path) or 0) > after:
            aside = path.with_name(f"{path.name}.superseded")
            if aside.exists():
                remove(aside)
            path.rename(aside)
            logger.info(f"{path.name} is of a branch that was left: it is {aside.name} now.")


def _loss(checkpoint: Checkpoint) -> float:
    loss = checkpoint.metadata.get("eval_loss")
    return math.nan if loss is None else float(loss)


def remove(path: Path) -> None:
    """Remove a checkpoint; a kill in between leaves nothing that looks like one."""
    doomed = path.with_name(f".{path.name}.removed.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    sync_folder(link.parent)


def sync_file(path: Path) -> tuple[int, str]:
    """Size and checksum of a file, once it is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, checksum(path)
