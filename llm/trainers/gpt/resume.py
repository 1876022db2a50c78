"""Find the checkpoint that a run starts from, and compare the run with it."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from llm.checkpoint.format import MANIFEST, Checkpoint, checkpoint_folders, name_of, step_of
from llm.checkpoint.load import newest_valid, read_valid
from llm.checkpoint.run_folder import RunFolder, check_unchanged, differences
from llm.data.data_digest import data_has_changed
from llm.data.options import SOURCES
from llm.errors import CheckpointError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.recorded_options import (
    check_known,
    fixed_options,
    lengthened,
    named_changes,
    recorded_values,
    saved_options,
    state_options,
)

logger = logging.getLogger("llm")


def find_resume(config: CoreConfig, folder: RunFolder) -> Checkpoint | None:
    """Return the checkpoint of `resume_from_checkpoint`; None if none exists yet.

    Args:
        config: The options.
        folder: The run's folder.

    Raises:
        CheckpointError: The named checkpoint, or every one in the run's folder, is damaged, or a
            fixed option has changed.
        ConfigError: The run has finished without a checkpoint.
    """
    if not config.resume_from_checkpoint:
        return None
    if isinstance(config.resume_from_checkpoint, str):
        path = Path(config.resume_from_checkpoint)
        if not (path / MANIFEST).exists():
            raise CheckpointError(
                f"--resume_from_checkpoint {path} is not a checkpoint: it has no {MANIFEST}; name "
                "a folder such as RUN/checkpoints/step_00001000, or no path for the newest one of "
                "--output_dir."
            )
        checkpoint = read_valid(path, together=True)
    else:
        newest = newest_valid(folder.checkpoints, together=True)
        if newest is None:
            # A fresh start never replaces checkpoints, not even damaged ones.
            damaged = checkpoint_folders(folder.checkpoints)
            if damaged:
                raise CheckpointError(
                    f"--resume_from_checkpoint: none of the {len(damaged)} checkpoints in "
                    f"{folder.checkpoints} can be used (the lines above say why), and a fresh "
                    "start would replace them; name a sound one, or start in another --output_dir."
                )
            folder.check_unfinished()
            logger.info(
                f"No checkpoint in {folder.checkpoints} yet: the run starts from the beginning."
            )
            return None
        checkpoint = newest
    check_known(config, checkpoint)
    if config.eval_only:
        return checkpoint  # only its weights are loaded
    saved = saved_options(config, checkpoint, "fixed")
    allowed = (*named_changes(config), *lengthened(config, checkpoint))
    fixed = fixed_options(config, like=saved)
    # If an older checkpoint lacks an option, the option did not exist yet, so it has not changed.
    saved_state = state_options(dataclasses.replace(config, **saved))
    changed = differences(saved_state, state_options(config))
    if changed:
        new_options = {n: v for n, v in fixed.items() if n not in saved_state and n not in allowed}
        raise CheckpointError(
            f"{checkpoint.path} holds another state of the optimizer: "
            f"{'; '.join([*differences(saved, new_options), *changed])}. Give the former values, "
            "or start another run from its weights with --init_from."
        )
    check_unchanged(saved, fixed, allowed=allowed)
    return checkpoint


def find_start(location: str, *, option: str) -> Checkpoint:
    """Return a checkpoint of another run: the newest valid one, or a given step.

    Args:
        location: RUN, RUN/STEP, RUN/best, or the checkpoint's own folder.
        option: The option that names it, for messages.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    path = Path(location)
    if (path / MANIFEST).exists():
        return read_valid(path, together=True)
    for run, name in ((path, None), (path.parent, path.name)):
        folder = RunFolder(run).checkpoints
        if not folder.is_dir():
            continue
        if name is None:
            newest = newest_valid(folder, together=True)
            if newest is not None:
                return newest
        else:
            chosen = folder / (name_of(int(name)) if name.isdigit() else name)
            if not (chosen / MANIFEST).exists():
                steps = ", ".join(str(step_of(path)) for path in checkpoint_folders(folder))
                raise CheckpointError(
                    f"--{option} {path} names no checkpoint of {run}, which has the steps "
                    f"{steps or '(none)'}; name one of them."
                )
            return read_valid(chosen, together=True)
    raise CheckpointError(
        f"--{option} {path} holds no valid checkpoint; name a run's folder, RUN/STEP, or a "
        "checkpoint's own folder."
    )


def check_same_data(
    config: CoreConfig, checkpoint: Checkpoint | None, digest: dict[str, Any], *, is_branch: bool
) -> None:
    """Refuse to resume or to branch with other training data, or log an allowed change.

    Args:
        config: The options.
        checkpoint: The checkpoint that the run starts from.
        digest: Result of `corpus_digests` for the training data.
        is_branch: Whether the start begins a branch.

    Raises:
        CheckpointError: The tokens have changed since the checkpoint was written.
    """
    if checkpoint is None:
        return
    changed = data_has_changed(checkpoint.metadata["data"], digest)
    if not set(SOURCES).isdisjoint(named_changes(config)):
        comparison = "change: they are not those" if changed else "are the same as those"
        logger.info(f"The training data {comparison} with which {checkpoint.path} was reached.")
    elif changed:
        alternative = "" if is_branch else ", or start in another --output_dir"
        raise CheckpointError(
            f"The training data have changed since {checkpoint.path} was saved, although the "
            "options that name them are the same; restore the data, or allow the change with "
            f"--change_on_resume and the option's name{alternative}."
        )


def log_changes(config: CoreConfig, checkpoint: Checkpoint, *, ranks: int) -> None:
    """Log settings that affect the numbers and differ from the checkpoint."""
    fixed, logged = (saved_options(config, checkpoint, kind) for kind in ("fixed", "logged"))
    changed = [
        *differences(fixed, fixed_options(config, like=fixed)),
        *differences(logged, recorded_values(config, "logged")),
        *differences({"number of ranks": checkpoint.world_size}, {"number of ranks": ranks}),
    ]
    if changed:
        logger.info(f"The run continues with other settings: {'; '.join(changed)}.")
    longer = lengthened(config, checkpoint) and config.max_duration != fixed["max_duration"]
    if longer and config.cooldown_tokens is not None and checkpoint.metadata.get("branch"):
        logger.warning(
            "--max_duration does not make the run longer: the cooldown sets its length, "
            f"--cooldown_tokens {config.cooldown_tokens:,}."
        )
