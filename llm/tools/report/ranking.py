"""Ranks runs by their final validation loss, and groups those that differ only in the seed."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from llm.config.options import fields
from llm.tools.report.cell_text import align_columns, format_count, format_option
from llm.tools.report.runs import Run, find_parent, natural_key
from llm.trainers.gpt.extensions import GPTConfig

_MAX_NAME_LENGTH = 100
"""Characters of an option's name; a longer key of config.toml names no option."""

_FREE_BUT_TRAINED_WITH = {
    *("global_batch_size", "gradient_accumulation_steps", "max_epochs", "skip_samples"),
    *("branch_from", "on_loss_spike"),
}
"""Options that a resumed run may change, and that change what is trained."""

_MEASURED_COLUMNS = ("Validation loss", "Step", "Tokens")

_VALIDATION_OPTIONS = (
    *("validation_file", "valid_data_path", "dataset_name", "dataset_config_name", "split"),
    *("data_path", "data_stage", "validation_split_percentage", "max_eval_steps", "block_size"),
    *("tokenizer_name", "vocab_file", "merges_file", "append_eos", "prepend_bos", "text_column"),
)
"""Options that decide which tokens the validation loss is the mean of; and `train_file`, of which
a part is for validation if there is no `validation_file`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A run of the ranking.

    Attributes:
        run: Index of the run in the report.
        name: Name of the run.
        problem: Why it is not ranked, such as its status; empty if it is.
        loss: Its last validation loss; None without a finite one.
        step: The step of that evaluation.
        tokens: Tokens until then; None if unknown.
        num_parameters: All parameters of its model, of a mixture of experts the active ones; None
            if unknown.
        total_parameters: All parameters, also of a mixture; None if unknown.
        options: The options that differ between the runs, by name.
    """

    run: int
    name: str
    problem: str
    loss: float | None
    step: int | None
    tokens: float | None
    num_parameters: int | None
    total_parameters: int | None
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Ranked runs of models of one size that differ at most in their seed.

    Attributes:
        members: The runs, by rising loss.
        num_seeds: Number of runs including those that are not ranked.
    """

    members: Sequence[Member]
    num_seeds: int

    @property
    def mean_loss(self) -> float:
        """The mean of the final validation losses."""
        return statistics.fmean(self.losses)

    @property
    def losses(self) -> list[float]:
        """The final validation losses."""
        return [member.loss for member in self.members if member.loss is not None]

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ between the groups."""
        return {name: value for name, value in self.members[0].options.items() if name != "seed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """Runs by rising validation loss.

    Attributes:
        options: Names of the options that differ; `seed` is the last.
        groups: The groups by rising mean loss.
        unranked: Runs that have failed, have not finished, have no finite validation loss, or have
            branches with cooldowns.
        remark: A sentence if the losses cannot be compared; empty otherwise.
    """

    options: Sequence[str]
    groups: Sequence[Group]
    unranked: Sequence[Member]
    remark: str

    @property
    def members(self) -> list[Member]:
        """The ranked runs."""
        return [member for group in self.groups for member in group.members]


class RankingRow(NamedTuple):
    """A row of the table: a group, a run of a group, or a single run.

    Attributes:
        rank: Place of the group; empty for a run of a group and for a run that is not ranked.
        run: Index of the run; None for a group of several.
        label: Name of the run, or the number of runs of the group.
        problem: Why the run is not ranked; empty if it is.
        cells: Texts by column.
    """

    rank: str
    run: int | None
    label: str
    problem: str
    cells: dict[str, str]


def rank_runs(runs: Sequence[Run]) -> Ranking | None:
    """Rank runs; None with fewer than two, or if none has finished with a validation loss.

    A mean of checkpoints has no options, and is left out. A run is not ranked if the cooldowns of
    its branches replace the end of its schedule, as in a ladder.
    """
    options_by_run = {
        run_index: _trained_options(run.config) for run_index, run in enumerate(runs) if run.config
    }
    differing_names = _find_differing_options([*options_by_run.values()])
    members = [
        _make_member(
            runs[run_index], run_index, {name: options.get(name) for name in differing_names}
        )
        for run_index, options in options_by_run.items()
    ]
    members = _exclude_trunks(members, runs)
    groups = _group_members(members)
    if len(members) < 2 or not groups:
        return None
    return Ranking(
        options=differing_names,
        groups=groups,
        unranked=[member for member in members if member.problem],
        remark=_describe_validation_change(differing_names, options_by_run.values()),
    )


def _find_differing_options(options_of_runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the options that differ between runs; `seed` is the last."""
    names = dict.fromkeys(name for options in options_of_runs for name in options)
    differing_names = [
        name for name in names if len({repr(options.get(name)) for options in options_of_runs}) > 1
    ]
    return sorted(differing_names, key=lambda name: name == "seed")


def _exclude_trunks(members: Sequence[Member], runs: Sequence[Run]) -> list[Member]:
    """Return the members; runs with cooldowns in branches get this problem."""
    parents = [find_parent(run, runs) for run in runs if run.config.get("cooldown_tokens")]
    trunk_paths = {parent.path for parent in parents if parent is not None}
    return [
        dataclasses.replace(member, problem="cooldowns in branches")
        if not member.problem and runs[member.run].path in trunk_paths
        else member
        for member in members
    ]


def _trained_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run that can change its loss: none about output, logs or machines."""
    free_names = {field.name for field in fields(GPTConfig) if field.option.resume == "free"}
    hidden_names = free_names - _FREE_BUT_TRAINED_WITH
    return {
        name: value
        for name, value in config.items()
        if name not in hidden_names and len(name) <= _MAX_NAME_LENGTH
    }


def _make_member(run: Run, run_index: int, options: dict[str, Any]) -> Member:
    """Return a run with its last validation loss."""
    evaluations = [row for row in run.rows if "eval_loss" in row]
    last_row = evaluations[-1] if evaluations else {}
    loss = last_row.get("eval_loss", math.nan)
    tokens = last_row.get("tokens", math.nan)
    return Member(
        run=run_index,
        name=run.name,
        problem=_find_problem(run, loss=loss if evaluations else None),
        loss=loss if math.isfinite(loss) else None,
        step=int(last_row["step"]) if evaluations else None,
        tokens=tokens if math.isfinite(tokens) else None,
        num_parameters=run.start.get("active_parameters", run.start.get("parameters")),
        total_parameters=run.start.get("parameters"),
        options=options,
    )


def _find_problem(run: Run, *, loss: float | None) -> str:
    """Return why a run with a last validation loss, or without one, is not ranked; else ""."""
    status = run.status.get("status")
    if status != "finished":
        return status if isinstance(status, str) else "not finished"
    if loss is None:
        return "no validation loss"
    return "" if 0 < loss < math.inf else "loss not finite"


def _group_members(members: Sequence[Member]) -> list[Group]:
    """Return the ranked runs in groups that differ at most in the seed, by rising mean loss."""
    members_by_options: dict[str, list[Member]] = {}
    for member in members:
        options = {name: value for name, value in member.options.items() if name != "seed"}
        members_by_options.setdefault(repr(options), []).append(member)
    groups = []
    for equal_members in members_by_options.values():
        for equal_models in _split_by_size(equal_members):
            ranked_members = sorted(
                (member for member in equal_models if not member.problem),
                key=lambda member: member.loss or 0.0,
            )
            if ranked_members:
                groups.append(Group(members=ranked_members, num_seeds=len(equal_models)))
    return sorted(groups, key=lambda group: group.mean_loss)


def _split_by_size(members: Sequence[Member]) -> list[list[Member]]:
    """Return runs of equal options in lists of equal models.

    The options name files, such as a config.json or a tokenizer, which may have changed. A run of
    unknown size, which may not have started, counts as one of the others if they have one size.
    """
    members_by_size: dict[int | None, list[Member]] = {}
    for member in sorted(members, key=lambda member: member.total_parameters is None):
        size = member.total_parameters
        if size is None and len(members_by_size) == 1:
            (size,) = members_by_size
        members_by_size.setdefault(size, []).append(member)
    return [*members_by_size.values()]


def _describe_validation_change(
    differing_names: Sequence[str], options_of_runs: Iterable[Mapping[str, Any]]
) -> str:
    """Return a sentence if the runs may have been evaluated on different tokens; else ""."""
    names = [name for name in _VALIDATION_OPTIONS if name in differing_names]
    if "train_file" in differing_names and not all(
        options.get("validation_file") for options in options_of_runs
    ):
        names.append("train_file")
    if not names:
        return ""
    return (
        f"The runs differ in {', '.join(names)}, so their validation losses may be means over "
        "different tokens."
    )


def format_options(values: Sequence[Any]) -> list[str]:
    """Return the values of an option as text: of paths, the last parts that tell them apart."""
    # A rate such as 0.1 * 3e-4 has 17 digits.
    rounded = [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]
    is_exact = len(set(map(repr, rounded))) == len(set(map(repr, values)))
    return _shorten_paths(
        [format_option(value) or "not set" for value in (rounded if is_exact else values)]
    )


def _shorten_paths(texts: Sequence[str]) -> list[str]:
    """Return texts; of paths only the last parts that tell them apart, at most four."""
    paths = {text for text in texts if "/" in text and " " not in text}
    for num_parts in range(1, 5):
        tails = {path: "/".join(PurePath(path).parts[-num_parts:]) for path in paths}
        if len(set(tails.values())) == len(paths):
            return [tails.get(text, text) for text in texts]
    return list(texts)


def make_ranking_table(ranking: Ranking) -> tuple[list[str], list[RankingRow]]:
    """Return the names of the columns, and the rows: the groups, then the runs without a rank."""
    members = [*ranking.members, *ranking.unranked]
    sizes = {member.num_parameters for member in members}
    columns = [*_MEASURED_COLUMNS, *(["Parameters"] if len(sizes) > 1 else []), *ranking.options]
    cells_by_run = _make_cells_by_run(members, ranking.options)
    rows = []
    for rank, group in enumerate(ranking.groups, 1):
        rows += _make_group_rows(rank, group, cells_by_run)
    rows += [
        RankingRow("", member.run, member.name, member.problem, cells_by_run[member.run])
        for member in ranking.unranked
    ]
    return columns, rows


def _make_group_rows(
    rank: int, group: Group, cells_by_run: Mapping[int, dict[str, str]]
) -> list[RankingRow]:
    """Return the row of a group, and for a group of several seeds the rows of its runs."""
    if group.num_seeds == 1:
        (member,) = group.members
        return [RankingRow(str(rank), member.run, member.name, "", cells_by_run[member.run])]
    group_cells = _join_cells(group, cells_by_run)
    rows = [RankingRow(str(rank), None, _group_label(group), "", group_cells)]
    for member in group.members:
        distinct_cells = {
            name: cells_by_run[member.run].get(name, "") for name in (*_MEASURED_COLUMNS, "seed")
        }
        rows.append(RankingRow("", member.run, member.name, "", distinct_cells))
    return rows


def _make_cells_by_run(
    members: Sequence[Member], option_names: Sequence[str]
) -> dict[int, dict[str, str]]:
    """Return the cells of each run by column."""
    cells_by_run = {member.run: _make_cells(member) for member in members}
    for name in option_names:
        texts = format_options([member.options[name] for member in members])
        for member, text in zip(members, texts, strict=True):
            cells_by_run[member.run][name] = text
    return cells_by_run


def _make_cells(member: Member) -> dict[str, str]:
    """Return the cells of a run by column, without its options."""
    counts = (member.step, member.tokens, member.num_parameters)
    step, tokens, size = ("-" if count is None else format_count(count) for count in counts)
    loss = "-" if member.loss is None else f"{member.loss:.4f}"
    return dict(zip(_MEASURED_COLUMNS, (loss, step, tokens), strict=True)) | {"Parameters": size}


def _group_label(group: Group) -> str:
    """Return the number of runs of a group, and how many of them are ranked."""
    num_ranked = len(group.members)
    if num_ranked < group.num_seeds:
        return f"{num_ranked} of {group.num_seeds} runs"
    return f"mean of {num_ranked} runs"


def _join_cells(group: Group, cells_by_run: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Return the cells of a group: mean and deviation of the loss, and what its runs share."""
    loss = f"{group.mean_loss:.4f}"
    if len(group.members) > 1:
        loss += f" ± {statistics.stdev(group.losses):.4f}"
    members = sorted(group.members, key=lambda member: (member.step or 0, member.tokens or 0))
    joined = dict(cells_by_run[members[0].run])
    for name in _MEASURED_COLUMNS[1:]:
        texts = dict.fromkeys(
            cells_by_run[member.run][name] for member in (members[0], members[-1])
        )
        joined[name] = " to ".join(texts)
    seeds = [cells_by_run[member.run].get("seed", "") for member in group.members]
    return joined | {_MEASURED_COLUMNS[0]: loss, "seed": ", ".join(sorted(seeds, key=natural_key))}


def format_ranking(ranking: Ranking) -> str:
    """Return the table as lines of text."""
    columns, rows = make_ranking_table(ranking)
    table = [["rank", "run", *columns]]
    for row in rows:
        label = f"{row.label} ({row.problem})" if row.problem else row.label
        is_group_member = not row.rank and not row.problem
        cells = [row.cells.get(column, "").replace("±", "+-") for column in columns]
        table.append([row.rank or "-" * bool(row.problem), "  " * is_group_member + label, *cells])
    remarks = filter(None, [ranking.remark])
    return "".join(f"{line}\n" for line in [*align_columns(table), *remarks])
