"""Options of `llm-trainers jobs`."""

from typing import Literal

from llm.config.options import option, option_group


@option_group("Job")
class SchedulerOptions:
    """The job, as every scheduler knows it."""

    scheduler: Literal["slurm", "pbs"] | None = option(
        None, "Scheduler of the job; by default the site's."
    )
    site: str = option(
        "generic",
        "Site that determines directives and queues: a name of --list_sites, or a TOML file of "
        "that form.",
    )
    nodes: int = option(1, "Number of nodes.", at_least=1)
    time: str = option("6:00:00", "Time limit, as 6:00:00 or 1-12:00:00.")
    account: str = option("__ALLOCATION__", "Account, project or allocation.")
    queue: str | None = option(
        None,
        "By default the site's first one that accepts a job of this size.",
        aliases=("partition", "qos"),
    )
    venv: str | None = option(
        None,
        "Folder of the virtual environment; by default the active one, or venv.",
    )
    output: str | None = option(None, "File to write; by default standard output.", path=True)


@option_group("Job")
class PreparationJobOptions(SchedulerOptions):
    """A job that prepares token files: `llm-trainers jobs prepare`."""

    name: str = option("prepare", "Name of the job.")


@option_group("Job")
class JobOptions(SchedulerOptions):
    """A training job and its resources."""

    name: str = option("pretrain", "Name of the job.")
    detect: bool = option(
        False,
        "Draft the TOML file of an unlisted site from the answers of Slurm, PBS and this node.",
    )
    list_sites: bool = option(
        False,
        "Print the known sites and who ran them; with --site, all about one.",
    )
    gpus_per_node: int | None = option(
        None, "Ranks per node; by default the site's number, or 4.", at_least=1
    )
    cpus_per_gpu: int | None = option(
        None, "Cores per rank; by default the site's number, or 8.", at_least=1
    )
    container: str | None = option(
        None, "Container image to run in instead, through Slurm's pyxis."
    )
    launcher: Literal["torchrun", "task_per_gpu"] | None = option(
        None,
        "How ranks start: by one torchrun per node, or as tasks of srun or mpiexec; by default as "
        "the site advises, or torchrun.",
    )
    skip_plan: bool = option(
        False,
        "Write the script of a run that does not fit the site's device, too.",
    )
    spare_nodes: int = option(
        0,
        "Further nodes, which replace the ones that fail the pre-flight.",
        at_least=0,
    )
    requeue: bool = option(
        False, "The job saves before its time limit and requeues itself (Slurm)."
    )
    chain: bool = option(
        False, "The job saves and ends before its time limit, and the next job resumes it (PBS)."
    )
