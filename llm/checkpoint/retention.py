"""Commits, keeps and removes complete checkpoints in a run's `checkpoints` folder.

Everything is done by renames: after a kill at any moment, a checkpoint is either complete or has a
name that does not count. Only rank 0 uses this module.
"""

import logging
import math
from pathlib import Path

from llm.checkpoint.format import (
    REPLACED_SUFFIX,
    SUPERSEDED_SUFFIX,
    Checkpoint,
    checkpoint_step,
    list_checkpoint_folders,
)
from llm.checkpoint.load import list_checkpoints
from llm.checkpoint.options import CheckpointOptions
from llm.runtime.files import delete, sync_folder

BEST_LINK = "best"
"""The link to the checkpoint with the lowest validation loss."""

logger = logging.getLogger("llm")


def commit_checkpoint(temporary_path: Path, final_path: Path) -> None:
    """Rename a checkpoint to its final name, once all its files are on the disk."""
    # Its file names must be on the disk before the checkpoint gets a name that counts.
    sync_folder(temporary_path)
    replaced_path = final_path.with_name(final_path.name + REPLACED_SUFFIX)
    if final_path.exists():
        # An earlier start of this run saved the same step. The old checkpoint stays valid until the
        # new one is renamed.
        final_path.rename(replaced_path)
    temporary_path.rename(final_path)
    sync_folder(final_path.parent)  # sync the rename before an older checkpoint is removed
    if replaced_path.exists():
        remove_checkpoint(replaced_path)


def list_leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders of running or killed saves and removals."""
    return sorted(folder.glob(".step_*.tmp"))


def clear_leftovers(folder: Path) -> None:
    """Remove the remains of killed saves and removals."""
    for leftover in list_leftovers(folder):
        _try_delete(leftover)
    for replaced_path in folder.glob(f"step_*{REPLACED_SUFFIX}"):
        if replaced_path.with_suffix("").exists():
            remove_checkpoint(replaced_path)


def is_permanent(checkpoint: Checkpoint, *, keep_every: int | None) -> bool:
    """Return whether retention never removes a checkpoint.

    Args:
        checkpoint: The checkpoint.
        keep_every: The option of the present start. A checkpoint also stays permanent by the option
            of the start that saved it.
    """
    intervals = (keep_every, checkpoint.metadata.get("keep_every"))
    return any(interval and checkpoint.step % interval == 0 for interval in intervals)


def prune_checkpoints(folder: Path, options: CheckpointOptions, *, saved_step: int) -> None:
    """Remove old checkpoints, and point the link `best` to the best remaining one.

    If the file system refuses it, this is logged; the next save tries again.

    Args:
        folder: The run's `checkpoints` folder.
        options: Which checkpoints to keep. `save_top_k` without `keep_checkpoints` keeps the newest
            one, too, to resume from.
        saved_step: Step of the checkpoint that was just written or resumed from; it is never
            removed. Checkpoints of later steps, which exist if the run resumed from an earlier one,
            are kept, too.
    """
    checkpoints = [
        checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.step <= saved_step
    ]
    best_checkpoints = _select_best(checkpoints, options)
    newest_checkpoints = _select_newest(checkpoints, options)
    retained_paths = {checkpoint.path for checkpoint in (*best_checkpoints, *newest_checkpoints)}
    try:
        if best_checkpoints:
            _update_best_link(folder, best_checkpoints[0], saved_step=saved_step)
        for checkpoint in checkpoints:
            if checkpoint.path not in retained_paths and not is_permanent(
                checkpoint, keep_every=options.keep_every
            ):
                remove_checkpoint(checkpoint.path)
    except OSError as error:
        logger.warning(f"Old checkpoints in {folder} could not be removed: {error.strerror}.")


def _select_best(checkpoints: list[Checkpoint], options: CheckpointOptions) -> list[Checkpoint]:
    """Return the `save_top_k` checkpoints with the lowest validation losses, the best first."""
    finite_checkpoints = [
        checkpoint for checkpoint in checkpoints if math.isfinite(_eval_loss(checkpoint))
    ]
    return sorted(finite_checkpoints, key=_eval_loss)[: options.save_top_k]


def _select_newest(checkpoints: list[Checkpoint], options: CheckpointOptions) -> list[Checkpoint]:
    """Return the newest checkpoints that the options retain, at least one if there are any."""
    num_newest = options.keep_checkpoints
    if num_newest is None:
        num_newest = 1 if options.save_top_k else len(checkpoints)
    return checkpoints[-max(1, num_newest) :]


def _update_best_link(folder: Path, best: Checkpoint, *, saved_step: int) -> None:
    """Point the link `best` to a checkpoint; log it if the checkpoint was just saved."""
    link = folder / BEST_LINK
    if link.is_symlink() and link.readlink() == Path(best.path.name):
        return
    # The new link replaces the old one by a rename, so a link always exists.
    temporary_path = folder / f".{BEST_LINK}.link"
    temporary_path.unlink(missing_ok=True)
    temporary_path.symlink_to(best.path.name)
    temporary_path.replace(link)
    sync_folder(folder)
    if best.step == saved_step:
        logger.info(f"new best checkpoint: {best.path}, validation loss {_eval_loss(best):.4f}")


def mark_superseded(folder: Path, *, step: int) -> None:
    """Rename the checkpoints of later steps, so that no resume chooses them.

    Args:
        folder: The run's `checkpoints` folder.
        step: Step that training resumed from.
    """
    for path in list_checkpoint_folders(folder):
        if (checkpoint_step(path) or 0) > step:
            superseded_path = path.with_name(f"{path.name}{SUPERSEDED_SUFFIX}")
            if superseded_path.exists():
                remove_checkpoint(superseded_path)
            path.rename(superseded_path)
            logger.info(
                f"{path.name} is later than the checkpoint resumed from: renamed to "
                f"{superseded_path.name}."
            )


def _eval_loss(checkpoint: Checkpoint) -> float:
    loss = checkpoint.metadata.get("eval_loss")
    return math.nan if loss is None else float(loss)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; after a kill in between, the rest of it does not count as one."""
    removed_path = path.with_name(f".{path.name}.removed.tmp")
    path.rename(removed_path)
    _try_delete(removed_path)


def _try_delete(path: Path) -> None:
    """Delete a folder that does not count as a checkpoint; log a failure instead of raising it."""
    try:
        delete(path)  # perhaps a file or a link that is named like a checkpoint
    except OSError as error:  # NFS keeps a file that a reader has open, and so its folder
        logger.warning(
            f"{path} could not be removed ({error.strerror}); the next save tries again."
        )
