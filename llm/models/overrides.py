"""Changes to single fields of a model's configuration (`--config_overrides`)."""

import copy
import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from llm.errors import ConfigError, one_line
from llm.models.options import parse_literal

_ROPE_FIELD = "rope_parameters"
"""The field in which transformers 5 keeps `rope_theta` and others that were fields before."""


def override_fields(
    config: PreTrainedConfig, overrides: str, *, explicit_fields: dict[str, Any]
) -> PreTrainedConfig:
    """Return a configuration with some fields changed.

    Args:
        config: The configuration, made from the explicit fields.
        overrides: The changes, such as "n_layer=4,n_embd=128".
        explicit_fields: The fields in the model's file or options; the class derives the others.

    Raises:
        ConfigError: Neither the configuration nor its model reads a field, or a value does not fit.
    """
    values = _split_overrides(config, overrides)
    declared_fields = config.to_dict()
    changes: dict[str, Any] = {}
    # Undeclared fields last: to find out what they do, the class must accept the others.
    for name in sorted(values, key=lambda name: name not in declared_fields):
        changes |= _override_field(
            config, {**explicit_fields, **changes}, name, values[name], overrides=overrides
        )
    return _make_config(config, {**explicit_fields, **changes}, overrides=overrides)


def _split_overrides(config: PreTrainedConfig, overrides: str) -> dict[str, str]:
    """Return the values by field name, from "n_layer=4,n_embd=128"."""
    values = {}
    for item in overrides.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(
                f"--config_overrides {overrides}: {item!r} is not of the form field=value."
            )
        values[config.attribute_map.get(name, name)] = value
    return values


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Return a clause that suggests known names like this one."""
    close_names = difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.4)
    return f"nearest: {', '.join(close_names)}" if close_names else "nothing has a name like it"


def _override_field(
    config: PreTrainedConfig,
    explicit_fields: dict[str, Any],
    name: str,
    value: str,
    *,
    overrides: str,
) -> dict[str, Any]:
    """Return the changes of explicit fields that give a field another value.

    Args:
        config: The configuration before all changes.
        explicit_fields: The fields that the class derives the others from.
        name: Name of the field.
        value: The new value, as text.
        overrides: All changes, for messages.

    Raises:
        ConfigError: The change has no effect, or the value does not fit.
    """
    option = f"--config_overrides {name}={value}"
    declared_fields = config.to_dict()
    if name in declared_fields:
        is_float = _is_float_field(config, name)
        new_value = _parse_value(value, declared_fields[name], option=option, is_float=is_float)
        return {name: new_value}
    rope_fields = declared_fields.get(_ROPE_FIELD) or {}
    change = {name: _parse_value(value, rope_fields.get(name), option=option)}
    # Construct the configuration with and without the field, to see what the class makes of it.
    fields_with_change = {**explicit_fields, **change}
    config_without_change = _make_config(config, explicit_fields, overrides=overrides).to_dict()
    config_with_change = _make_config(config, fields_with_change, overrides=overrides).to_dict()
    derives_other_fields = (
        name not in config_with_change and config_with_change != config_without_change
    )
    if derives_other_fields:
        return change
    if name in rope_fields:
        return {_ROPE_FIELD: {**(explicit_fields.get(_ROPE_FIELD) or rope_fields), **change}}
    undeclared_fields = _undeclared_fields(config)
    if name in undeclared_fields:
        return change
    if name not in config_with_change:
        raise ConfigError(
            f"{option} changes nothing: the {config.model_type} model has this value already, or "
            f"its config.json states it in another field, such as {_ROPE_FIELD}; leave it out, or "
            "change that file."
        )
    known_names = [*declared_fields, *config.attribute_map, *rope_fields, *undeclared_fields]
    raise ConfigError(
        f"--config_overrides {overrides}: {config.model_type} has no field {name}; "
        f"{nearest_names(name, known_names)}."
    )


def _make_config(
    config: PreTrainedConfig, explicit_fields: dict[str, Any], *, overrides: str
) -> PreTrainedConfig:
    """Make a configuration of the same class from other explicit fields."""
    try:
        # The class changes the objects that it gets, so it gets copies.
        return type(config).from_dict(copy.deepcopy(explicit_fields))
    except Exception as error:
        raise ConfigError(
            f"--config_overrides {overrides} cannot be: {one_line(error)}."
        ) from error


def _undeclared_fields(config: PreTrainedConfig) -> set[str]:
    """Return the fields that a model's code reads by `getattr`, as Qwen3-MoE reads `head_dim`."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:  # the model's code comes from a folder
        return set()
    source = inspect.getsource(sys.modules[model_class.__module__])
    return set(re.findall(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"', source))


def _is_float_field(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a field may be any number, although its default is a whole one."""
    return any(
        field.name == name and "float" in str(field.type) for field in dataclasses.fields(config)
    )


def _parse_value(value: str, current_value: Any, *, option: str, is_float: bool = False) -> Any:
    """Return a value in the type of the current value; if that is None, as a Python literal.

    Args:
        value: The new value, as text.
        current_value: The field's value before the change.
        option: The option with the field and the value, for messages.
        is_float: Whether a number may have a fraction although the current value has none.

    Raises:
        ConfigError: The value has another type.
    """
    if isinstance(current_value, bool):
        if value.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{option}: expected true or false.")
        return value.lower() in ("true", "1")
    if isinstance(current_value, int | float):
        number_type = float if is_float else type(current_value)
        try:
            return number_type(value)
        except ValueError:
            noun = "a whole number" if number_type is int else "a number"
            raise ConfigError(f"{option}: expected {noun}.") from None
    if isinstance(current_value, str):
        return value
    if current_value is None:
        return parse_literal(value)
    raise ConfigError(
        f"{option}: a {type(current_value).__name__} can only be set in a config.json."
    )
