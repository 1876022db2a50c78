"""Options of `llm-trainers sweep`."""

from typing import Literal

from llm.config.options import option, option_group


@option_group("Sweep")
class SweepOptions:
    """The members of a sweep, and how they run."""

    base: str | None = option(
        None,
        "TOML file with the trainer's options that all members share; you can leave out the "
        "option's name. Further options of the trainer follow after --.",
        path=True,
    )
    output_dir: str | None = option(
        None,
        "Folder of the sweep, with a folder for each member; by default sweeps/NAME, named after "
        "the TOML file.",
        path=True,
    )
    grid: tuple[str, ...] = option(
        (),
        "OPTION=A,B,C: a member for each value of a trainer option. Several items, such as "
        "OPTION=A,B OTHER=C,D, make a member for each combination. Write a value with a comma "
        "in single quotes.",
    )
    sampler: Literal["optuna"] | None = option(
        None,
        "Choose the values of --search instead of a grid, one trial after another, for the lowest "
        "validation loss (without validation, training loss); needs the extra optuna.",
    )
    search: tuple[str, ...] = option(
        (),
        "OPTION=LOW..HIGH, OPTION=LOW..HIGH:log or OPTION=A,B,C: where --sampler looks for the "
        "values of a trainer option.",
        requires=("sampler",),
    )
    trials: int = option(
        20,
        "Number of trials of --sampler, counted over all commands with the same folder; failed "
        "ones count too.",
        at_least=1,
        requires=("sampler",),
    )
    max_members: int = option(
        100, "Maximum number of members; a larger sweep is refused.", at_least=1
    )
    nproc_per_node: int | Literal["auto"] = option(
        1,
        "Processes of a member on each node, started by torchrun if there are several; auto: one "
        "for each GPU.",
        at_least=1,
    )
    nodes: int = option(
        1,
        "Nodes of a member. A Slurm or PBS job with more nodes runs several members at the same "
        "time.",
        at_least=1,
    )
    status: bool = option(False, "Show the members and their states, and start nothing.")
