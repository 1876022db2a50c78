"""Options of `llm-trainers sweep`."""

from typing import Literal

from llm.config.options import option, option_group


@option_group("Sweep")
class SweepOptions:
    """The members of a sweep, and how they run."""

    base: str | None = option(
        None, "TOML file for all members; further options follow after --.", path=True
    )
    output_dir: str | None = option(
        None, "Folder of the sweep; by default sweeps/NAME of the TOML file.", path=True
    )
    grid: tuple[str, ...] = option(
        (),
        "OPTION=A,B OTHER=C,D: a member for each combination. Write a value with a comma in single "
        "quotes.",
    )
    sampler: Literal["optuna"] | None = option(
        None,
        "Choose values of --search, trial after trial, by the lowest validation (else training) "
        "loss; needs the extra optuna.",
    )
    search: tuple[str, ...] = option(
        (),
        "OPTION=LOW..HIGH, OPTION=LOW..HIGH:log or OPTION=A,B,C for --sampler.",
        requires=("sampler",),
    )
    trials: int = option(
        20,
        "Trials of --sampler in the folder, failed ones included.",
        at_least=1,
        requires=("sampler",),
    )
    ladder: tuple[str, ...] = option(
        (),
        "Numbers of parameters, such as 60M 124M: a member for each, with --preset "
        "compute_optimal.",
    )
    tokens_per_parameter: tuple[float, ...] = option(
        (20.0,), "Lengths of a ladder; several branch off one run.", requires=("ladder",), above=0
    )
    max_members: int = option(100, "Maximum members.", at_least=1)
    nproc_per_node: int | Literal["auto"] = option(
        1, "Processes of a member per node; auto: one per GPU.", at_least=1
    )
    nodes: int = option(
        1, "Nodes of a member; a larger job runs several members at once.", at_least=1
    )
    status: bool = option(False, "Only show the members and their states.")
