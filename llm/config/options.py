"""Options as a flat dataclass: declaration and checks.

A program declares its settings once, as a dataclass with fields made by
[option][llm.config.options.option]. The rest follows from the declaration: the flags
(`llm/config/command_line.py`), the TOML file (`llm/config/toml.py`), and the lists of the
documentation (`docs/generate.py`).
"""

import dataclasses
import functools
import inspect
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from llm.config.duration import Duration, Tokens, Unit
from llm.errors import ConfigError

T = TypeVar("T")
DeclarationParams = ParamSpec("DeclarationParams")

_RESERVED_PATH_BYTES = 128
"""Bytes reserved for names below a path, such as checkpoint files in a run's folder."""

CLASS_CHOICE = "package.module:Class"
"""A choice that stands for the name of any class."""

_CLASS_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

Resume = Literal["state", "fixed", "logged", "free"]
"""Whether a resumed run keeps an option's value, because the saved state depends on it (state) or
unless the user allows the change (fixed), may change it and logs the change, because rounding or
evaluation change too (logged), or may change it (free)."""


class Package(NamedTuple):
    """An installed package that declares options.

    Attributes:
        name: Its name, as pip knows it.
        version: Its version.
    """

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclasses.dataclass(frozen=True)
class Option:
    """The declaration of an option, besides its type and default.

    Attributes:
        help: One or two sentences for `--help` and the configuration page.
        group: Heading that lists it; by default the heading of its class.
        aliases: Other names that mean the same.
        units: The units of a duration that it allows, each with an alias that takes a number of
            them, such as `{"steps": "max_train_steps"}`. These aliases also take the name of a unit
            without an alias, for one of it (`epoch`).
        yields: The alias that gives way if another one is set too.
        at_least: Smallest number allowed.
        above: Numbers must be greater than this.
        at_most: Largest number allowed.
        below: Numbers must be smaller than this.
        resume: Whether a resumed run may change it; by default as its class says.
        one_shot: Whether it applies to a single start, so that `to_toml` leaves it out.
        path: Whether a string can name a file or folder.
        json: Whether a string is a JSON object; a TOML file may also have it as a table.
        needs_validation: Whether a training needs validation data for it.
        widens_trust: Whether it lets code from elsewhere run. A program that reads a run's folder
            ignores it in the folder's `config.toml`, see `restricted_options`.
        requires: Options that it depends on, as NAME or NAME=VALUE. Unless one of them is given, or
            has this value, the option is refused.
        choices: Returns the strings that it allows, from the class with all options; by default
            its type lists them. `CLASS_CHOICE` allows the name of any class.
        common: Whether `--help` shows it, although `COMMON` of the class does not name it.
        extension: Whether it belongs to an extension, as its class says.
        package: The installed package that declares it; None if it belongs to this package.
    """

    help: str
    _: dataclasses.KW_ONLY
    group: str = ""
    aliases: tuple[str, ...] = ()
    units: Mapping[Unit, str] = dataclasses.field(default_factory=dict)
    yields: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    resume: Resume | None = None
    one_shot: bool = False
    path: bool = False
    json: bool = False
    needs_validation: bool = False
    widens_trust: bool = False
    requires: tuple[str, ...] = ()
    choices: Callable[[type], Iterable[str]] | None = None
    common: bool = False
    extension: bool = False
    package: Package | None = None

    @property
    def heading(self) -> str:
        """The heading that lists it, with the installed package that declares it."""
        return self.group if self.package is None else f"{self.group} ({self.package})"


def _make_field_function(
    option_class: Callable[DeclarationParams, Option],
) -> Callable[Concatenate[Any, DeclarationParams], Any]:
    """Return a function that makes a dataclass field from a default and an option's attributes."""

    def make_field(
        default: Any, /, *args: DeclarationParams.args, **kwargs: DeclarationParams.kwargs
    ) -> Any:
        declaration = option_class(*args, **kwargs)
        return dataclasses.field(default=default, metadata={"option": declaration})

    return make_field


option = _make_field_function(Option)
"""Declare a field of an option dataclass: its default, then the attributes of its `Option`.

The default is the value when neither the TOML file nor the command line gives one."""


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def option_group(
    group: str, *, resume: Resume = "free", extension: bool = False
) -> Callable[[type[T]], type[T]]:
    """Make a frozen, keyword-only dataclass of options.

    Args:
        group: Heading that lists its options, unless they name another.
        resume: Whether a resumed run may change its options, unless they say otherwise.
        extension: Whether they belong to an extension. They are listed last. Default values are not
            recorded, so a run that does not use the extension does not need it.
    """

    def make_dataclass(cls: type[T]) -> type[T]:
        for name in inspect.get_annotations(cls):
            field = vars(cls).get(name)
            if isinstance(field, dataclasses.Field):
                option: Option = field.metadata["option"]
                declaration = dataclasses.replace(
                    option,
                    group=option.group or group,
                    resume=option.resume or resume,
                    extension=extension,
                )
                field.metadata = types.MappingProxyType({"option": declaration})
        # `GPTConfig` gets these methods. Each extension inherits all options of the core:
        # generating the methods for every extension would slow down the start of every program.
        needs_methods = not extension
        return dataclasses.dataclass(
            frozen=True, kw_only=True, init=needs_methods, repr=needs_methods, eq=needs_methods
        )(cls)

    return make_dataclass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One option and its type.

    Attributes:
        name: Name of the flag, the TOML key and the attribute.
        default: Its default.
        option: Its declaration.
        members: The types of a value, or of an item if `is_list`; without None.
        choices: The strings that it allows; all if empty.
        allows_none: Whether it may be None.
        is_list: Whether it is a tuple.
    """

    name: str
    default: Any
    option: Option
    members: tuple[type, ...]
    choices: tuple[str, ...]
    allows_none: bool
    is_list: bool

    def allows_text(self, text: str) -> bool:
        """Return whether a string is one of the choices; True if there are none."""
        takes_class = CLASS_CHOICE in self.choices and names_class(text)
        return takes_class or not self.choices or text in self.choices

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone (`--flag`) and takes no value."""
        return self.members == (bool,)

    @property
    def names(self) -> tuple[str, ...]:
        """The option's name and its aliases."""
        return (self.name, *self.option.aliases, *filter(None, self.option.units.values()))

    @property
    def unit_aliases(self) -> "tuple[Field, ...]":
        """The aliases that take a number of one unit, as fields of this number.

        They also take the name of a unit without an alias.
        """
        units_without_alias = tuple(
            unit.removesuffix("s") for unit, alias in self.option.units.items() if not alias
        )
        type_by_unit: dict[str, type] = {"tokens": Tokens, "tokens per parameter": float}
        name_types: tuple[type, ...] = (str,) if units_without_alias else ()
        return tuple(
            Field(
                name=alias,
                default=None,
                option=dataclasses.replace(self.option, units={}),
                members=(type_by_unit.get(unit, int), *name_types),
                choices=units_without_alias,
                allows_none=True,
                is_list=False,
            )
            for unit, alias in self.option.units.items()
            if alias
        )

    @property
    def opposites(self) -> tuple[str, ...]:
        """The flags that turn a switch off: `no_x` for `x`, and `x` for `no_x`."""
        if bool not in self.members:
            return ()
        return tuple(name[3:] if name.startswith("no_") else f"no_{name}" for name in self.names)

    @property
    def value_description(self) -> str:
        """A noun phrase for its values, such as `an integer`, for messages."""
        descriptions = []
        for member in self.members:
            if member is not str or not self.choices:
                descriptions.append(self._describe_type(member))
        if self.choices:
            quantifier = "one of " if len(self.choices) > 1 else ""
            descriptions.append(quantifier + ", ".join(self.choices))
        description = " or ".join(descriptions)
        return f"a list, each item {description}" if self.is_list else description

    def _describe_type(self, value_type: type) -> str:
        """Return a noun phrase for the values of a type."""
        if value_type is Duration:
            units = [*self.option.units]
            unit_list = " or ".join(filter(None, (", ".join(units[:-1]), units[-1])))
            return f"a number of {unit_list}, such as '100 {units[0]}'"
        description_by_type = {
            bool: "true or false",
            int: "an integer",
            float: "a number",
            str: "a string or a table" if self.option.json else "a string",
            Tokens: "a number of tokens such as 500M or 20B",
        }
        return description_by_type.get(value_type, f"a table [[{self.name}]] of the TOML file")

    def parse_duration(self, text: str) -> Duration:
        """Return a duration in one of the units that the option allows.

        Raises:
            ValueError: The text is not a duration, or has another unit.
        """
        duration = Duration(text)
        if duration.unit not in self.option.units:
            raise ValueError(f"{duration} has another unit")
        return duration


def names_class(text: str | None) -> bool:
    """Return whether a string has the form `package.module:Class`."""
    return text is not None and _CLASS_NAME.fullmatch(text) is not None


def fields(cls: type) -> tuple[Field, ...]:
    """Return the options of a dataclass: first its local options, then its bases' in order.

    `dataclasses.fields` returns the bases in reverse. The options of extensions come last.

    Raises:
        ConfigError: Two of the classes declare the same option, or two options share a name.
    """
    return _collect_fields(cls)


@functools.cache  # a start of a program calls it seven times
def _collect_fields(cls: type) -> tuple[Field, ...]:
    """Return the options of a class and its bases, in the order of `fields`."""
    type_by_name = typing.get_type_hints(cls)
    field_by_name = {field.name: field for field in dataclasses.fields(cls)}
    declaring_class_by_name: dict[str, type] = {}
    for base in cls.__mro__:
        for name in inspect.get_annotations(base):
            if name not in field_by_name:
                continue
            declaring_class = declaring_class_by_name.setdefault(name, base)
            if declaring_class is not base:
                raise ConfigError(_describe_repeated_option(name, (base, declaring_class)))
    option_fields = [
        _make_field(field_by_name[name], type_by_name[name], cls)
        for name in declaring_class_by_name
    ]
    _check_unique_names(option_fields)
    return tuple(sorted(option_fields, key=lambda field: field.option.extension))


def _describe_repeated_option(name: str, classes: Iterable[type]) -> str:
    """Return a sentence about an option that two classes declare, with their installed packages."""
    class_labels, remedy = [], ""
    for cls in classes:
        dataclass_field = vars(cls).get("__dataclass_fields__", {}).get(name)
        package = None if dataclass_field is None else dataclass_field.metadata["option"].package
        class_labels.append(cls.__name__ if package is None else f"{cls.__name__} in {package}")
        if package is not None:
            remedy = ", or uninstall the package"
    return (
        f"The option {name} of {' is declared again by '.join(class_labels)}; give it another name "
        f"there{remedy}."
    )


def _check_unique_names(option_fields: Iterable[Field]) -> None:
    """Refuse two options that have a name, an alias or a flag in common."""
    field_by_name: dict[str, Field] = {}
    for field in option_fields:
        for name in (*field.names, *field.opposites):
            first_field = field_by_name.setdefault(name, field)
            if first_field is not field:
                raise ConfigError(
                    f"The name {name} belongs to the options "
                    f"{_format_name_with_package(first_field)} and "
                    f"{_format_name_with_package(field)}; give one of them another name or alias."
                )


def _format_name_with_package(field: Field) -> str:
    """Return the name of an option, and the installed package that declares it."""
    package = field.option.package
    return f"{field.name} of {package}" if package else field.name


def _make_field(dataclass_field: dataclasses.Field[Any], type_hint: Any, cls: type) -> Field:
    """Return the option of a dataclass field.

    Args:
        dataclass_field: The field, made by `option`.
        type_hint: Its type, perhaps optional, a tuple or a union.
        cls: The class with all options of the program; it decides the choices.
    """
    declaration: Option = dataclass_field.metadata["option"]
    is_list = typing.get_origin(type_hint) is tuple
    if is_list:
        type_hint = typing.get_args(type_hint)[0]
    is_union = typing.get_origin(type_hint) in (typing.Union, types.UnionType)
    member_types = typing.get_args(type_hint) if is_union else (type_hint,)
    members: list[type] = []
    choices = [] if declaration.choices is None else [*declaration.choices(cls)]
    for member_type in member_types:
        if typing.get_origin(member_type) is Literal:
            choices += typing.get_args(member_type)
            members.append(str)
        elif member_type is not type(None):
            members.append(member_type)
    return Field(
        name=dataclass_field.name,
        default=dataclass_field.default,
        option=declaration,
        members=tuple(members),
        choices=tuple(choices),
        allows_none=type(None) in member_types,
        is_list=is_list,
    )


def common_options(cls: type) -> tuple[str, ...]:
    """Return the options that `--help` shows; empty if it shows all.

    The class variable COMMON names them, or their declaration says that they are common.
    """
    names: tuple[str, ...] = getattr(cls, "COMMON", ())
    declared_names = (field.name for field in fields(cls) if field.option.common)
    return (*names, *declared_names) if names else ()


def restricted_options(cls: type) -> dict[str, Any]:
    """Return the options that a run's `config.toml` may not set for other programs, with defaults.

    Only the command line and the file of `--config` set them, because a run's folder may come from
    somebody else. They run code from elsewhere, or they are for a single start, such as those
    that remove or upload files. Options that need one of them are included.
    """
    option_fields = fields(cls)
    restricted_names = {
        field.name for field in option_fields if field.option.widens_trust or field.option.one_shot
    }
    dependent_names = set()
    for field in option_fields:
        required_names = {requirement.partition("=")[0] for requirement in field.option.requires}
        if required_names and required_names <= restricted_names:
            dependent_names.add(field.name)
    restricted_names |= dependent_names
    return {field.name: field.default for field in option_fields if field.name in restricted_names}


def names_by_alias(cls: type) -> dict[str, str]:
    """Return the names of options by their aliases."""
    return {alias: field.name for field in fields(cls) for alias in field.names[1:]}


def removed_options(cls: type) -> dict[str, Any]:
    """Return former options that files may still set, each with the only value that remains.

    The class variable REMOVED of an option class has them.
    """
    removed: dict[str, Any] = {}
    for base in cls.__mro__:
        removed |= vars(base).get("REMOVED", {})
    return removed


def bad_value_message(field: Field, value: Any) -> str:
    """Return the end of a sentence about a value that an option does not allow."""
    description = field.value_description
    if Duration in field.members and re.fullmatch(r"[1-9]\d*", str(value)):
        description = description.replace("'100 ", f"'{value} ")
    return f"expects {description}, not {value!r}."


def check_ranges(config: Any) -> None:
    """Refuse numbers outside the range that their option allows.

    Raises:
        ConfigError: Names the option, the bound and the number.
    """
    for field in fields(type(config)):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            number = item.value if isinstance(item, Duration) else item
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            # `isfinite` overflows on large ints, which are finite.
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"--{field.name} must be a finite number, not {number}.")
            broken_bound = _find_broken_bound(field.option, number)
            if broken_bound is not None:
                raise ConfigError(f"--{field.name} must be {broken_bound}, not {item}.")


def _find_broken_bound(declaration: Option, number: float) -> str | None:
    """Return the first bound that a number breaks, such as `at least 1`; None without one."""
    bounds = (
        ("at least", declaration.at_least, operator.ge),
        ("greater than", declaration.above, operator.gt),
        ("at most", declaration.at_most, operator.le),
        ("smaller than", declaration.below, operator.lt),
    )
    for relation, bound, is_within in bounds:
        if bound is not None and not is_within(number, bound):
            return f"{relation} {bound:.15g}"
    return None


def non_default(config: Any) -> dict[str, Any]:
    """Return the options that differ from their default, with their values."""
    values = [(field, getattr(config, field.name)) for field in fields(type(config))]
    return {field.name: value for field, value in values if value != field.default}


def missing_requirements(config: Any) -> list[str]:
    """Return a sentence for each option in use that lacks a required one."""
    values = non_default(config)
    problems = []
    for field in fields(type(config)):
        # Pairs of a name and a value, which is "" if any value will do.
        requirements = [requirement.partition("=")[::2] for requirement in field.option.requires]
        is_met = any(name in values and value in ("", values[name]) for name, value in requirements)
        if field.name in values and requirements and not is_met:
            problems.append(_describe_unmet_requirement(config, field, requirements))
    return problems


def _describe_unmet_requirement(
    config: Any, field: Field, requirements: Sequence[tuple[str, str]]
) -> str:
    """Return a sentence about an option that needs one of several others."""
    flags = " or ".join(f"--{name} {allowed}".rstrip() for name, allowed in requirements)
    pronoun = "one of them" if len(requirements) > 1 else "that"
    value_text = f" {getattr(config, field.name)}" if Duration in field.members else ""
    sentences = [f"--{field.name}{value_text} needs {flags}; give {pronoun} too, or leave it out."]
    sentences += [
        f"--{name} auto does not count, because it may choose another value."
        for name in dict.fromkeys(name for name, _ in requirements)
        if getattr(config, name, None) == "auto"
    ]
    return " ".join(sentences)


def format_default(value: Any) -> str:
    """Return a default as you would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def path_options(config: Any) -> list[tuple[str, str]]:
    """Return the paths in the options, each with the name of its option."""
    name_path_pairs = []
    for field in fields(type(config)):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(item):  # a table of the TOML file
                name_path_pairs += [(field.name, path) for _, path in path_options(item)]
            elif field.option.path and isinstance(item, str):
                name_path_pairs.append((field.name, item))
    return name_path_pairs


def is_too_long(path: str) -> bool:
    """Return whether a path, with files below it, or a name in it exceeds the system's limits."""
    encoded_path = os.fsencode(path)
    longest_name = max(encoded_path.split(b"/"), key=len)
    has_long_name = len(longest_name) > os.pathconf("/", "PC_NAME_MAX")
    path_bytes = len(encoded_path) + _RESERVED_PATH_BYTES
    return has_long_name or path_bytes > os.pathconf("/", "PC_PATH_MAX")
