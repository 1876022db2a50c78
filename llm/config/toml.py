"""Read and write a dataclass of options as TOML, with one top-level key per option."""

import contextlib
import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm.config.duration import Duration, Tokens
from llm.config.options import (
    Field,
    bad_value_message,
    fields,
    format_default,
    non_default,
    removed_options,
)
from llm.config.other_trainers import describe_unknown_option
from llm.config.unit_aliases import join_unit_aliases
from llm.errors import ConfigError, one_line

_MAX_INTEGER_BITS = 63
"""Bits of the largest integer that TOML allows, without its sign."""


def read_toml(cls: type, path: Path) -> dict[str, Any]:
    """Read options from the top-level keys of a TOML file.

    Raises:
        ConfigError: The file is missing or is not TOML, a key is unknown (the error suggests the
            nearest one), or a value has the wrong type.
    """
    text, table = _parse_toml(path)
    try:
        return _read_table(cls, table, location=str(path))
    except ConfigError as error:
        missing_packages = _missing_packages(cls, text)
        if not missing_packages:
            raise
        raise ConfigError(
            f"{error} The file has options of {' and '.join(missing_packages)}, which this "
            "installation does not have; install it."
        ) from error


def _parse_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a TOML file, and its content."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except IsADirectoryError as error:
        raise ConfigError(
            f"--config {path} is a folder; name a TOML file, such as a run's config.toml."
        ) from error
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, thousands of digits, nesting
        raise ConfigError(f"--config {path} is not valid TOML: {one_line(error)}.") from error


def _missing_packages(cls: type, text: str) -> list[str]:
    """Return the packages in the headings of `to_toml` that declare none of a class's options."""
    packages = re.findall(r"^# .* \((\S+ \S+)\)$", text, flags=re.MULTILINE)
    installed = {str(field.option.package) for field in fields(cls)}
    return [package for package in packages if package not in installed]


def _read_table(cls: type, table: dict[str, Any], *, location: str) -> dict[str, Any]:
    """Return the options that a table sets, by name, with values of their types."""
    table = {key.replace("-", "_"): value for key, value in table.items()}
    _drop_removed_options(cls, table, location=location)
    _resolve_aliases(cls, table, location=location)
    field_by_name = {
        field.name: field
        for option_field in fields(cls)
        for field in (option_field, *option_field.unit_aliases)
    }
    value_by_name: dict[str, Any] = {}
    for name, value in table.items():
        if name not in field_by_name:
            raise ConfigError(
                f"{location}: {describe_unknown_option(name, [*field_by_name], dashes='')}"
            )
        field = field_by_name[name]
        value_by_name[field.name] = _convert_value(field, value, location=f"{location}: {name}")
    return join_unit_aliases(cls, value_by_name, location=location)


def _drop_removed_options(cls: type, table: dict[str, Any], *, location: str) -> None:
    """Delete former options from a table; refuse a value other than the one that remains."""
    for name, value in removed_options(cls).items():
        if table.pop(name, value) != value:
            raise ConfigError(
                f"{location}: {name} was removed and is always {format_default(value)}; remove the "
                "line."
            )


def _resolve_aliases(cls: type, table: dict[str, Any], *, location: str) -> None:
    """Replace the aliases in a table by the names of their options."""
    name_alias_pairs = [
        (field.name, alias) for field in fields(cls) for alias in field.option.aliases
    ]
    for name, alias in name_alias_pairs:
        if alias not in table:
            continue
        value = table.pop(alias)
        if table.setdefault(name, value) != value:
            raise ConfigError(
                f"{location} sets '{name}' and its other name '{alias}' to different values; "
                f"remove '{alias}'."
            )


def _convert_value(field: Field, value: Any, *, location: str) -> Any:
    """Return a value of a TOML file in the first type of its option that takes it."""
    if type(value) is int and value.bit_length() > _MAX_INTEGER_BITS:
        raise ConfigError(f"{location} has a number of more than {_MAX_INTEGER_BITS} bits.")
    if field.is_list:
        return _convert_items(field, value, location=location)
    if field.option.json and isinstance(value, dict):
        return _convert_table_to_json(value, location=location)
    for value_type in field.members:
        if dataclasses.is_dataclass(value_type) and isinstance(value, dict):
            return value_type(**_read_table(value_type, value, location=location))
        if value_type is float and type(value) is int:
            return float(value)
        if value_type is Tokens and type(value) in (int, str):
            with contextlib.suppress(ValueError):
                return Tokens(value)
        if value_type is Duration and type(value) is str:
            with contextlib.suppress(ValueError):
                return field.parse_duration(value)
        if type(value) is value_type and (type(value) is not str or field.allows_text(value)):
            return value
    raise ConfigError(f"{location} {bad_value_message(field, value)}")


def _convert_table_to_json(table: dict[str, Any], *, location: str) -> str:
    """Return a table as JSON, which has neither dates nor times."""
    try:
        return json.dumps(table)
    except TypeError:
        raise ConfigError(
            f"{location} has a date or a time, which JSON does not have; write it as a string."
        ) from None


def _convert_items(field: Field, value: Any, *, location: str) -> tuple[Any, ...]:
    """Return the items of a list option, also from a single value; messages number its tables."""
    items = value if isinstance(value, list) else [value]
    item_field = dataclasses.replace(field, is_list=False)
    converted_items = []
    for item_number, item in enumerate(items, start=1):
        item_location = f"{location} {item_number}" if isinstance(item, dict) else location
        converted_items.append(_convert_value(item_field, item, location=item_location))
    return tuple(converted_items)


def to_toml(config: Any) -> str:
    """Return every option that has a value as TOML, group by group, except one-shot options.

    Extension options at their default are left out. `read_toml` reads the same options back.
    """
    lines: list[str] = []
    group = ""
    for field in fields(type(config)):
        value = getattr(config, field.name)
        if field.option.one_shot or (field.option.extension and value == field.default):
            continue
        if field.option.heading != group:
            group = field.option.heading
            lines.append(f"\n# {group}")
        if value is None:
            lines.append(f"# {field.name} is not set")
        else:
            lines.append(f"{field.name} = {_to_toml_value(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def values_as_toml(values: Mapping[str, Any]) -> str:
    """Return options by name as TOML, in their order; none of the values is None."""
    return "".join(f"{name} = {_to_toml_value(value)}\n" for name, value in values.items())


def _to_toml_value(value: Any) -> str:
    if dataclasses.is_dataclass(value):  # an inline table, so other options may follow it
        entries = [f"{name} = {_to_toml_value(item)}" for name, item in non_default(value).items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_to_toml_value(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are valid TOML, except surrogate pairs and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
