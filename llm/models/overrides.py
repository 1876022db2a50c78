"""Changes to single fields of a model's configuration (`--config_overrides`)."""

import ast
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

_ROPE = "rope_parameters"
"""The field in which transformers 5 keeps `rope_theta` and others that were fields before."""


def override(config: PreTrainedConfig, *, stated: dict[str, Any], text: str) -> PreTrainedConfig:
    """Return a configuration with some fields changed.

    Args:
        config: The configuration, made from the stated fields.
        stated: The fields that a file or the options state; the class derives the others.
        text: The changes, such as "n_layer=4,n_embd=128".

    Raises:
        ConfigError: Neither the configuration nor its model reads a field, or a value does not fit.
    """
    values: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(
                f"--config_overrides {text}: {item!r} is not of the form field=value."
            )
        values[config.attribute_map.get(name, name)] = value
    declared = config.to_dict()
    changes: dict[str, Any] = {}
    # Undeclared fields last: to find out what they do, the class must accept the others.
    for name in sorted(values, key=lambda name: name not in declared):
        changes |= _change_field(config, {**stated, **changes}, name, values[name], text=text)
    return _make_config(config, {**stated, **changes}, text=text)


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Return a clause that suggests known names like this one."""
    near = difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.4)
    return f"nearest: {', '.join(near)}" if near else "nothing has a name like it"


def _change_field(
    config: PreTrainedConfig, stated: dict[str, Any], name: str, value: str, *, text: str
) -> dict[str, Any]:
    """Return the stated fields that change when a field has another value."""
    option = f"--config_overrides {name}={value}"
    fields = config.to_dict()
    if name in fields:
        return {
            name: _parse_value(value, fields[name], option=option, is_real=_is_real(config, name))
        }
    rope = fields.get(_ROPE) or {}
    change = {name: _parse_value(value, rope.get(name), option=option)}
    fields_before = _make_config(config, stated, text=text).to_dict()
    fields_after = _make_config(config, {**stated, **change}, text=text).to_dict()
    if (
        name not in fields_after and fields_after != fields_before
    ):  # the class derives other fields from this one
        return change
    if name in rope:
        return {_ROPE: {**(stated.get(_ROPE) or rope), **change}}
    model_reads = _undeclared_fields(config)
    if name in model_reads:
        return change
    if name not in fields_after:
        raise ConfigError(
            f"{option} changes nothing: the {config.model_type} model has this value already, or "
            f"its config.json states it in another field, such as {_ROPE}; leave it out, or "
            "change that file."
        )
    near = nearest_names(name, [*fields, *config.attribute_map, *rope, *model_reads])
    raise ConfigError(
        f"--config_overrides {text}: {config.model_type} has no field {name}; {near}."
    )


def _make_config(
    config: PreTrainedConfig, fields: dict[str, Any], *, text: str
) -> PreTrainedConfig:
    try:
        # The class changes the objects that it is given.
        return type(config).from_dict(copy.deepcopy(fields))
    except Exception as error:
        raise ConfigError(f"--config_overrides {text} cannot be: {one_line(error)}.") from error


def _undeclared_fields(config: PreTrainedConfig) -> set[str]:
    """Return the fields that a model reads if they are there, as Qwen3-MoE reads `head_dim`."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:  # the model's code comes from a folder
        return set()
    source = inspect.getsource(sys.modules[model_class.__module__])
    return set(re.findall(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"', source))


def _is_real(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a field may be any number, although its default is a whole one."""
    return any(
        field.name == name and "float" in str(field.type) for field in dataclasses.fields(config)
    )


def _parse_value(value: str, like: Any, *, option: str, is_real: bool = False) -> Any:
    """Return a value in the type of another one; without one, as Python reads it."""
    if isinstance(like, bool):
        if value.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{option}: expected true or false.")
        return value.lower() in ("true", "1")
    if isinstance(like, int | float):
        kind = float if is_real else type(like)
        try:
            return kind(value)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{option}: expected {noun}.") from None
    if isinstance(like, str):
        return value
    if like is None:
        literal = {"true": "True", "false": "False", "none": "None"}.get(value.lower(), value)
        try:
            return ast.literal_eval(literal)
        except (SyntaxError, ValueError):
            return value
    raise ConfigError(f"{option}: a {type(like).__name__} can only be set in a config.json.")
