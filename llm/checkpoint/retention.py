"""Commits, keeps and removes complete checkpoints in a run's `checkpoints` folder.

All of it is done by renames, so that a kill at any moment leaves a checkpoint either complete or
under a name that does not count. Only rank 0 acts here.
"""

import logging
import math
import shutil
from pathlib import Path

from llm.checkpoint.format import REPLACED, Checkpoint, checkpoint_folders, step_of
from llm.checkpoint.load import list_checkpoints
from llm.runtime.files import sync_folder

BEST = "best"
"""The link to the checkpoint of the lowest validation loss."""

logger = logging.getLogger("llm")


def commit_checkpoint(temporary: Path, final: Path) -> None:
    """Rename a checkpoint to its final name, once all its files are on the disk."""
    # The names of its files must be on the disk before the checkpoint has a name that counts.
    sync_folder(temporary)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        # An earlier start of this run saved the same step. The old checkpoint stays valid until the
        # new one has been renamed.
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)  # the rename itself, before an older checkpoint is removed
    if replaced.exists():
        remove(replaced)


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders of saves and removals, under way or killed."""
    return sorted(folder.glob(".step_*.tmp"))


def clear_leftovers(folder: Path) -> None:
    """Remove what saves and removals that were killed have left behind."""
    for leftover in leftovers(folder):
        _delete(leftover)
    for replaced in folder.glob(f"step_*{REPLACED}"):
        if replaced.with_suffix("").exists():
            remove(replaced)


def prune(folder: Path, *, saved: int, keep_newest: int | None, keep_best: int) -> None:
    """Remove old checkpoints, and point the link `best` to the best one that is left.

    Args:
        folder: The run's `checkpoints` folder.
        saved: Step of the checkpoint that was just written, which is never removed. Later ones
            are of a branch that a resume from an earlier checkpoint has left; they are kept.
        keep_newest: Number of the newest to keep; None keeps all, unless `keep_best` is given.
        keep_best: Number of those with the lowest validation loss to keep as well.
    """
    checkpoints = [c for c in list_checkpoints(folder) if c.step <= saved]
    best = sorted((c for c in checkpoints if math.isfinite(_loss(c))), key=_loss)[:keep_best]
    # With `keep_best` alone, the newest is kept as well, for a resume.
    newest = keep_newest if keep_newest is not None else (1 if keep_best else len(checkpoints))
    kept = {c.path for c in best} | {c.path for c in checkpoints[-max(1, newest) :]}
    if best:
        # A new link replaces the old one by a rename, so that there always is one.
        temporary = folder / f".{BEST}.link"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(best[0].path.name)
        temporary.replace(folder / BEST)
        sync_folder(folder)
        if best[0].step == saved:
            logger.info(
                f"new best checkpoint: {best[0].path}, validation loss {_loss(best[0]):.4f}"
            )
    for checkpoint in checkpoints:
        if checkpoint.path not in kept:
            remove(checkpoint.path)


def mark_superseded(folder: Path, *, after: int) -> None:
    """Rename the checkpoints of a branch that was left, so that no resume chooses them.

    Args:
        folder: The run's `checkpoints` folder.
        after: Step that training was resumed from; later checkpoints belong to that branch.
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
    """Remove a checkpoint; a kill in between leaves no folder that counts as one."""
    doomed = path.with_name(f".{path.name}.removed.tmp")
    path.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:  # not from here, but under the name of a checkpoint
        path.unlink()
