"""A branch: a run that starts from a checkpoint of another run, its parent."""

import dataclasses
import os
from pathlib import Path

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.retention import BEST
from llm.checkpoint.run_folder import check_unchanged
from llm.errors import CheckpointError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.recorded_options import (
    check_known,
    fixed_options,
    lengthened,
    named_changes,
    saved_options,
)
from llm.trainers.gpt.resume import find_start

_OF_COOLDOWN = ("cooldown_tokens", "cooldown_shape", "min_learning_rate")
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


def find_parent(config: CoreConfig, resume_from: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that a new branch starts from; None for any other run.

    Args:
        config: The options.
        resume_from: The checkpoint that the run resumes from, instead of its parent's.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, a fixed option differs from the
            parent's, or the resumed run is not this branch.
    """
    if config.branch_from is None:
        return None
    if resume_from is not None:
        _check_same_parent(config.branch_from, resume_from)
        return None
    parent = find_start(config.branch_from, option="branch_from")
    check_known(config, parent)
    saved = saved_options(config, parent, "fixed")
    allowed = (*named_changes(config), *lengthened(config, parent))
    check_unchanged(
        saved,
        fixed_options(config, like=saved),
        allowed=allowed if config.cooldown_tokens is None else (*allowed, *_OF_COOLDOWN),
        branch_from=parent.path,
    )
    return parent


def _check_same_parent(parent_name: str, resume_from: Checkpoint) -> None:
    recorded = resume_from.metadata.get("branch")
    if recorded is None:
        raise CheckpointError(
            f"--branch_from {parent_name} starts a branch in a separate folder, but "
            f"{resume_from.path} belongs to a run that is not a branch; name another --output_dir."
        )
    parent = Path(recorded["parent"])
    run = parent.parent.parent
    names = {parent, run, run / str(recorded["step"]), run / BEST}
    if Path(os.path.realpath(parent_name)) not in names:
        raise CheckpointError(
            f"{resume_from.path} belongs to a branch from {parent}, not from --branch_from "
            f"{parent_name}; name another --output_dir for another branch."
        )


def branch_of(
    config: CoreConfig, resume_from: Checkpoint | None, parent: Checkpoint | None
) -> Branch | None:
    """Return the record of a branch; None if the run is not a branch.

    Args:
        config: The options.
        resume_from: The checkpoint that the run resumes from.
        parent: The checkpoint that a new branch starts from.

    Raises:
        CheckpointError: The parent is in another cooldown.
    """
    start = resume_from or parent
    recorded = None if start is None else start.metadata.get("branch")
    if parent is None:
        return None if recorded is None else Branch(**recorded)
    cooldown_from = None if config.cooldown_tokens is None else parent.step
    falls_from = recorded["cooldown_from"] if recorded else None
    if falls_from is not None and cooldown_from is not None:
        # A branch of a run in its cooldown continues the same cooldown.
        if parent.metadata["fixed"]["cooldown_tokens"] != config.cooldown_tokens:
            raise CheckpointError(
                f"--cooldown_tokens {config.cooldown_tokens:,} begins at a stable rate, and "
                f"{parent.path} is in a cooldown already; branch from before its start."
            )
        cooldown_from = falls_from
    return Branch(
        parent=os.path.realpath(parent.path), step=parent.step, cooldown_from=cooldown_from
    )
