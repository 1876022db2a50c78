"""The options of a run as its folder records them, for other programs and for its branches."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm.config.options import (
    CLASS_CHOICE,
    check_ranges,
    fields,
    names_class,
    non_default,
    restricted_options,
)
from llm.config.toml import read_toml
from llm.errors import CheckpointError, ConfigError
from llm.runtime.logging import SAME_ON_ALL_RANKS
from llm.trainers.gpt.config import is_complete
from llm.trainers.gpt.extensions import GPTConfig

logger = logging.getLogger("llm")


def read_config(run: Path, *, trust_remote_code: bool = False) -> GPTConfig:
    """Return the configuration of a run, without the options that a folder cannot set.

    Args:
        run: The run's folder, perhaps from somebody else.
        trust_remote_code: Whether the command that reads it lets the code of its model run.

    Raises:
        CheckpointError: The folder does not exist or lacks `config.toml`.
        ConfigError: It cannot be read.
    """
    restricted_values = restricted_options(GPTConfig) | {"trust_remote_code": trust_remote_code}
    return dataclasses.replace(_read_run_config(run), **restricted_values)


def _read_run_config(run: Path) -> GPTConfig:
    """Return the configuration of a run as its folder records it."""
    if not run.is_dir():
        raise CheckpointError(f"{run} is not a folder; name the --output_dir of a run.")
    if not (run / "config.toml").is_file():
        raise CheckpointError(
            f"{run} has no config.toml, which says what model was trained; name the --output_dir "
            "of a run, or copy the file back."
        )
    config = GPTConfig(**read_toml(GPTConfig, run / "config.toml"))
    try:
        check_ranges(config)
    except ConfigError as error:
        raise ConfigError(f"{run / 'config.toml'}: {error}") from error
    return config


def read_inherited_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a branch inherits from the run of `branch_from`.

    Args:
        values: The given options, by name. If they are complete, as in the branch's `config.toml`,
            nothing is inherited.

    Raises:
        ConfigError: The run does not exist, or a branch with a cooldown also has a length.
    """
    parent = values.get("branch_from")
    if parent is None or is_complete(values):
        return {}
    if {"cooldown_tokens", "max_duration"} <= values.keys():
        raise ConfigError(
            "--cooldown_tokens sets the length of a branch, and --max_duration sets another one; "
            "give one of them."
        )
    parent_run = _find_parent_run(parent)
    parent_options = non_default(_read_run_config(parent_run))
    restricted_names = _list_restricted_names(parent_options)
    if omitted_names := sorted((parent_options.keys() & restricted_names) - values.keys()):
        _warn_of_omitted_options(parent_run, omitted_names)
    excluded_names = {*restricted_names, "output_dir", "branch_from"}
    return {name: value for name, value in parent_options.items() if name not in excluded_names}


def _list_restricted_names(parent_options: dict[str, Any]) -> set[str]:
    """Return the options that a folder cannot set, with those that name a class to import."""
    class_names = {
        field.name
        for field in fields(GPTConfig)
        if CLASS_CHOICE in field.choices and names_class(parent_options.get(field.name))
    }
    return restricted_options(GPTConfig).keys() | class_names


def _warn_of_omitted_options(parent_run: Path, omitted_names: Sequence[str]) -> None:
    """Warn that a branch does not inherit the options of its parent that run code."""
    flags = ", ".join(f"--{name}" for name in omitted_names)
    logger.warning(
        f"{parent_run / 'config.toml'} sets {flags}, which a branch takes only from its own "
        "command; give them there if you trust what they run.",
        extra=SAME_ON_ALL_RANKS,
    )


def _find_parent_run(branch_from: str) -> Path:
    """Return the folder of the run in RUN, RUN/STEP or RUN/checkpoints/step_STEP.

    Raises:
        ConfigError: None of these folders is a run.
    """
    path = Path(os.path.realpath(branch_from))
    for folder in (path, *path.parents[:2]):
        if (folder / "config.toml").is_file():
            return folder
    raise ConfigError(
        f"--branch_from {branch_from} is not a run: it has no config.toml; name a run's folder or "
        "RUN/STEP."
    )
