"""The members of a sweep: their options, their names, and the checks before any of them starts."""

import contextlib
import csv
import dataclasses
import hashlib
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llm.checkpoint.run_folder import RunFolder
from llm.config.command_line import option_name
from llm.config.options import fields, names_by_alias
from llm.errors import ConfigError, LLMError
from llm.trainers.gpt.main import parse_args

_MAX_NAME_LENGTH = 100
"""Characters in the name of a member; file systems allow 255 bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A run of a sweep.

    Attributes:
        name: Name of its folder in the folder of the sweep.
        options: The options that differ between members, as you would type their values; blanks
            separate the items of a list.
        parent: Name of the member that it branches from; it starts when that one has finished. A
            parent precedes its branches.
    """

    name: str
    options: Mapping[str, str]
    parent: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """The options and the folder that the members of a sweep share.

    Attributes:
        arguments: Arguments of the trainer.
        folder: Folder of the sweep.
    """

    arguments: Sequence[str]
    folder: Path

    def trainer_arguments(self, member: Member) -> list[str]:
        """Return the arguments that train a member, or resume it."""
        return [*self.arguments, *self.member_arguments(member), "--resume_from_checkpoint"]

    def member_arguments(self, member: Member) -> list[str]:
        """Return the arguments that only a member has: its options and its folder."""
        return [*option_arguments(member.options), f"--output_dir={self.folder / member.name}"]


def grid_members(grid: Sequence[str], *, max_members: int) -> list[Member]:
    """Return a member for each combination of values; the last option varies fastest.

    Args:
        grid: The option `grid`, such as `["learning_rate=1e-4,3e-4", "seed=1,2"]`.
        max_members: Maximum number of members.

    Raises:
        ConfigError: An item has no values, an option or a value is repeated, or there are more
            members than allowed.
    """
    values_by_option: dict[str, list[str]] = {}
    for item in grid:
        name, values = _parse_item(item)
        if name in values_by_option:
            raise ConfigError(
                f"--grid {item} varies {name} again; list all of its values in one item."
            )
        values_by_option[name] = values
    num_members = 1
    for values in values_by_option.values():
        num_members *= len(values)
    check_number(num_members, max_members)
    combinations = itertools.product(*values_by_option.values())
    members = []
    for combination in combinations:
        options = dict(zip(values_by_option, combination, strict=True))
        members.append(Member(name=member_name(options), options=options))
    return members


def check_number(num_members: int, max_members: int) -> None:
    """Refuse a sweep with more members than the user expects.

    Raises:
        ConfigError: There are more than `max_members`.
    """
    if num_members > max_members:
        raise ConfigError(
            f"The sweep has {num_members:,} members, and --max_members allows {max_members:,}; "
            "leave out some values, or raise the limit."
        )


def _parse_item(item: str) -> tuple[str, list[str]]:
    """Return the option and the values of an item of the grid, such as `seed=1,2`."""
    name, value_list = option_name(item), item.partition("=")[2]
    values: list[str] = []
    with contextlib.suppress(csv.Error):  # a quote is missing
        if value_list.isprintable():
            values = next(csv.reader([value_list], quotechar="'", strict=True), [])
    if not name.isidentifier() or not values or "" in values:
        raise ConfigError(
            f"--grid {item!a} expects an option and its values, as in --grid "
            "learning_rate=1e-4,3e-4."
        )
    if len(set(values)) < len(values):
        raise ConfigError(f"--grid {item} has a value twice; list each value once.")
    return name, values


def member_name(options: Mapping[str, str]) -> str:
    """Return the name of a member with these options, such as `learning_rate=1e-4,seed=1`.

    It needs no quotes in a shell. A name that is too long, or has lost characters of a
    value, ends with a digest of the options.
    """
    text = ",".join(f"{name}={value}" for name, value in options.items())
    name = re.sub(r"[^\w.+=,-]+", "_", text, flags=re.ASCII)
    if name == text and len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{name[: _MAX_NAME_LENGTH - 9]}-{digest}"


def option_arguments(options: Mapping[str, str]) -> list[str]:
    """Return options with values as you would type them, as arguments of the trainer."""
    from llm.trainers.gpt.extensions import GPTConfig

    list_options = {name for field in fields(GPTConfig) if field.is_list for name in field.names}
    arguments = []
    for name, value in options.items():
        if name in list_options and " " in value:
            arguments += [f"--{name}", *value.split()]
        else:  # a value after "=" may begin with a dash
            arguments.append(f"--{name}={value}")
    return arguments


def check_base(base: Base, members: Sequence[Member]) -> None:
    """Refuse a folder that cannot hold a sweep, and options that its members cannot vary.

    Raises:
        ConfigError: Names the folder or the option.
    """
    from llm.trainers.gpt.extensions import GPTConfig

    RunFolder(base.folder).check_usable()
    if (base.folder / "config.toml").exists():
        raise ConfigError(
            f"--output_dir {base.folder} is the folder of a run; name another folder for the sweep."
        )
    names = names_by_alias(GPTConfig)
    start_options = {field.name for field in fields(GPTConfig) if field.option.one_shot}
    flags = [word.partition("=")[0] for word in base.arguments if word.startswith("--")]
    base_options = {names.get(name, name) for name in map(option_name, flags)}
    if "output_dir" in base_options:
        raise ConfigError(
            "--output_dir follows --, but the sweep names the folder of each member; write the "
            "folder of the sweep before --."
        )
    varied_options = dict.fromkeys(name for member in members for name in member.options)
    for name in varied_options:
        if names.get(name, name) in {"output_dir", "config", *start_options}:
            raise ConfigError(
                f"--{name} cannot differ between the members of a sweep; vary another option. The "
                "sweep names a folder for each member, and starts and resumes it."
            )
        if names.get(name, name) in base_options:
            raise ConfigError(
                f"--{name} follows --, and the members of the sweep vary it; leave it out there."
            )


def check_members(
    base: Base, members: Sequence[Member], *, nodes: int, nproc_per_node: int | str
) -> None:
    """Refuse a sweep if the trainer would refuse one of its members.

    Options of finished members that a resumed run would log as changed are printed to stderr.

    Args:
        base: The options and the folder that members share.
        members: The members.
        nodes: Nodes of a member.
        nproc_per_node: Processes on each node; with `auto`, the trainer checks the layout, and
            finished members are compared on their ranks.

    Raises:
        ConfigError: The trainer refuses the options of a member, two members are equal, or the
            folder of a member holds a run with other options.
    """
    # Imported here, because it loads numpy.
    from llm.tools.jobs.job_ranks import check_ranks
    from llm.tools.sweep.training_values import check_same_run

    check_base(base, members)
    num_ranks = None if isinstance(nproc_per_node, str) else nodes * nproc_per_node
    member_by_config: dict[str, Member] = {}
    member_by_repository: dict[str, Member] = {}
    names_by_change: dict[str, list[str]] = {}
    for member in members:
        RunFolder(base.folder / member.name).check_usable()
        if member.parent is not None and not (base.folder / member.parent / "config.toml").exists():
            _check_new_branch(base, member)
            continue  # it takes its options from its parent, which has not started
        try:
            config = parse_args(base.trainer_arguments(member))
            if config.eval_only:
                raise ConfigError("--eval_only trains nothing; leave it out.")
            if not isinstance(nproc_per_node, str):
                check_ranks(config, nodes=nodes, ranks_per_node=nproc_per_node)
            changes = check_same_run(config, num_ranks=num_ranks)
        except LLMError as error:
            raise ConfigError(f"The member {member.name} cannot run: {error}") from error
        other_member = member_by_config.setdefault(
            repr(dataclasses.replace(config, output_dir=None)), member
        )
        if other_member is not member:
            raise ConfigError(
                f"The members {other_member.name} and {member.name} are the same run; leave one of "
                "them out."
            )
        if config.hub_model_id is not None:
            other_member = member_by_repository.setdefault(config.hub_model_id, member)
            if other_member is not member:
                raise ConfigError(
                    f"The members {other_member.name} and {member.name} would push to the same "
                    f"--hub_model_id {config.hub_model_id}; leave it out, or vary it."
                )
        if changes:
            names_by_change.setdefault("; ".join(changes), []).append(member.name)
    for text, names in names_by_change.items():
        sys.stderr.write(f"Finished with other settings ({text}): {', '.join(names)}.\n")


def _check_new_branch(base: Base, member: Member) -> None:
    """Refuse a branch of a parent that has not started, if its folder holds a run."""
    folder = base.folder / member.name
    if (folder / "config.toml").exists():
        raise ConfigError(
            f"{folder} holds a run that does not branch from {member.parent}. Give the sweep "
            "another --output_dir, or remove this folder."
        )
