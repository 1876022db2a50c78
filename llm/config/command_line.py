"""Reads a dataclass of options from the command line.

The precedence is default < TOML file (`--config`) < command line. Dashes and
underscores mean the same. `--no_flag`, `--flag false` and `--flag=false` turn a
switch off. The word `none` unsets an optional value and empties a list.
"""

import argparse
import contextlib
import functools
import logging
import re
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llm.config.duration import Duration, Tokens
from llm.config.options import (
    Field,
    bad_value_message,
    check_ranges,
    common_options,
    fields,
    format_default,
    is_too_long,
    path_options,
)
from llm.config.other_trainers import describe_unknown_option
from llm.config.program import COMMAND
from llm.config.toml import read_toml
from llm.config.unit_aliases import join_unit_aliases
from llm.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ConfigT = TypeVar("ConfigT")

logger = logging.getLogger("llm")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError."""

    def error(self, message: str) -> typing.NoReturn:
        message = re.sub(r"^argument (\S+?)(/\S+)?: ", r"\1 ", message)
        raise ConfigError(f"{message.rstrip('.')}. See --help.")


class _OptionValues(argparse.Namespace):
    """The values of options by name; a value that replaces another one is logged or refused."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value: the last one of an option counts, except for `--config`.

        Raises:
            ConfigError: A second TOML file.
        """
        previous_value = vars(self).get(name, value)
        if previous_value != value and name == "config":
            raise ConfigError(
                f"--config is given twice, as {previous_value} and {value}; give one TOML file, "
                "and options on the command line to change it."
            )
        # NaN is not equal to itself.
        if previous_value is not value and previous_value != value:
            value_text, previous_text = _format_value(value), _format_value(previous_value)
            logger.warning(
                f"--{name} is given twice: {value_text} counts, and {previous_text} does not."
            )
        super().__setattr__(name, value)


def _format_value(value: Any) -> str:
    """Return an option's value as you would type it."""
    if value is None:
        return "none"
    return format_default(tuple(value) if isinstance(value, list) else value)


def parse_options(
    cls: type[ConfigT],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    positional: str | None = None,
    usage: str | None = None,
    example: str | None = None,
    inherit: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> ConfigT:
    """Parse the options of a program: default < TOML file (`--config`) < command line.

    Args:
        cls: Option dataclass.
        argv: Arguments without the program's name.
        prog: Command that starts the program, for `--help`.
        description: One sentence about the program, for `--help`.
        positional: Option that you can give without its name. It takes the first word that belongs
            to no other option, or all of these words if it takes several values.
        usage: Rest of the usage line after the program's name; by default the positional option.
        example: Arguments of a command that `--help` shows.
        inherit: Returns options of a preset or another run. Receives the options of the file and
            the command line, which override them.

    Returns:
        The options.

    Raises:
        ConfigError: An unknown option, a value that does not fit, or an installed library that is
            missing or too old.
        SystemExit: After `--help`.
    """
    arguments = _normalize_switches([_underscore_name(word) for word in argv], cls)
    help_topic = _find_help_topic(arguments)
    if help_topic is not None:
        parser = _make_help_parser(cls, help_topic, prog=prog)
        parser.description = description
        parser.usage = f"%(prog)s {usage or _format_usage(cls, positional)}"
        sys.stdout.write(parser.format_help())
        if example is not None:
            sys.stdout.write(f"\nexample:\n  {parser.prog} {example}\n")
        raise SystemExit(0)
    parsed_options = _parse_arguments(arguments, cls, positional)
    config_path = parsed_options.pop("config", None)
    option_values = read_toml(cls, Path(config_path)) if config_path is not None else {}
    command_line_options = {
        name: _list_to_tuple(name, value) for name, value in parsed_options.items()
    }
    option_values |= join_unit_aliases(cls, command_line_options)
    if inherit is not None:
        option_values = inherit(option_values) | option_values
    config = cls(**option_values)
    check_ranges(config)
    _check_text(config)
    _check_given_paths(config, option_values, positional)
    check_library_versions()  # not for --help
    return config


def _format_usage(cls: type, positional: str | None) -> str:
    """Return the usage of a program without its name: `RUNS ... [--config FILE] ...`."""
    takes_list = any(field.is_list for field in fields(cls) if field.name == positional)
    positional_usage = "" if positional is None else f"{positional.upper()}{' ...' * takes_list} "
    return f"{positional_usage}[--config FILE] [--OPTION VALUE ...]"


def _check_given_paths(
    config: ConfigT, explicit_names: Collection[str], positional: str | None
) -> None:
    """Refuse a path that is longer than the system allows, or an empty one that the user gave."""
    for name, path in path_options(config):
        label = name.upper() if name == positional else f"--{name}"
        if not path and name in explicit_names:
            raise ConfigError(f"{label} is given an empty path; name one, or leave it out.")
        if is_too_long(path):
            raise ConfigError(
                f"{label} {path[:40]}... is longer than the system allows, or has a name in it "
                "that is; choose a shorter one."
            )


def _check_text(config: Any) -> None:
    """Refuse text that is not UTF-8. The name of a file may contain any bytes."""
    for field in fields(type(config)):
        if field.option.path:
            continue
        value = getattr(config, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and text != text.encode(errors="replace").decode():
                raise ConfigError(f"--{field.name} {text!a} is not UTF-8 text; convert it first.")


def _parse_arguments(arguments: Sequence[str], cls: type, positional: str | None) -> dict[str, Any]:
    """Return the values of the options in the arguments, and the TOML file as `config`."""
    option_fields = fields(cls)
    parser = _make_parser(option_fields)
    namespace, unknown_words = parser.parse_known_args(arguments, _OptionValues())
    parsed_options = vars(namespace)
    if positional is not None and positional not in parsed_options:
        takes_list = next(field.is_list for field in option_fields if field.name == positional)
        positional_words = _find_positional_words(unknown_words, takes_list=takes_list)
        if positional_words:
            parsed_options |= vars(parser.parse_args([f"--{positional}", *positional_words]))
            for word in positional_words:
                unknown_words.remove(word)
    if unknown_words:
        preceding_word = ["", *arguments][arguments.index(unknown_words[0])]
        reason = _describe_unknown_words(unknown_words, cls, preceding_word=preceding_word)
        raise ConfigError(f"{reason} See --help.")
    return parsed_options


def _find_positional_words(unknown_words: Sequence[str], *, takes_list: bool) -> list[str]:
    """Return the words that are neither a flag nor the value after one; one at most if no list."""
    preceding_words = ["", *unknown_words]
    positional_words = [
        word
        for preceding_word, word in zip(preceding_words, unknown_words, strict=False)
        if not word.startswith("-") and not preceding_word.startswith("-")
    ]
    return positional_words if takes_list else positional_words[:1]


def split_config_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split arguments into the TOML file of `--config`, or None, and all other arguments.

    Raises:
        ConfigError: The arguments name two files, or none after `--config`.
    """
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path)
    namespace, other_arguments = parser.parse_known_args(argv, _OptionValues())
    return vars(namespace).get("config"), other_arguments


def _normalize_switches(arguments: Sequence[str], cls: type) -> list[str]:
    """Replace `--flag=true` and `--flag true` by `--flag`, and `false` by the opposite flag."""
    opposite_flags = _opposite_flags(cls)
    normalized_arguments: list[str] = []
    for preceding_word, word in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = word.partition("=")
        if not equals:
            flag, value = preceding_word, word
        is_boolean = value.lower() in ("true", "false")
        if flag in opposite_flags and equals and not is_boolean:
            raise ConfigError(f"{flag} expects true or false, not '{value}'.")
        if flag not in opposite_flags or not is_boolean:
            normalized_arguments.append(word)
            continue
        if not equals:  # the flag has been added without its value
            normalized_arguments.pop()
        is_true = value.lower() == "true"
        normalized_arguments.append(flag if is_true else opposite_flags[flag])
    return normalized_arguments


def _opposite_flags(cls: type) -> dict[str, str]:
    """Return the opposite of the flag of each switch: `--no_x` of `--x`, and `--x` of `--no_x`."""
    opposite_flags: dict[str, str] = {}
    for field in fields(cls):
        if field.is_switch:
            for name, opposite in zip(field.names, field.opposites, strict=True):
                opposite_flags[f"--{name}"] = f"--{opposite}"
                opposite_flags[f"--{opposite}"] = f"--{name}"
    return opposite_flags


def _list_to_tuple(name: str, value: Any) -> Any:
    """Return the value of an option; a list becomes a tuple, and `none` an empty tuple."""
    if not isinstance(value, list):
        return value
    if None in value and len(value) > 1:
        raise ConfigError(f"--{name} none stands alone; leave out the rest, or none.")
    return () if None in value else tuple(value)


def _underscore_name(word: str) -> str:
    """Return an argument with underscores instead of the dashes in the name of its flag."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def option_name(word: str) -> str:
    """Return the name of the option in an argument such as `--learning-rate=1e-4`."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _find_help_topic(arguments: Sequence[str]) -> str | None:
    """Return the word after `--help`: "" if nothing follows, None without `--help`."""
    for word, next_word in zip(arguments, [*arguments[1:], ""], strict=False):
        if word in ("-h", "--help"):
            return "" if next_word.startswith("-") else next_word.lower()
        if word.startswith("--help="):
            return word.partition("=")[2].lower()
    return None


def _select_topic_fields(topic: str, cls: type) -> Sequence[Field]:
    """Return the options that `--help TOPIC` shows."""
    option_fields = fields(cls)
    if topic == "all" or not common_options(cls):
        return option_fields
    if not topic:
        field_by_name = {field.name: field for field in option_fields}
        return [field_by_name[name] for name in common_options(cls)]
    requested_topics = {*_heading_topics(topic)}
    topic_fields = [
        field
        for field in option_fields
        if requested_topics & {*_heading_topics(field.option.group)}
    ]
    if not topic_fields:
        raise ConfigError(f"--help {topic}: there is no topic of this name. {_list_topics(cls)}")
    return topic_fields


def _heading_topics(heading: str) -> list[str]:
    """Return the topics of `--help` that show a heading, such as ["kfac"] for "K-FAC"."""
    heading_words = re.sub(r"[^a-z ]", "", heading.lower()).split()
    return [word for word in heading_words if word not in ("and", "of", "the")]


def _list_topics(cls: type) -> str:
    """Return a sentence that lists a topic for every heading."""
    headings = dict.fromkeys(field.option.group for field in fields(cls))
    topics = dict.fromkeys(_heading_topics(heading)[0] for heading in headings)
    return f"--help all shows every option; --help TOPIC shows one topic: {', '.join(topics)}."


def _make_help_parser(cls: type, topic: str, *, prog: str) -> _Parser:
    """Return a parser that formats the help of a topic; `prog` is the command of the program."""
    parser = _make_parser(_select_topic_fields(topic, cls))
    parser.prog = prog
    if sys.argv[0].startswith(f"{COMMAND} "):  # the quick start is the trainer
        parser.prog = re.sub(rf"^{COMMAND} \w+", sys.argv[0], prog)
    parser.epilog = _list_topics(cls) if common_options(cls) else None
    parser.add_argument("-h", "--help", metavar="TOPIC", nargs="?", help="Show this help and exit.")
    return parser


def _make_parser(option_fields: Sequence[Field]) -> _Parser:
    """Return a parser of `--config` and the options, grouped by their headings."""
    parser = _Parser(
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
    )
    # By default, argparse takes -1e-3 for an option and reports that the option before it has no
    # value.
    parser._negative_number_matcher = re.compile(r"-(\.?\d|(inf|nan)$)")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with any of these options; the command line overrides it.",
    )
    group_by_heading: dict[str, Any] = {}
    for field in option_fields:
        heading = field.option.heading
        if heading not in group_by_heading:
            group_by_heading[heading] = parser.add_argument_group(heading)
        _add_flag(group_by_heading[heading], field)
    return parser


def _add_flag(group: Any, field: Field) -> None:
    """Add the flags of an option to a group of a parser: name, aliases and opposites."""
    if field.opposites:
        group.add_argument(
            *[f"--{name}" for name in field.opposites],
            dest=field.name,
            action="store_false",
            help=f"Opposite of --{field.name}." if field.default is True else argparse.SUPPRESS,
        )
    flags = [f"--{name}" for name in (field.name, *field.option.aliases)]
    group.add_argument(*flags, dest=field.name, help=_format_help(field), **_flag_settings(field))
    for alias in field.unit_aliases:
        converter = _make_converter(alias)
        group.add_argument(f"--{alias.name}", type=converter, help=argparse.SUPPRESS)


def _flag_settings(field: Field) -> dict[str, Any]:
    """Return argparse's settings for the values of an option; a switch has none."""
    if field.is_switch:
        return {"action": "store_true"}
    metavar = _format_metavar(field)
    settings: dict[str, Any] = {"type": _make_converter(field), "metavar": metavar}
    if field.is_list:
        settings["nargs"] = "+" if metavar else 1
        settings["metavar"] = metavar or "none"  # only a TOML file can hold tables
    if bool in field.members:
        settings |= {"nargs": "?", "const": True}
    return settings


def _format_help(field: Field) -> str:
    """Return the help of an option, with its default and its aliases, for argparse."""
    help_text = field.option.help.replace("%", "%%")
    if field.default not in (None, (), "") and not field.is_switch:
        help_text += f" (default: {format_default(field.default)})"
    alias_usages = [f"--{alias.name} {_format_metavar(alias)}" for alias in field.unit_aliases]
    if alias_usages:
        help_text += f" Aliases: {', '.join(alias_usages)}."
    return help_text


def _format_metavar(field: Field) -> str:
    """Return what stands for an option's value in `--help`, such as `N` or `{linear,cosine}`."""
    if field.choices and field.members == (str,):
        return "{" + ",".join(field.choices) + "}"
    placeholders = {
        int: "N",
        float: "X",
        Tokens: "TOKENS",
        Duration: "DURATION",
        str: "|".join(field.choices) or "TEXT",
    }
    return "|".join(placeholders[member] for member in field.members if member in placeholders)


def _make_converter(field: Field) -> Callable[[str], Any]:
    """Return the function that turns an argument into a value of an option.

    It returns the value of the first type of the option that takes the argument, and None for
    `none` if the option can be unset or emptied. Otherwise it raises argparse's error.
    """
    parser_by_type: dict[type, Callable[[str], Any]] = {
        bool: _parse_bool,
        int: int,
        float: float,
        Tokens: Tokens,
        Duration: field.parse_duration,
        str: functools.partial(_parse_choice, field=field),
    }
    # The flag cannot give a table of the TOML file.
    parsers = [parser_by_type[member] for member in field.members if member in parser_by_type]
    accepts_none = field.allows_none or (field.is_list and field.default == ())

    def convert(text: str) -> Any:
        if accepts_none and text.lower() == "none":
            return None
        for parse_type in parsers:
            with contextlib.suppress(ValueError):
                return parse_type(text)
        hint = " Separate the items with blanks." if field.is_list and "," in text else ""
        raise argparse.ArgumentTypeError(bad_value_message(field, text) + hint)

    return convert


def _parse_bool(text: str) -> bool:
    """Return the value of `true` or `false`, in any case; otherwise raise a ValueError."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _parse_choice(text: str, *, field: Field) -> str:
    """Return a text that is one of the choices, if there are any; otherwise raise a ValueError."""
    if not field.allows_text(text):
        raise ValueError(f"{text!r} is not one of {', '.join(field.choices)}")
    return text


def _describe_unknown_words(unknown_words: Sequence[str], cls: type, *, preceding_word: str) -> str:
    """Return a sentence about arguments that belong to no option, after `preceding_word`."""
    if not unknown_words[0].startswith("-"):
        return _describe_stray_value(unknown_words[0], cls, preceding_word=preceding_word)
    known_names = [name for field in fields(cls) for name in (*field.names, *field.opposites)]
    unknown_flags = [word for word in unknown_words if re.match("-+[A-Za-z]", word)]
    unknown_names = dict.fromkeys(flag.lstrip("-").partition("=")[0] for flag in unknown_flags)
    return " ".join(
        describe_unknown_option(name, ["config", *known_names], dashes="--")
        for name in unknown_names
    )


def _describe_stray_value(value: str, cls: type, *, preceding_word: str) -> str:
    """Return a sentence about a value without an option, perhaps after a switch."""
    switch_names = {name for field in fields(cls) if field.is_switch for name in field.names}
    if preceding_word.removeprefix("--") in switch_names:
        return (
            f"{preceding_word} takes true, false or no value, and '{value}' follows it; leave that "
            "out."
        )
    hint = f"; for a TOML file, write --config {value}" if value.endswith(".toml") else ""
    return f"'{value}' has no option before it{hint}."


@functools.cache  # a program may read options several times
def check_library_versions() -> None:
    """Compare the installed libraries with the requirements of the installed package.

    pip checks them once, at installation. An environment may also use the libraries of a module,
    and these can be replaced later. Nothing is imported. If the package runs without being
    installed, it has no requirements to compare with.

    Raises:
        ConfigError: A library is missing or too old.
    """
    import importlib.metadata  # --help does not need it

    from packaging.requirements import Requirement

    try:
        requirements = map(Requirement, importlib.metadata.requires("llm-trainers") or [])
    except importlib.metadata.PackageNotFoundError:
        return
    core_requirements = [
        requirement
        for requirement in requirements
        if requirement.marker is None  # of no extra
    ]
    mismatches = list(filter(None, map(_describe_version_mismatch, core_requirements)))
    if mismatches:
        raise ConfigError(
            f"This environment lacks {', '.join(mismatches)}: install it with pip, or load a "
            "module that has it."
        )


def _describe_version_mismatch(requirement: "Requirement") -> str | None:
    """Return how the installed version of a library differs from a requirement; None if not."""
    import importlib.metadata

    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement} ({requirement.name} is missing)"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement} ({requirement.name} is {version})"
