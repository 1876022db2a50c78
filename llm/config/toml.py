"""A dataclass of options as a TOML file whose top-level keys are the options."""

import contextlib
import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from llm.config.options import (
    Field,
    after_unknown,
    fields,
    given,
    is_by_step,
    other_names,
    refusal,
    removed,
    with_present_names,
)
from llm.config.tokens import Tokens
from llm.errors import ConfigError


def read_toml(cls: type, path: Path, *, recorded: bool = False) -> dict[str, Any]:
    """Read a TOML file whose top-level keys are options.

    Args:
        cls: Option dataclass.
        path: The file. It may set removed options to their default.
        recorded: Whether it is the file of a run that has ended, maybe of an earlier version;
            removed options are skipped then.

    Raises:
        ConfigError: The file is missing or no TOML, a key is unknown (the error suggests the
            nearest) or removed, or a value has the wrong type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is no valid TOML: {error}.") from error
    return _options_of(cls, table, where=str(path), recorded=recorded)


def _options_of(cls: type, table: dict[str, Any], *, where: str, recorded: bool) -> dict[str, Any]:
    """Return the options that a table sets."""
    by_name = {field.name: field for field in fields(cls)}
    table = {key.replace("-", "_"): value for key, value in table.items()}
    for other, name in other_names(cls).items():
        if other in table and table.get(name, table[other]) != table[other]:
            raise ConfigError(
                f"{where} sets '{name}' and its other name '{other}' to different values; remove "
                f"'{other}'."
            )
    values: dict[str, Any] = {}
    for name, value in with_present_names(cls, table).items():
        gone = removed(cls).get(name)
        if gone is not None and (recorded or value == gone.default):
            continue
        if name not in by_name:
            rest = after_unknown(name, [*by_name], cls)
            raise ConfigError(f"{where} sets '{name}', which is no option{rest}")
        field = by_name[name]
        if recorded and is_by_step(value) and str not in field.members:
            continue
        values[field.name] = _checked(field, value, where=f"{where}: {name}")
    return values


def _checked(field: Field, value: Any, *, where: str) -> Any:
    if field.many:
        items = value if isinstance(value, list) else [value]
        single = dataclasses.replace(field, many=False)
        return tuple(
            _checked(single, item, where=f"{where} {number}" if isinstance(item, dict) else where)
            for number, item in enumerate(items, start=1)
        )
    for member in field.members:
        if dataclasses.is_dataclass(member) and isinstance(value, dict):
            return member(**_options_of(member, value, where=where, recorded=False))
        if member is float and type(value) is int:
            return float(value)
        if member is Tokens and type(value) in (int, str):
            with contextlib.suppress(ValueError):
                return Tokens(value)
        if type(value) is member and (
            member is not str or not field.choices or value in field.choices
        ):
            return value
    raise ConfigError(f"{where} {refusal(field, value)}")


def to_toml(config: Any) -> str:
    """Return every option that has a value as TOML, group by group, except one-shot options.

    Options of extensions are left out where they have their default.

    `read_toml` reads the same options back. Renamed options are written under both names, since
    other programs read the files of runs too.
    """
    lines: list[str] = []
    former: list[str] = []
    group = ""
    for field in fields(type(config)):
        value = getattr(config, field.name)
        if field.option.one_shot or (field.option.extension and value == field.default):
            continue
        if field.option.renamed_from is not None and value is not None:
            former.append(f"{field.option.renamed_from} = {_toml(value)}")
        if field.option.group != group:
            group = field.option.group
            lines.append(f"\n# {group}")
        if value is None:
            lines.append(f"# {field.name} is not set")
        else:
            lines.append(f"{field.name} = {_toml(value)}")
    if former:
        lines += ["\n# Former names of options above", *former]
    return "\n".join(lines).lstrip("\n") + "\n"


def given_as_toml(config: Any) -> str:
    """Return the options that do not have their default as TOML, one-shot options too."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in given(config).items())


def _toml(value: Any) -> str:
    if dataclasses.is_dataclass(value):  # an inline table, which may precede other options
        return "{" + ", ".join(f"{n} = {_toml(v)}" for n, v in given(value).items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are valid TOML, except surrogate pairs and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
