"""The options that checkpoints record: fixed ones, which a run must keep, and logged ones."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from llm.checkpoint.format import Checkpoint
from llm.config import options
from llm.config.duration import Duration, Tokens
from llm.config.unit_aliases import join_unit_aliases
from llm.errors import CheckpointError, ConfigError
from llm.optim.schedule import is_constant
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import changes_schedule

DEVICE_OPTIONS = ("mixed_precision", "tf32", "torch_compile", "router_dtype")
"""Options with a default that depends on the device, or on the version that began the run."""

_REQUIRED_METADATA = (
    *("fixed", "logged", "global_batch_size", "data", "tokenizer", "initial_weights"),
    "skip_samples",
)
"""Metadata of a checkpoint that a run needs to start from it."""


def state_options(config: CoreConfig) -> dict[str, Any]:
    """Return the options that determine an optimizer's state, with the default optimizer's name."""
    fields = options.fields(type(config))
    names = [field.name for field in fields if field.option.resume == "state"]
    values = {name: getattr(config, name) for name in names}
    return values | {"optimizer": config.optimizer or "adamw"}


def check_checkpoint_record(config: CoreConfig, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint if no run can start from its record of options.

    Raises:
        CheckpointError: The record lacks an entry, an option has a value of another type, or this
            installation lacks a fixed option: the run would silently train another model.
    """
    missing_names = [name for name in _REQUIRED_METADATA if name not in checkpoint.metadata]
    if missing_names:
        raise CheckpointError(
            f"{checkpoint.path} has no record of {' and '.join(missing_names)}, so no run can "
            "start from it; name another checkpoint."
        )
    _check_recorded_types(config, checkpoint)
    option_names = {field.name for field in options.fields(type(config))}
    unknown_names = read_saved_options(config, checkpoint, "fixed").keys() - option_names
    if unknown_names:
        raise _unknown_options_error(checkpoint, sorted(unknown_names))


def _unknown_options_error(checkpoint: Checkpoint, names: Iterable[str]) -> CheckpointError:
    """Return the error for options of a checkpoint that this installation does not have."""
    flags = " and ".join(f"--{name}" for name in names)
    packages = " and ".join(
        f"{name} {version}" for name, version in recorded_packages(checkpoint).items()
    )
    source = packages or "the extension or the version of llm-trainers that has them"
    return CheckpointError(
        f"{checkpoint.path} was trained with {flags}, which this installation does not have. "
        f"Install {source}, or start another run from the exported model by "
        "--model_name_or_path."
    )


def _check_recorded_types(config: CoreConfig, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with values of another type in the record of its options."""
    fields_by_name = {field.name: field for field in options.fields(type(config))}
    for kind in ("fixed", "logged"):
        for name, value in _read_recorded_options(config, checkpoint, kind).items():
            if name in fields_by_name and not _has_field_type(fields_by_name[name], value):
                raise CheckpointError(
                    f"{checkpoint.path} is damaged: it records {value!r} as --{name}; name another "
                    "checkpoint."
                )


def _has_field_type(field: options.Field, value: Any) -> bool:
    """Return whether a JSON value can be an option's, perhaps one of another version."""
    if value is None:
        return field.allows_none or field.default is None
    if field.is_list != isinstance(value, list):
        return False
    types: set[type] = {*field.members}
    if Duration in types:
        with contextlib.suppress(TypeError, ValueError):
            return bool(field.parse_duration(value))
    if any(map(dataclasses.is_dataclass, types)):
        types.add(dict)
    if not types.isdisjoint((float, Tokens)):
        types.add(int)
    return all(type(item) in types for item in (value if field.is_list else [value]))


def can_extend_training(config: CoreConfig, checkpoint: Checkpoint) -> bool:
    """Return whether `max_duration` may be longer than in the checkpoint.

    A longer run is the same up to the checkpoint only if its past learning rates do not change:
    if the rate is constant, or if its decay has not begun, and no extension changes it.
    """
    if changes_schedule(config):
        return False
    recorded_options = _read_recorded_options(config, checkpoint, "fixed")
    recorded_duration = Duration(recorded_options["max_duration"])
    duration = config.max_duration
    if duration.unit != recorded_duration.unit or duration.value < recorded_duration.value:
        return False
    scheduler = recorded_options.get("lr_scheduler_type")
    if scheduler == "warmup_stable_decay":
        return _is_before_decay(checkpoint.step, recorded_duration, recorded_options.get("decay"))
    return is_constant(scheduler)


def _is_before_decay(step: int, duration: Duration, decay_text: str | None) -> bool:
    """Return whether a step is before the decay of `warmup_stable_decay`; False if unknown.

    Without a length, the decay is a tenth of the run.
    """
    default_text = f"{max(1, int(duration.value) // 10)} steps"
    decay = Duration(decay_text or default_text)
    is_decay_start_known = duration.unit == "steps" and decay.unit == "steps"
    return is_decay_start_known and step <= duration.value - decay.value


def list_fixed_options(
    config: CoreConfig, *, defaults: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options that a resumed run must keep, as JSON values.

    Args:
        config: The options.
        defaults: Fixed options of a checkpoint, which give seed and precision if `config` does not.
    """
    fixed_values = recorded_values(config, "fixed")
    for name in ("seed", *DEVICE_OPTIONS):
        if defaults is not None and name in fixed_values and fixed_values[name] is None:
            fixed_values[name] = defaults.get(name)
    return fixed_values


def recorded_packages(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the versions of the installed packages with extensions in a run, by name."""
    packages: dict[str, str] = checkpoint.metadata.get("packages", {})
    return packages


def recorded_values(config: CoreConfig, kind: str) -> dict[str, Any]:
    """Return the options that checkpoints record as fixed or as logged, as JSON values."""
    return _as_json(
        {field.name: getattr(config, field.name) for field in _recorded_fields(config, kind)}
    )


def _recorded_fields(config: CoreConfig, kind: str) -> list[options.Field]:
    """Return the options that checkpoints record as fixed or as logged."""
    kinds = ("state", "fixed") if kind == "fixed" else (kind,)
    return [field for field in options.fields(type(config)) if field.option.resume in kinds]


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(values, default=dataclasses.asdict))
    return plain


def make_options_record(config: CoreConfig) -> dict[str, dict[str, Any]]:
    """Return the options for a checkpoint's record, without extension options at their default."""
    default_names = {
        field.name
        for field in options.fields(type(config))
        if field.option.extension and getattr(config, field.name) == field.default
    }
    values_by_kind = {
        "fixed": list_fixed_options(config),
        "logged": recorded_values(config, "logged"),
    }
    return {
        kind: {name: value for name, value in values.items() if name not in default_names}
        for kind, values in values_by_kind.items()
    }


def read_saved_options(config: CoreConfig, checkpoint: Checkpoint, kind: str) -> dict[str, Any]:
    """Return the fixed or the logged options of a checkpoint.

    Extension options that it does not record have their default.
    """
    defaults = {
        field.name: field.default
        for field in _recorded_fields(config, kind)
        if field.option.extension
    }
    return _as_json(defaults) | _read_recorded_options(config, checkpoint, kind)


def _read_recorded_options(config: CoreConfig, checkpoint: Checkpoint, kind: str) -> dict[str, Any]:
    """Return the fixed or the logged options in a checkpoint's record, by their current names.

    Raises:
        CheckpointError: A former option has a value that no duration has.
    """
    removed_values = options.removed_options(type(config))
    recorded = {
        name: value
        for name, value in checkpoint.metadata[kind].items()
        if name not in removed_values or value != removed_values[name]
    }
    try:
        return join_unit_aliases(type(config), recorded)
    except ConfigError as error:
        raise CheckpointError(
            f"{checkpoint.path} is damaged: {error} Name another checkpoint."
        ) from error


def list_changeable_options(config: CoreConfig, checkpoint: Checkpoint | None = None) -> list[str]:
    """Return the options in `change_on_resume`, with aliases resolved.

    Args:
        config: The options.
        checkpoint: If given, `max_duration` is among them where training can be extended from this
            checkpoint.
    """
    names_by_alias = options.names_by_alias(type(config))
    option_names = [names_by_alias.get(name, name) for name in config.change_on_resume]
    if checkpoint is not None and can_extend_training(config, checkpoint):
        option_names.append("max_duration")
    return option_names
