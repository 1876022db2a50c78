"""A branch: a run that starts from a checkpoint of another run, its parent."""

import dataclasses
import os
from pathlib import Path

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.retention import BEST_LINK
from llm.checkpoint.run_folder import check_options_unchanged
from llm.errors import CheckpointError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.recorded_options import (
    check_checkpoint_record,
    list_changeable_options,
    list_fixed_options,
    read_saved_options,
)
from llm.trainers.gpt.resume import find_run_checkpoint

_COOLDOWN_OPTIONS = ("cooldown_tokens", "cooldown_shape", "min_learning_rate")
"""Fixed options that a branch with a cooldown may change, because they first apply in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """The point where a branch left its parent; its checkpoints record this as `branch`.

    Attributes:
        parent: The parent's checkpoint, an absolute path.
        step: The step of that checkpoint.
        cooldown_from: Steps done when the learning rate begins to fall; None without a cooldown.
    """

    parent: str
    step: int
    cooldown_from: int | None


def validated_branch_parent(
    config: CoreConfig, resume_from: Checkpoint | None
) -> Checkpoint | None:
    """Return the parent's checkpoint for a new branch, or None; refuse options that do not fit it.

    Args:
        config: The options.
        resume_from: The checkpoint that the run resumes from. A branch that resumes needs no
            checkpoint of its parent.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, a fixed option differs from the
            parent's, or the resumed run is not this branch.
    """
    if config.branch_from is None:
        return None
    if resume_from is not None:
        _check_same_parent(config.branch_from, resume_from)
        return None
    parent = find_run_checkpoint(config.branch_from, option="branch_from")
    check_checkpoint_record(config, parent)
    parent_options = read_saved_options(config, parent, "fixed")
    allowed_names = list_changeable_options(config, parent)
    if config.cooldown_tokens is not None:
        allowed_names += _COOLDOWN_OPTIONS
    check_options_unchanged(
        parent_options,
        list_fixed_options(config, defaults=parent_options),
        allowed_names=tuple(allowed_names),
        branch_from=parent.path,
    )
    return parent


def _check_same_parent(branch_from: str, resume_from: Checkpoint) -> None:
    """Refuse to resume a run that is not a branch of the run in `branch_from`."""
    branch_record = resume_from.metadata.get("branch")
    if branch_record is None:
        raise CheckpointError(
            f"--branch_from {branch_from} starts a branch in a separate folder, but "
            f"{resume_from.path} belongs to a run that is not a branch; name another --output_dir."
        )
    parent_path = Path(branch_record["parent"])
    parent_run = parent_path.parent.parent
    step_path, best_path = parent_run / str(branch_record["step"]), parent_run / BEST_LINK
    if Path(os.path.realpath(branch_from)) not in (parent_path, parent_run, step_path, best_path):
        raise CheckpointError(
            f"{resume_from.path} belongs to a branch from {parent_path}, not from --branch_from "
            f"{branch_from}; name another --output_dir for another branch."
        )


def make_branch(
    config: CoreConfig, resume_from: Checkpoint | None, parent: Checkpoint | None
) -> Branch | None:
    """Return the record of a branch; None if the run is not a branch.

    Raises:
        CheckpointError: The parent is in another cooldown.
    """
    start = resume_from or parent
    branch_record = None if start is None else start.metadata.get("branch")
    if parent is None:
        return None if branch_record is None else Branch(**branch_record)
    parent_cooldown_from = branch_record["cooldown_from"] if branch_record else None
    if config.cooldown_tokens is None:
        cooldown_from = None
    elif parent_cooldown_from is None:
        cooldown_from = parent.step
    elif parent.metadata["fixed"]["cooldown_tokens"] == config.cooldown_tokens:
        cooldown_from = parent_cooldown_from  # the branch continues its parent's cooldown
    else:
        raise CheckpointError(
            f"--cooldown_tokens {config.cooldown_tokens:,} begins at a stable rate, and "
            f"{parent.path} is in a cooldown already; branch from before its start."
        )
    return Branch(
        parent=os.path.realpath(parent.path), step=parent.step, cooldown_from=cooldown_from
    )
