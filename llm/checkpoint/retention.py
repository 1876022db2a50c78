"""Commits, keeps and removes complete checkpoints in a run's `checkpoints` folder.

Everything is done by renames: after a kill at any moment, a checkpoint is either complete or has a
name that does not count. Only rank 0 uses this module.
"""

import logging
import math
from pathlib import Path

from llm.checkpoint.format import REPLACED, Checkpoint, checkpoint_folders, step_of
from llm.checkpoint.load import list_checkpoints
from llm.runtime.files import delete, sync_folder

BEST = "best"
"""The link to the checkpoint with the lowest validation loss."""

logger = logging.getLogger("llm")


def commit_checkpoint(temporary: Path, final: Path) -> None:
    """Rename a checkpoint to its final name, once all its files are on the disk."""
    # Its file names must be on the disk before the checkpoint gets a name that counts.
    sync_folder(temporary)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        # An earlier start of this run saved the same step. The old checkpoint stays valid until the
        # new one is renamed.
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)  # sync the rename before an older checkpoint is removed
    if replaced.exists():
        remove(replaced)


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders of running or killed saves and removals."""
    return sorted(folder.glob(".step_*.tmp"))


def clear_leftovers(folder: Path) -> None:
    """Remove the remains of killed saves and removals."""
    for leftover in leftovers(folder):
        _try_delete(leftover)
    for replaced in folder.glob(f"step_*{REPLACED}"):
        if replaced.with_suffix("").exists():
            remove(replaced)


def prune(folder: Path, *, saved: int, keep_newest: int | None, keep_best: int) -> None:
    """Remove old checkpoints, and point the link `best` to the best remaining one.

    If the file system refuses it, this is logged; the next save tries again.

    Args:
        folder: The run's `checkpoints` folder.
        saved: Step of the checkpoint that was just written or resumed from; it is never removed.
            Later ones, left over if the run resumed from an earlier checkpoint, are kept too.
        keep_newest: Number of newest checkpoints to keep; None keeps all, unless `keep_best` is
            set.
        keep_best: Number of checkpoints with the lowest validation loss to keep as well.
    """
    checkpoints = [c for c in list_checkpoints(folder) if c.step <= saved]
    best = sorted((c for c in checkpoints if math.isfinite(_eval_loss(c))), key=_eval_loss)[
        :keep_best
    ]
    # With `keep_best` alone, the newest is also kept, to resume from.
    newest = keep_newest if keep_newest is not None else (1 if keep_best else len(checkpoints))
    retained = {c.path for c in best} | {c.path for c in checkpoints[-max(1, newest) :]}
    try:
        if best:
            _link_best(folder, best[0], saved=saved)
        for checkpoint in checkpoints:
            if checkpoint.path not in retained:
                remove(checkpoint.path)
    except OSError as error:
        logger.warning(f"Old checkpoints in {folder} could not be removed: {error.strerror}.")


def _link_best(folder: Path, best: Checkpoint, *, saved: int) -> None:
    link = folder / BEST
    if link.is_symlink() and link.readlink() == Path(best.path.name):
        return
    # The new link replaces the old one by a rename, so a link always exists.
    temporary = folder / f".{BEST}.link"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(best.path.name)
    temporary.replace(link)
    sync_folder(folder)
    if best.step == saved:
        logger.info(f"new best checkpoint: {best.path}, validation loss {_eval_loss(best):.4f}")


def mark_superseded(folder: Path, *, step: int) -> None:
    """Rename abandoned checkpoints so that no resume chooses them.

    Args:
        folder: The run's `checkpoints` folder.
        step: Step that training resumed from; later checkpoints are abandoned.
    """
    for path in checkpoint_folders(folder):
        if (step_of(path) or 0) > step:
            aside = path.with_name(f"{path.name}.superseded")
            if aside.exists():
                remove(aside)
            path.rename(aside)
            logger.info(
                f"{path.name} is later than the checkpoint resumed from: renamed to {aside.name}."
            )


def _eval_loss(checkpoint: Checkpoint) -> float:
    loss = checkpoint.metadata.get("eval_loss")
    return math.nan if loss is None else float(loss)


def remove(path: Path) -> None:
    """Remove a checkpoint; after a kill in between, no remaining folder counts as one."""
    doomed = path.with_name(f".{path.name}.removed.tmp")
    path.rename(doomed)
    _try_delete(doomed)


def _try_delete(path: Path) -> None:
    """Delete what does not count as a checkpoint; if that fails, the next save tries again."""
    try:
        delete(path)  # perhaps a file or a link that is named like a checkpoint
    except OSError as error:  # NFS keeps a file that a reader has open, and so its folder
        logger.warning(
            f"{path} could not be removed ({error.strerror}); the next save tries again."
        )
