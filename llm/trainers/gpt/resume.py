"""Find the checkpoint that a run starts from, and compare the run with it."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from llm.checkpoint.format import (
    MANIFEST,
    Checkpoint,
    checkpoint_name,
    checkpoint_step,
    list_checkpoint_folders,
)
from llm.checkpoint.load import find_newest_checkpoint, read_verified_checkpoint
from llm.checkpoint.run_folder import RunFolder, check_options_unchanged, describe_changes
from llm.checkpoint.staging import complete_staged_checkpoint
from llm.data.data_digest import data_has_changed
from llm.data.options import SOURCES
from llm.errors import CheckpointError
from llm.runtime.logging import SAME_ON_ALL_RANKS
from llm.trainers.gpt.config import CoreConfig, packages_in_use
from llm.trainers.gpt.recorded_options import (
    can_extend_training,
    check_checkpoint_record,
    list_changeable_options,
    list_fixed_options,
    read_saved_options,
    recorded_packages,
    recorded_values,
    state_options,
)

logger = logging.getLogger("llm")


def find_resume_checkpoint(config: CoreConfig, folder: RunFolder) -> Checkpoint | None:
    """Return the checkpoint of `resume_from_checkpoint`; None if none exists yet.

    Raises:
        CheckpointError: The named checkpoint, or every one in the run's folder, is damaged, or a
            fixed option has changed.
        ConfigError: The run has finished without a checkpoint.
    """
    if not config.resume_from_checkpoint:
        return None
    if isinstance(config.resume_from_checkpoint, str):
        checkpoint = _read_named_checkpoint(Path(config.resume_from_checkpoint))
    else:
        if not config.eval_only:
            complete_staged_checkpoint(folder, config.stage_checkpoints)
        newest = find_newest_checkpoint(folder.checkpoints, is_collective=True)
        if newest is None:
            _check_fresh_start(folder)
            logger.info(
                f"No checkpoint in {folder.checkpoints} yet: the run starts from the beginning."
            )
            return None
        checkpoint = newest
    check_checkpoint_record(config, checkpoint)
    if not config.eval_only:  # an evaluation loads only the weights
        _check_same_options(config, checkpoint)
    return checkpoint


def _read_named_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder that `resume_from_checkpoint` names.

    Raises:
        CheckpointError: The folder is not a checkpoint, or is damaged.
    """
    if not (path / MANIFEST).exists():
        raise CheckpointError(
            f"--resume_from_checkpoint {path} is not a checkpoint: it has no {MANIFEST}; name "
            "a folder such as RUN/checkpoints/step_00001000, or no path for the newest one of "
            "--output_dir."
        )
    return read_verified_checkpoint(path, is_collective=True)


def _check_fresh_start(folder: RunFolder) -> None:
    """Refuse a fresh start if the folder has damaged checkpoints or a finished run."""
    damaged_folders = list_checkpoint_folders(folder.checkpoints)
    if damaged_folders:
        raise CheckpointError(
            f"--resume_from_checkpoint: none of the {len(damaged_folders)} checkpoints in "
            f"{folder.checkpoints} can be used (the lines above say why), and a fresh "
            "start would replace them; name a sound one, or start in another --output_dir."
        )
    folder.check_not_finished()


def _check_same_options(config: CoreConfig, checkpoint: Checkpoint) -> None:
    """Refuse to resume with other fixed options, first with another state of the optimizer."""
    checkpoint_options = read_saved_options(config, checkpoint, "fixed")
    run_options = list_fixed_options(config, defaults=checkpoint_options)
    allowed_names = tuple(list_changeable_options(config, checkpoint))
    # If an older checkpoint lacks an option, the option did not exist yet, so it has not changed.
    checkpoint_state = state_options(dataclasses.replace(config, **checkpoint_options))
    state_changes = describe_changes(checkpoint_state, state_options(config))
    if state_changes:
        refused_options = {
            name: value
            for name, value in run_options.items()
            if name not in checkpoint_state and name not in allowed_names
        }
        changes = [*describe_changes(checkpoint_options, refused_options), *state_changes]
        raise CheckpointError(
            f"{checkpoint.path} holds another state of the optimizer: {'; '.join(changes)}. Give "
            "the former values, or start another run from its weights with --init_from."
        )
    check_options_unchanged(checkpoint_options, run_options, allowed_names=allowed_names)


def find_run_checkpoint(location: str, *, option: str) -> Checkpoint:
    """Return a checkpoint of another run: the newest valid one, or a given step.

    Args:
        location: RUN, RUN/STEP, RUN/best, or the checkpoint's own folder.
        option: The option that names it, for messages.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    path = Path(location)
    if (path / MANIFEST).exists():
        return read_verified_checkpoint(path, is_collective=True)
    checkpoints = RunFolder(path).checkpoints
    if checkpoints.is_dir():
        newest = find_newest_checkpoint(checkpoints, is_collective=True)
        if newest is not None:
            return newest
    if RunFolder(path.parent).checkpoints.is_dir():
        return _read_checkpoint_of_step(path.parent, path.name, option=option)
    raise CheckpointError(
        f"--{option} {path} holds no valid checkpoint; name a run's folder, RUN/STEP, or a "
        "checkpoint's own folder."
    )


def _read_checkpoint_of_step(run: Path, step_name: str, *, option: str) -> Checkpoint:
    """Return the checkpoint of a run by its step, its folder's name, or `best`.

    Raises:
        CheckpointError: The run has no such checkpoint, or it is damaged.
    """
    checkpoints = RunFolder(run).checkpoints
    folder_name = checkpoint_name(int(step_name)) if step_name.isdigit() else step_name
    if not (checkpoints / folder_name / MANIFEST).exists():
        steps = ", ".join(
            str(checkpoint_step(path)) for path in list_checkpoint_folders(checkpoints)
        )
        raise CheckpointError(
            f"--{option} {run / step_name} names no checkpoint of {run}, which has the steps "
            f"{steps or '(none)'}; name one of them."
        )
    return read_verified_checkpoint(checkpoints / folder_name, is_collective=True)


def check_same_data(
    config: CoreConfig,
    checkpoint: Checkpoint | None,
    data_digest: dict[str, Any],
    *,
    is_branch: bool,
) -> None:
    """Refuse to resume or to branch with other training data, or log an allowed change.

    Raises:
        CheckpointError: The tokens have changed since the checkpoint was written.
    """
    if checkpoint is None:
        return
    has_changed = data_has_changed(checkpoint.metadata["data"], data_digest)
    if not set(SOURCES).isdisjoint(list_changeable_options(config)):
        relation = "change: they are not those" if has_changed else "are the same as those"
        logger.info(f"The training data {relation} with which {checkpoint.path} was reached.")
    elif has_changed:
        alternative = "" if is_branch else ", or start in another --output_dir"
        raise CheckpointError(
            f"The training data have changed since {checkpoint.path} was saved, although the "
            "options that name them are the same; restore the data, or allow the change with "
            f"--change_on_resume and the option's name{alternative}."
        )


def _package_changes(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    """Return a clause for each installed package that has changed, or takes part no more."""
    return [
        f"the package {name} was {version} and is {current.get(name, 'not used')}"
        for name, version in saved.items()
        if current.get(name) != version
    ]


def log_changes(config: CoreConfig, checkpoint: Checkpoint, *, world_size: int) -> None:
    """Log settings that affect the numbers and differ from the checkpoint."""
    fixed, logged = (read_saved_options(config, checkpoint, kind) for kind in ("fixed", "logged"))
    changes = [
        *describe_changes(fixed, list_fixed_options(config, defaults=fixed)),
        *describe_changes(logged, recorded_values(config, "logged")),
        *describe_changes(
            {"number of ranks": checkpoint.world_size}, {"number of ranks": world_size}
        ),
        *_package_changes(recorded_packages(checkpoint), dict(packages_in_use(config))),
    ]
    if changes:
        logger.info(f"The run continues with other settings: {'; '.join(changes)}.")
    if config.max_duration != fixed["max_duration"]:
        _warn_about_cooldown_length(config, checkpoint)


def _warn_about_cooldown_length(config: CoreConfig, checkpoint: Checkpoint) -> None:
    """Warn that a longer `max_duration` does not extend a branch that is a cooldown."""
    is_longer = can_extend_training(config, checkpoint)
    is_cooldown_branch = config.cooldown_tokens is not None and checkpoint.metadata.get("branch")
    if is_longer and is_cooldown_branch:
        logger.warning(
            "--max_duration does not make the run longer: the cooldown sets its length, "
            f"--cooldown_tokens {config.cooldown_tokens:,}.",
            extra=SAME_ON_ALL_RANKS,
        )
