"""Options of `llm-trainers sweep`."""

from typing import Literal

from llm.config.options import option, option_group


@option_group("Sweep")
class SweepOptions:
    """The members of a sweep, and how they run."""

    base: str | None = option(
        None,
        "TOML file with the trainer's options that all members share; further ones follow after "
        "--.",
        path=True,
    )
    output_dir: str | None = option(
        None,
        "Folder of the sweep; by default sweeps/NAME, named after the TOML file.",
        path=True,
    )
    grid: tuple[str, ...] = option(
        (),
        "OPTION=A,B OTHER=C,D: a member for each combination of these values. Write a value with "
        "a comma in single quotes.",
    )
    sampler: Literal["optuna"] | None = option(
        None,
        "Choose the values of --search, one trial after another, for the lowest validation loss "
        "(without validation, training loss); needs the extra optuna.",
    )
    search: tuple[str, ...] = option(
        (),
        "OPTION=LOW..HIGH, OPTION=LOW..HIGH:log or OPTION=A,B,C: where --sampler looks for values.",
        requires=("sampler",),
    )
    trials: int = option(
        20,
        "Number of trials of --sampler in the folder, failed ones included.",
        at_least=1,
        requires=("sampler",),
    )
    ladder: tuple[str, ...] = option(
        (),
        "Numbers of parameters, such as 60M 124M 355M: a member for each size, with length, batch "
        "and rates of --preset compute_optimal.",
    )
    tokens_per_parameter: tuple[float, ...] = option(
        (20.0,),
        "Lengths of a ladder; several are branches with cooldowns of one run.",
        requires=("ladder",),
        above=0,
    )
    max_members: int = option(
        100, "Maximum number of members; a larger sweep is refused.", at_least=1
    )
    nproc_per_node: int | Literal["auto"] = option(
        1,
        "Processes of a member on each node; auto: one for each GPU.",
        at_least=1,
    )
    nodes: int = option(
        1,
        "Nodes of a member; a job with more nodes runs several members at the same time.",
        at_least=1,
    )
    status: bool = option(False, "Show the members and their states, and start nothing.")
