"""Options of `python -m llm.jobs`."""

from typing import Literal

from llm.config.options import option, option_group


@option_group("Job")
class JobOptions:
    """The job and its resources."""

    scheduler: Literal["slurm", "pbs"] | None = option(
        None, "Scheduler of the job; the option's name can be left out. By default the site's."
    )
    site: Literal["generic", "polaris", "aurora", "perlmutter", "frontier"] = option(
        "generic", "Site that sets the directives and queues of the script."
    )
    nodes: int = option(1, "Number of nodes.", at_least=1)
    gpus_per_node: int | None = option(
        None, "Ranks on each node; by default the site's, or 4.", at_least=1
    )
    cpus_per_gpu: int | None = option(
        None, "Cores for each rank; by default the site's, or 8.", at_least=1
    )
    time: str = option("6:00:00", "Time limit, as 6:00:00 or 1-12:00:00.")
    account: str = option("__ALLOCATION__", "Account, project or allocation.")
    queue: str | None = option(
        None,
        "Queue, partition or QOS; by default the site's first that takes a job of this size.",
        aliases=("partition", "qos"),
    )
    name: str = option("pretrain", "Name of the job.")
    venv: str | None = option(
        None,
        "Folder of the virtual environment; by default the one that is active at sbatch, or venv.",
    )
    container: str | None = option(None, "Image to run in instead, through Slurm's pyxis.")
    launcher: Literal["torchrun", "task_per_gpu"] | None = option(
        None,
        "How ranks are started: one torchrun on each node, or srun or mpiexec one task for "
        "each GPU; by default as the site advises, or torchrun.",
    )
    requeue: bool = option(
        False, "The job saves before its time limit and puts itself into the queue again (Slurm)."
    )
    chain: bool = option(
        False, "The job saves and ends before its time limit, and the next job resumes it (PBS)."
    )
    sweep: str | None = option(
        None, "OPTION=A,B,C: an array with one job for each value of a trainer's option (Slurm)."
    )
    output: str | None = option(None, "File to write; by default standard output.", path=True)
