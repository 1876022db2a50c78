"""Options of `llm-trainers jobs`."""

from typing import Literal

from llm.config.options import option, option_group


@option_group("Job")
class SchedulerOptions:
    """The job, as every scheduler knows it."""

    scheduler: Literal["slurm", "pbs"] | None = option(None, "slurm or pbs; by default the site's.")
    site: str = option(
        "generic", "Site: a name of --list_sites, or a TOML file as --detect drafts it."
    )
    nodes: int = option(1, "Nodes of the job.", at_least=1)
    time: str = option("6:00:00", "Time limit, such as 1-12:00:00.")
    account: str = option("__ALLOCATION__", "Account, project or allocation.")
    queue: str | None = option(
        None,
        "By default the site's first one that accepts this size.",
        aliases=("partition", "qos"),
    )
    venv: str | None = option(None, "Virtual environment; by default the active one, or venv.")
    output: str | None = option(None, "File to write; by default standard output.", path=True)


@option_group("Job")
class PreparationJobOptions(SchedulerOptions):
    """A job that prepares token files: `llm-trainers jobs prepare`."""

    name: str = option("prepare", "Name of the job.")


@option_group("Job")
class JobOptions(SchedulerOptions):
    """A training job and its resources."""

    name: str = option("pretrain", "Name of the job.")
    detect: bool = option(False, "Draft the TOML file of an unlisted site from its scheduler.")
    list_sites: bool = option(False, "Print the known sites, or with --site all about one.")
    gpus_per_node: int | None = option(
        None, "Ranks per node; by default the site's, or 4.", at_least=1
    )
    cpus_per_gpu: int | None = option(
        None, "Cores per rank; by default the site's, or 8.", at_least=1
    )
    container: str | None = option(None, "Container image to run in, through Slurm's pyxis.")
    launcher: Literal["torchrun", "task_per_gpu"] | None = option(
        None,
        "torchrun on each node, or task_per_gpu: tasks of srun or mpiexec; by default the site's, "
        "or torchrun.",
    )
    skip_plan: bool = option(False, "Write the script even if the run does not fit the device.")
    spare_nodes: int = option(
        0, "Further nodes to replace those that fail the pre-flight.", at_least=0
    )
    requeue: bool = option(False, "Save before the time limit, and requeue the job (Slurm).")
    chain: bool = option(False, "Save before the time limit, and resume in the next job (PBS).")
