"""Options of `python -m llm.jobs`."""

from dataclasses import dataclass
from typing import Literal

from llm.config.options import option


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The job and its resources."""

    scheduler: Literal["slurm", "pbs"] | None = option(
        None, "Scheduler of the job; the option's name can be left out. By default the site's.",
        group="Job",
    )  # fmt: skip
    site: Literal["generic", "polaris", "aurora", "perlmutter", "frontier"] = option(
        "generic", "Site whose directives and queues the script has.", group="Job"
    )
    nodes: int = option(1, "Number of nodes.", group="Job", at_least=1)
    gpus_per_node: int | None = option(
        None, "Ranks on each node; by default the site's, or 4.", group="Job", at_least=1
    )
    cpus_per_gpu: int | None = option(
        None, "Cores for each rank; by default the site's, or 8.", group="Job", at_least=1
    )
    time: str = option("6:00:00", "Time limit, as 6:00:00 or 1-12:00:00.", group="Job")
    account: str = option("__ALLOCATION__", "Account, project or allocation.", group="Job")
    queue: str | None = option(
        None, "Queue, partition or QOS; by default the site's first that takes a job of this size.",
        group="Job", aliases=("partition", "qos"),
    )  # fmt: skip
    name: str = option("pretrain", "Name of the job.", group="Job")
    venv: str | None = option(
        None, "Folder of the virtual environment; by default the one that is active at sbatch, or "
        "venv.", group="Job",
    )  # fmt: skip
    container: str | None = option(
        None, "Image to run in instead, through Slurm's pyxis.", group="Job"
    )
    launcher: Literal["torchrun", "task_per_gpu"] | None = option(
        None, "How ranks are started: one torchrun on each node, or srun or mpiexec one task for "
        "each GPU; by default as the site advises, or torchrun.", group="Job",
    )  # fmt: skip
    requeue: bool = option(
        False, "The job saves before its time limit and puts itself into the queue again (Slurm).",
        group="Job",
    )  # fmt: skip
    chain: bool = option(
        False, "The job saves and ends before its time limit, and the next job resumes it (PBS).",
        group="Job",
    )  # fmt: skip
    sweep: str | None = option(
        None, "OPTION=A,B,C: an array with one job for each value of a trainer's option (Slurm).",
        group="Job",
    )  # fmt: skip
    output: str | None = option(
        None, "File to write; by default standard output.", group="Job", path=True
    )
