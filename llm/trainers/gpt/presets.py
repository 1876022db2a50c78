"""Presets: the options that `--preset NAME` sets, in TOML files that ship with the package.

The precedence is default < preset < TOML file (`--config`) < command line.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from llm.config.options import fields
from llm.config.toml import read_toml
from llm.errors import ConfigError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.extensions import GPTConfig

_FOLDER = Path(__file__).parent / "presets"

_IN_PLACE_OF = {"num_warmup_steps": ("num_warmup_samples", "num_warmup_tokens")}
"""Equivalent options in other units, by the option that a preset sets."""


def preset_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options set by the preset.

    Args:
        values: The given options, by name. If they are complete, as in the `config.toml` of a run,
            the preset adds nothing: a resumed run keeps its recorded values.

    Raises:
        ConfigError: The preset does not exist, or the run is a branch.
    """
    name = values.get("preset")
    if name is None or is_complete(values):
        return {}
    if values.get("branch_from") is not None:
        raise ConfigError(
            f"--preset {name} does not go with --branch_from, which takes the options of its "
            "parent; leave the preset out."
        )
    return {
        option: value
        for option, value in read_preset(name).items()
        if all(values.get(other) is None for other in _IN_PLACE_OF.get(option, ()))
    }


def read_preset(name: str) -> dict[str, Any]:
    """Return the options in the file of a preset.

    Raises:
        ConfigError: The preset does not exist.
    """
    files = {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}
    if name not in files:
        raise ConfigError(f"There is no --preset {name}; choose from: {', '.join(files)}.")
    return read_toml(GPTConfig, files[name])


def values_of_preset(config: CoreConfig) -> dict[str, Any]:
    """Return the options of a run's preset that the run does not override."""
    assert config.preset is not None
    preset = read_preset(config.preset)
    return {name: value for name, value in preset.items() if getattr(config, name) == value}


def is_complete(names: Collection[str]) -> bool:
    """Return whether every option that `config.toml` always records has a value."""
    recorded = [f for f in fields(GPTConfig) if not (f.option.one_shot or f.option.extension)]
    return {f.name for f in recorded if f.default is not None} <= {*names}
