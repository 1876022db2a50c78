"""Reads a dataclass of options from the command line.

The precedence is default < TOML file (`--config`) < command line. Dashes and
underscores mean the same. `--no_flag`, `--flag false` and `--flag=false` turn a
switch off. The word `none` unsets an optional value and empties a list.
"""

import argparse
import functools
import logging
import re
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llm.config.duration import Duration, Tokens
from llm.config.options import (
    Field,
    bad_value_message,
    check_ranges,
    common,
    fields,
    format_default,
    is_too_long,
    join_unit_aliases,
    paths,
    unknown_option,
)
from llm.config.program import COMMAND
from llm.config.toml import read_toml
from llm.errors import ConfigError

ConfigT = TypeVar("ConfigT")

logger = logging.getLogger("llm")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError."""

    def error(self, message: str) -> typing.NoReturn:
        message = re.sub(r"^argument (\S+?)(/\S+)?: ", r"\1 ", message)
        raise ConfigError(f"{message.rstrip('.')}. See --help.")


class _Values(argparse.Namespace):
    """The values of options by name, where argparse would replace a former value without a word."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value: the last one of an option counts, except for `--config`.

        Raises:
            ConfigError: A second TOML file.
        """
        former = vars(self).get(name, value)
        if former != value and name == "config":
            raise ConfigError(
                f"--config is given twice, as {former} and {value}; give one TOML file, and "
                "options on the command line to change it."
            )
        if former != value:
            last_value, first_value = _format_value(value), _format_value(former)
            logger.warning(
                f"--{name} is given twice: {last_value} counts, and {first_value} does not."
            )
        super().__setattr__(name, value)


def _format_value(value: Any) -> str:
    """Return an option's value as you would type it."""
    if value is None:
        return "none"
    return format_default(tuple(value) if isinstance(value, list) else value)


def parse(
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
    """Read options: default < TOML file (`--config`) < command line.

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
    arguments = _with_plain_switches([_underscore_name(word) for word in argv], cls)
    topic = _help_topic(arguments)
    if topic is not None:
        if sys.argv[0].startswith(f"{COMMAND} "):  # the quick start is the trainer
            prog = re.sub(rf"^{COMMAND} \w+", sys.argv[0], prog)
        parser = _make_parser(_on_topic(topic, cls))
        parser.prog, parser.description = prog, description
        parser.usage = f"%(prog)s {usage or _usage_line(cls, positional)}"
        parser.epilog = _other_topics(cls) if common(cls) else None
        _show_help(parser, example)
        raise SystemExit(0)
    parsed = _parse_arguments(arguments, cls, positional)
    path = parsed.pop("config", None)
    values = read_toml(cls, Path(path)) if path is not None else {}
    given = {name: _as_tuple(name, value) for name, value in parsed.items()}
    values |= join_unit_aliases(cls, given)
    if inherit is not None:
        values = inherit(values) | values
    config = cls(**values)
    check_ranges(config)
    _check_text(config)
    _check_paths(config, values)
    check_library_versions()  # not for --help
    return config


def _show_help(parser: argparse.ArgumentParser, example: str | None) -> None:
    """Print the help of a program, and an example if it has one."""
    parser.add_argument("-h", "--help", metavar="TOPIC", nargs="?", help="Show this help and exit.")
    sys.stdout.write(parser.format_help())
    if example is not None:
        sys.stdout.write(f"\nexample:\n  {parser.prog} {example}\n")


def _usage_line(cls: type, positional: str | None) -> str:
    """Return the usage of a program without its name: `RUNS ... [--config FILE] ...`."""
    many = any(field.many for field in fields(cls) if field.name == positional)
    word = "" if positional is None else f"{positional.upper()}{' ...' * many} "
    return f"{word}[--config FILE] [--OPTION VALUE ...]"


def _check_paths(config: ConfigT, values: Collection[str]) -> None:
    """Refuse a given path that is empty, or longer than the system allows."""
    for name, text in paths(config):
        if not text and name in values:
            raise ConfigError(f"--{name} is given an empty path; name one, or leave it out.")
        if is_too_long(text):
            raise ConfigError(
                f"--{name} {text[:40]}... is longer than the system allows, or has a name in it "
                "that is; choose a shorter one."
            )


def _check_text(config: Any) -> None:
    """Refuse text that is not UTF-8. The name of a file may contain any bytes."""
    for field in fields(type(config)):
        value = getattr(config, field.name)
        for word in () if field.option.path else value if isinstance(value, tuple) else (value,):
            if isinstance(word, str) and word != word.encode(errors="replace").decode():
                raise ConfigError(f"--{field.name} {word!a} is not UTF-8 text; convert it first.")


def _parse_arguments(arguments: Sequence[str], cls: type, positional: str | None) -> dict[str, Any]:
    """Return the options that the words give, and the TOML file as `config`."""
    declared = fields(cls)
    parser = _make_parser(declared)
    namespace, unknown = parser.parse_known_args(arguments, _Values())
    parsed = vars(namespace)
    if positional is not None and positional not in parsed:
        many = next(field.many for field in declared if field.name == positional)
        # Words that are not a flag and do not follow one as its value.
        bare = [
            word
            for previous, word in zip(["", *unknown], unknown, strict=False)
            if not word.startswith("-") and not previous.startswith("-")
        ][: None if many else 1]
        if bare:
            parsed |= vars(parser.parse_args([f"--{positional}", *bare]))
            unknown = [word for word in unknown if word not in bare]
    if unknown:
        previous = ["", *arguments][arguments.index(unknown[0])]
        raise ConfigError(f"{_about_unknown(unknown, cls, previous=previous)} See --help.")
    return parsed


def split_config_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the TOML file that arguments name by `--config`, and the other arguments.

    Raises:
        ConfigError: They name two files, or none after `--config`.
    """
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path)
    namespace, arguments = parser.parse_known_args(argv, _Values())
    return vars(namespace).get("config"), arguments


def _with_plain_switches(arguments: Sequence[str], cls: type) -> list[str]:
    """Replace `--flag=true` and `--flag true` by `--flag`, and `false` by the opposite flag.

    Raises:
        ConfigError: A switch has a value after "=" that is neither true nor false.
    """
    opposite: dict[str, str] = {}
    for field in fields(cls):
        if field.is_switch:
            pairs = zip(field.names, field.opposites, strict=True)
            opposite |= {
                end: counterpart for pair in pairs for end, counterpart in (pair, pair[::-1])
            }
    plain: list[str] = []
    for previous, word in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = word.partition("=")
        if not equals:
            flag, value = previous, word
        if flag[2:] not in opposite or not flag.startswith("--"):
            plain.append(word)
        elif value.lower() in ("true", "false"):
            del plain[len(plain) if equals else -1 :]
            plain.append(flag if value.lower() == "true" else f"--{opposite[flag[2:]]}")
        elif equals:
            raise ConfigError(f"{flag} expects true or false, not '{value}'.")
        else:
            plain.append(word)
    return plain


def _as_tuple(name: str, value: Any) -> Any:
    """Return a list as a tuple, an empty one for `none`."""
    if not isinstance(value, list):
        return value
    if None in value and len(value) > 1:
        raise ConfigError(f"--{name} none stands alone; leave out the rest, or none.")
    return () if None in value else tuple(value)


def _underscore_name(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _help_topic(arguments: Sequence[str]) -> str | None:
    """Return the word after `--help`: "" if nothing follows, None without `--help`."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if word in ("-h", "--help"):
            return "" if following.startswith("-") else following.lower()
        if word.startswith("--help="):
            return word.partition("=")[2].lower()
    return None


def _on_topic(topic: str, cls: type) -> Sequence[Field]:
    """Return the options that `--help TOPIC` shows.

    Raises:
        ConfigError: The topic does not exist.
    """
    declared = fields(cls)
    if topic == "all" or not common(cls):
        return declared
    if not topic:
        by_name = {field.name: field for field in declared}
        return [by_name[name] for name in common(cls)]
    topics = {*_topics_of(topic)}
    shown_fields = [field for field in declared if topics & {*_topics_of(field.option.group)}]
    if not shown_fields:
        raise ConfigError(f"--help {topic}: there is no topic of this name. {_other_topics(cls)}")
    return shown_fields


def _topics_of(group: str) -> list[str]:
    """Return the topics that name a heading, such as ["kfac"] for "K-FAC"."""
    parts = re.sub(r"[^a-z ]", "", group.lower()).split()
    return [word for word in parts if word not in ("and", "of", "the")]


def _other_topics(cls: type) -> str:
    headings = dict.fromkeys(field.option.group for field in fields(cls))
    topics = ", ".join(_topics_of(heading)[0] for heading in headings)
    return f"--help all shows every option; --help TOPIC shows one topic: {topics}."


def _make_parser(declared: Sequence[Field]) -> _Parser:
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
    groups: dict[str, Any] = {}
    for field in declared:
        if field.option.group not in groups:
            groups[field.option.group] = parser.add_argument_group(field.option.group)
        _add_flag(groups[field.option.group], field)
    return parser


def _add_flag(group: Any, field: Field) -> None:
    flags = [f"--{name}" for name in (field.name, *field.option.aliases)]
    text = field.option.help.replace("%", "%%")
    if field.default not in (None, (), "") and not field.is_switch:
        text += f" (default: {format_default(field.default)})"
    aliases = [f"--{alias.name} {_metavar_of(alias)}" for alias in field.unit_aliases]
    text += f" Aliases: {', '.join(aliases)}." if aliases else ""
    if field.opposites:
        group.add_argument(
            *[f"--{name}" for name in field.opposites],
            dest=field.name,
            action="store_false",
            help=f"Opposite of --{field.name}." if field.default is True else argparse.SUPPRESS,
        )
    if field.is_switch:
        group.add_argument(*flags, dest=field.name, action="store_true", help=text)
        return
    kwargs: dict[str, Any] = {"type": _make_converter(field), "help": text, "dest": field.name}
    kwargs["metavar"] = _metavar_of(field)
    if field.many:
        kwargs["nargs"] = "+" if kwargs["metavar"] else 1
        kwargs["metavar"] = kwargs["metavar"] or "none"  # only a TOML file can hold tables
    if bool in field.members:
        kwargs.update(nargs="?", const=True)
    group.add_argument(*flags, **kwargs)
    for alias in field.unit_aliases:
        converter = _make_converter(alias)
        group.add_argument(f"--{alias.name}", type=converter, help=argparse.SUPPRESS)


def _metavar_of(field: Field) -> str:
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
    def convert(text: str) -> Any:
        empties = field.optional or (field.many and field.default == ())
        if empties and text.lower() == "none":
            return None
        for member in field.members:
            if member is bool and text.lower() in ("true", "false"):
                return text.lower() == "true"
            if member in (int, float, Tokens, Duration):
                try:
                    return field.parse_duration(text) if member is Duration else member(text)
                except ValueError:
                    continue
            if member is str and (not field.choices or text in field.choices):
                return text
        hint = " Separate the items with blanks." if field.many and "," in text else ""
        raise argparse.ArgumentTypeError(bad_value_message(field, text) + hint)

    return convert


def _about_unknown(arguments: Sequence[str], cls: type, *, previous: str) -> str:
    """Return a sentence about words that belong to no option; `previous` precedes the first one."""
    first = arguments[0]
    if not first.startswith("-"):
        for field in fields(cls):
            if field.is_switch and previous.removeprefix("--") in field.names:
                return (
                    f"{previous} takes true, false or no value, and '{first}' follows it; leave "
                    "that out."
                )
        return f"'{first}' has no option before it."
    flags = ["config", *(n for field in fields(cls) for n in (*field.names, *field.opposites))]
    names = [
        word.lstrip("-").partition("=")[0] for word in arguments if re.match("-+[A-Za-z]", word)
    ]
    return " ".join(unknown_option(name, flags, dashes="--") for name in dict.fromkeys(names))


@functools.cache  # a program may read options several times
def check_library_versions() -> None:
    """Compare the installed libraries with the requirements of the installed package.

    pip checks them once, at installation. An environment may also use the libraries of a module,
    and these can be replaced later. Nothing is imported. If the package runs without being
    installed, it has no requirements to compare with.

    Raises:
        ConfigError: A library is missing or too old.
    """
    import importlib.metadata  # imported here because --help does not need them

    from packaging.requirements import Requirement

    try:
        requirements = map(Requirement, importlib.metadata.requires("llm-trainers") or [])
    except importlib.metadata.PackageNotFoundError:
        return
    wrong = []
    for requirement in requirements:
        if requirement.marker is not None:  # of an extra
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        else:
            if requirement.specifier.contains(version, prereleases=True):
                continue
        wrong.append(f"{requirement} ({requirement.name} is {version})")
    if wrong:
        raise ConfigError(
            f"This environment lacks {', '.join(wrong)}: install it with pip, or load a module "
            "that has it."
        )
