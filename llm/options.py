"""Options as a flat dataclass: declaration, TOML file, Markdown page.

A program declares its settings once, as a dataclass whose fields are made by
[option][llm.options.option]. The rest follows from the declaration: the flags
(`llm/command_line.py`), the TOML file, the page of the documentation.

"""

import dataclasses
import difflib
import json
import math
import operator
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from llm.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What a field says about itself besides its type and default."""

    help: str
    group: str
    aliases: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    resume: Literal["fixed", "free"] = "free"
    one_shot: bool = False
    path: bool = False


def option(
    default: Any,
    help: str,
    *,
    group: str,
    aliases: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    resume: Literal["fixed", "free"] = "free",
    one_shot: bool = False,
    path: bool = False,
) -> Any:
    """Declare a field of an option dataclass.

    Args:
        default: Value when neither the TOML file nor the command line gives one.
        help: One or two sentences for `--help` and the configuration page.
        group: Heading under which it is listed.
        aliases: Other names that mean the same.
        at_least: Smallest number allowed.
        above: Numbers must be greater than this.
        at_most: Largest number allowed.
        below: Numbers must be smaller than this.
        resume: `fixed` when a resumed run must keep the value of the run it continues.
        one_shot: An order for one start and no setting of the run: `to_toml` leaves it out.
        path: Whether a text names a file or folder, or may do so.
    """
    described = Option(
        help=help,
        group=group,
        aliases=aliases,
        at_least=at_least,
        above=above,
        at_most=at_most,
        below=below,
        resume=resume,
        one_shot=one_shot,
        path=path,
    )
    return dataclasses.field(default=default, metadata={"option": described})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One option with its type taken apart."""

    name: str
    default: Any
    option: Option
    members: tuple[type, ...]
    choices: tuple[str, ...]
    optional: bool
    many: bool

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone (`--flag`) and takes no value."""
        return self.members == (bool,)

    @property
    def names(self) -> tuple[str, ...]:
        """The option's name and its aliases."""
        return (self.name, *self.option.aliases)

    @property
    def opposites(self) -> tuple[str, ...]:
        """The flags that turn a switch off: `no_x` for `x`, and `x` for `no_x`."""
        if bool not in self.members:
            return ()
        return tuple(name[3:] if name.startswith("no_") else f"no_{name}" for name in self.names)

    @property
    def kind(self) -> str:
        """What a value looks like, in words."""
        words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        kinds = [words[member] for member in self.members if member is not str or not self.choices]
        if self.choices:
            kinds.append(("one of " if len(self.choices) > 1 else "") + ", ".join(self.choices))
        text = " or ".join(kinds)
        return f"a list, each item {text}" if self.many else text


def fields(cls: type) -> list[Field]:
    """The options that a dataclass declares, in their order."""
    hints = typing.get_type_hints(cls)
    return [
        _field(item.name, hints[item.name], item.default, item.metadata["option"])
        for item in dataclasses.fields(cls)
    ]


def _field(name: str, hint: Any, default: Any, described: Option) -> Field:
    many = typing.get_origin(hint) is tuple
    if many:
        hint = typing.get_args(hint)[0]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if union else (hint,)
    members: list[type] = []
    choices: list[str] = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            choices += typing.get_args(part)
            members.append(str)
        elif part is not type(None):
            members.append(part)
    return Field(
        name=name,
        default=default,
        option=described,
        members=tuple(members),
        choices=tuple(choices),
        optional=type(None) in parts,
        many=many,
    )


@dataclasses.dataclass(frozen=True)
class Removed:
    """An option of an earlier version; a program lists its own in a class variable REMOVED.

    Attributes:
        default: Its value in the files of runs that left it alone.
        instead: What to do without it, the end of a sentence.
    """

    default: Any
    instead: str


def removed(cls: type) -> dict[str, Removed]:
    """The options that a program no longer has, by name."""
    return getattr(cls, "REMOVED", {})


def after_unknown(name: str, names: list[str], cls: type) -> str:
    """The rest of a sentence about a name that is no option: what to use, or did you mean.

    Args:
        name: The name.
        names: Those that could have been meant.
        cls: Option dataclass.
    """
    gone = removed(cls).get(name.removeprefix("no_"))
    if gone is not None:
        return f" any more: {gone.instead}."
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "."


def read_toml(cls: type, path: Path, *, recorded: bool = False) -> dict[str, Any]:
    """Read a TOML file whose top-level keys are options.

    Args:
        cls: Option dataclass.
        path: The file. Options that are gone may stand in it with their default.
        recorded: Whether it describes a run that is over, maybe one of an earlier version: what
            no longer has a meaning is left out.

    Raises:
        ConfigError: The file is absent or no TOML, a key is unknown (its nearest
            neighbour is named) or gone, or a value has the wrong type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is no valid TOML: {error}.") from error
    declared = fields(cls)
    by_name = {name: field for field in declared for name in field.names}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        gone = removed(cls).get(name)
        if gone is not None and (recorded or value == gone.default):
            continue
        if name not in by_name:
            rest = after_unknown(name, [*by_name], cls)
            raise ConfigError(f"{path} sets '{key}', which is no option{rest}")
        field = by_name[name]
        if recorded and _by_step(value) and str not in field.members:
            continue
        values[field.name] = _checked(field, value, where=f"{path}: {key}")
    return values


def _checked(field: Field, value: Any, *, where: str) -> Any:
    if field.many:
        items = value if isinstance(value, list) else [value]
        single = dataclasses.replace(field, many=False)
        return tuple(_checked(single, item, where=where) for item in items)
    for member in field.members:
        if member is float and type(value) is int:
            return float(value)
        if type(value) is member and (
            member is not str or not field.choices or value in field.choices
        ):
            return value
    raise ConfigError(f"{where} {refusal(field, value)}")


def refusal(field: Field, value: Any) -> str:
    """What an option expects in place of a value that does not fit."""
    hint = " A schedule VALUE@STEP is no longer read; give one value." if _by_step(value) else ""
    return f"expects {field.kind}, not {value!r}.{hint}"


def _by_step(value: Any) -> bool:
    """Whether a value is a schedule, which some options of K-FAC had in earlier versions."""
    return isinstance(value, str) and re.match(r"[^@]+@0(,|$)", value) is not None


def check_ranges(config: Any) -> None:
    """Refuse numbers outside the range that their option allows.

    Raises:
        ConfigError: Names the option, the bound and the number.
    """
    for field in fields(type(config)):
        value = getattr(config, field.name)
        rule = field.option
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if not math.isfinite(number):
                raise ConfigError(f"--{field.name} must be a finite number, not {number}.")
            broken = [
                f"{words} {bound:g}"
                for words, bound, holds in (
                    ("at least", rule.at_least, operator.ge),
                    ("greater than", rule.above, operator.gt),
                    ("at most", rule.at_most, operator.le),
                    ("smaller than", rule.below, operator.lt),
                )
                if bound is not None and not holds(number, bound)
            ]
            if broken:
                raise ConfigError(f"--{field.name} must be {broken[0]}, not {number}.")


def shown(value: Any) -> str:
    """A default as a user would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def to_toml(config: Any) -> str:
    """Write every option that has a value as TOML, group by group, but for one-shot options.

    Reading the text back with `read_toml` gives the same options.
    """
    lines: list[str] = []
    group = ""
    for field in fields(type(config)):
        value = getattr(config, field.name)
        if field.option.one_shot:
            continue
        if field.option.group != group:
            group = field.option.group
            lines.append(f"\n# {group}")
        if value is None:
            lines.append(f"# {field.name} is not set")
        else:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are TOML's as well.
    return json.dumps(value)


def to_markdown(cls: type) -> str:
    """Describe every option in one Markdown table a group."""
    lines: list[str] = []
    group = ""
    for field in fields(cls):
        if field.option.group != group:
            group = field.option.group
            lines += ["", f"## {group}", "", "| Option | Default | Meaning |", "|---|---|---|"]
        names = ", ".join(f"`{name}`" for name in field.names)
        default = "" if field.default in (None, (), "") else f"`{shown(field.default)}`"
        text = field.option.help.replace("|", "\\|")
        if field.choices and field.members == (str,):
            text += " One of " + ", ".join(f"`{choice}`" for choice in field.choices) + "."
        if field.option.resume == "fixed":
            text += " *Fixed on resume.*"
        if field.option.one_shot:
            text += " *Not recorded.*"
        lines.append(f"| {names} | {default} | {text} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def paths(config: Any) -> list[tuple[str, str]]:
    """The files and folders that options name, or may name: option and path."""
    found = []
    for field in fields(type(config)):
        value = getattr(config, field.name)
        words = value if isinstance(value, tuple) else (value,)
        found += [(field.name, w) for w in words if field.option.path and isinstance(w, str)]
    return found
