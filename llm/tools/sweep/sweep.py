"""Trains runs that differ in some options: `llm-trainers sweep base.toml --grid seed=1,2,3`.

Exit codes: 0 all members have finished, 1 a member has failed, 2 an option or a member cannot work
and nothing was started, 75 stopped by a signal, or a member was interrupted or still runs: the same
command continues.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llm.config.command_line import option_name, parse_options
from llm.config.options import missing_requirements
from llm.config.program import program
from llm.errors import ConfigError
from llm.runtime.signals import EXIT_PREEMPTED
from llm.tools.report.cell_text import align_columns
from llm.tools.sweep.ladder import ladder_lines, ladder_rungs
from llm.tools.sweep.member_state import LOG_NAME, Outcome, read_outcome
from llm.tools.sweep.members import Base, Member, check_members, check_number, grid_members
from llm.tools.sweep.options import SweepOptions
from llm.tools.sweep.optuna_trials import Trials, end_members, has_study, read_search
from llm.tools.sweep.run_members import MemberRuns
from llm.tools.sweep.slots import find_slots
from llm.trainers.gpt.main import parse_args


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    options, trainer_arguments = parse_sweep(argv)
    # The members of an array have other ranks than this command would give them.
    nproc_per_node = "auto" if options.status else options.nproc_per_node
    base, members = read_sweep(
        options, trainer_arguments, nodes=options.nodes, nproc_per_node=nproc_per_node
    )
    slots = []
    if not options.status:
        slots = find_slots(
            os.environ, nodes=options.nodes, nproc_per_node=nproc_per_node, folder=base.folder
        )
    trials = None
    if options.sampler is not None:
        trials = _open_trials(options, base, members[0], nproc_per_node=nproc_per_node)
        members = []  # the study has them
    if options.status:
        outcomes = read_outcomes(base, members if trials is None else trials.members())
        sys.stdout.write(make_table(base, outcomes))
        return exit_code(outcomes)
    runs = MemberRuns(base, members, slots=slots, nproc_per_node=nproc_per_node, trials=trials)
    runs.run()
    outcomes = runs.outcomes
    if trials is not None:  # with the trials of other commands
        outcomes = read_outcomes(base, trials.members()) | outcomes
    sys.stdout.write(make_table(base, outcomes))
    return EXIT_PREEMPTED if runs.is_stopped else exit_code(outcomes)


def _open_trials(
    options: SweepOptions, base: Base, member: Member, *, nproc_per_node: int | str
) -> Trials | None:
    """Return the trials of the study, which is created if members start; otherwise None."""
    if options.status and not has_study(base.folder):
        return None
    return Trials(
        base.folder,
        options.search,
        parse_args(base.trainer_arguments(member)),
        num_ranks=None if isinstance(nproc_per_node, str) else options.nodes * nproc_per_node,
        num_trials=options.trials,
    )


def read_outcomes(base: Base, members: Sequence[Member]) -> dict[str, Outcome]:
    """Return how far each member is, by its name."""
    return {member.name: read_outcome(base.folder / member.name) for member in members}


def parse_sweep(argv: Sequence[str]) -> tuple[SweepOptions, list[str]]:
    """Return the options of a sweep, and the arguments of the trainer that follow `--`.

    Raises:
        ConfigError: An option is unknown, or has a bad value.
    """
    arguments = list(argv)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    if [option_name(word) for word in arguments[:separator]].count("grid") > 1:
        raise ConfigError(
            "--grid is given twice; list all options after one, as in "
            "--grid learning_rate=1e-4,3e-4 seed=1,2."
        )
    try:
        options = parse_options(
            SweepOptions,
            arguments[:separator],
            prog="llm-trainers sweep",
            description="Train runs that differ in some options, each in a folder of its name. The "
            "same command again runs only those that are missing, failed or interrupted.",
            positional="base",
            usage="BASE.toml [--OPTION VALUE ...] [-- TRAINER OPTIONS]",
            example="base.toml --grid learning_rate=1e-3,2e-3 seed=1,2,3",
        )
    except ConfigError as error:
        if not str(error).startswith("There is no option"):
            raise
        raise ConfigError(
            f"{error} Options of the trainer follow after --, and --grid varies them."
        ) from error
    return options, arguments[separator + 1 :]


def read_sweep(
    options: SweepOptions,
    trainer_arguments: Sequence[str],
    *,
    nodes: int,
    nproc_per_node: int | str,
) -> tuple[Base, list[Member]]:
    """Return the options and the folder that members share, and the members.

    With `--sampler`, the members are those at the ends of the ranges.

    Raises:
        ConfigError: Nothing says what they train or where, nothing varies, or a member cannot run.
    """
    base = _make_base(options, trainer_arguments)
    if options.sampler is not None:
        if options.grid or options.ladder:
            raise ConfigError("--sampler chooses values itself; leave --grid and --ladder out.")
        if not options.search:
            raise ConfigError(
                "--sampler needs a range, as in --search learning_rate=1e-4..1e-2:log."
            )
        members = end_members(read_search(options.search))
    elif options.search:
        raise ConfigError("--search needs --sampler optuna, which chooses the values.")
    else:
        members = _make_members(options, base)
    check_members(base, members, nodes=nodes, nproc_per_node=nproc_per_node)
    return base, members


def _make_members(options: SweepOptions, base: Base) -> list[Member]:
    """Return the members of the grid, of the ladder, or of a ladder for each member of the grid.

    The sizes, lengths and costs of a ladder go to stderr, because a job script goes to stdout.
    """
    if problems := missing_requirements(options):
        raise ConfigError(" ".join(problems))
    if not options.grid and not options.ladder:
        raise ConfigError(
            "Nothing varies: name an option and its values, as in --grid learning_rate=1e-4,3e-4, "
            "or sizes, as in --ladder 60M 124M."
        )
    members = grid_members(options.grid, max_members=options.max_members)
    if not options.ladder:
        return members
    rungs = [
        rung
        for member in members
        for rung in ladder_rungs(
            base, options.ladder, options.tokens_per_parameter, grid_options=member.options
        )
    ]
    check_number(len(rungs), options.max_members)
    sys.stderr.write("".join(f"{line}\n" for line in ladder_lines(rungs)))
    return [rung.member for rung in rungs]


def _make_base(options: SweepOptions, trainer_arguments: Sequence[str]) -> Base:
    """Return the options and the folder that members share."""
    if options.base is None and not trainer_arguments:
        raise ConfigError(
            "The base of the sweep is missing: first name a TOML file with the trainer's options, "
            "as in llm-trainers sweep base.toml --grid seed=1,2."
        )
    if options.base is None and options.output_dir is None:
        raise ConfigError("--output_dir is missing: name a folder for the sweep.")
    output_dir = options.output_dir or str(Path("sweeps", Path(str(options.base)).stem))
    config_arguments = [] if options.base is None else ["--config", options.base]
    return Base(arguments=[*config_arguments, *trainer_arguments], folder=Path(output_dir))


def make_table(base: Base, outcomes: Mapping[str, Outcome]) -> str:
    """Return a row for each member with its state and numbers, and a line for each failure."""
    has_training_loss = any(
        outcome.loss is not None and not outcome.is_validated for outcome in outcomes.values()
    )
    loss_title = "training loss" if has_training_loss else "validation loss"
    set_titles = dict.fromkeys(
        title for outcome in outcomes.values() for title in outcome.set_scores
    )
    heading = ("member", "state", loss_title, *set_titles)
    rows = [
        (
            name,
            outcome.state,
            _format_number(outcome.loss),
            *(_format_number(outcome.set_scores.get(title)) for title in set_titles),
        )
        for name, outcome in outcomes.items()
    ]
    lines = align_columns([heading, *rows])
    for name, outcome in outcomes.items():
        if outcome.sentence and outcome.state != "finished":
            log_path = base.folder / name / LOG_NAME
            lines.append(f"{name} {outcome.state}: {outcome.sentence} Log: {log_path}")
    return "\n".join(lines) + "\n"


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def exit_code(outcomes: Mapping[str, Outcome]) -> int:
    """Return the exit code of a sweep."""
    states = {outcome.state for outcome in outcomes.values()}
    if "failed" in states:
        return 1
    return EXIT_PREEMPTED if states & {"interrupted", "running", "waiting"} else 0
