"""Writes a job script: `python -m llm.jobs slurm --nodes 4 --time 6:00:00 -- TRAINER OPTIONS`.

What follows `--` are the trainer's options, which are checked now rather than in the night.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from llm.command_line import parse
from llm.errors import ConfigError, LLMError
from llm.files import write_whole
from llm.jobs import pbs, slurm
from llm.jobs.script import Job, read_minutes
from llm.jobs.sites import SITES, Scheduler, choose_queue
from llm.options import option
from llm.trainers.gpt.main import parse_args

_LEAST_MINUTES = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What the job shall ask for."""

    scheduler: Literal["slurm", "pbs"] | None = option(
        None, "Who runs the job; the option's name can be left out. By default the site's.",
        group="Job",
    )  # fmt: skip
    site: Literal["generic", "polaris", "aurora", "perlmutter", "frontier"] = option(
        "generic", "Fills in what a site asks for.", group="Job"
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
    venv: str = option("__VENV__", "Folder of the virtual environment.", group="Job")
    container: str | None = option(
        None, "Image to run in instead, through Slurm's pyxis.", group="Job"
    )
    launcher: Literal["torchrun", "task_per_gpu"] | None = option(
        None, "Who starts the ranks: one torchrun on each node, or srun or mpiexec one task for "
        "each GPU; by default as the site advises, or torchrun.", group="Job",
    )  # fmt: skip
    requeue: bool = option(
        False, "The job saves before its time limit and puts itself into the queue again (Slurm).",
        group="Job",
    )  # fmt: skip
    chain: bool = option(
        False, "The job saves and ends before its time limit, for a next one to go on (PBS).",
        group="Job",
    )  # fmt: skip
    sweep: str | None = option(
        None, "OPTION=A,B,C: an array with one job for each value of a trainer's option (Slurm).",
        group="Job",
    )  # fmt: skip
    output: str | None = option(
        None, "File to write; by default standard output.", group="Job", path=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    try:
        options = parse(
            JobOptions,
            words[:cut],
            prog="python -m llm.jobs",
            description="Write a job script; the trainer's options follow after --.",
            positional="scheduler",
        )
        job = make_job(options, made_by=words[:cut], trainer=words[cut + 1 :])
        text = slurm.write(job) if job.scheduler == "slurm" else pbs.write(job)
        if options.output is None:
            sys.stdout.write(text)
        else:
            _write(Path(options.output), text)
    except LLMError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def make_job(options: JobOptions, *, made_by: Sequence[str], trainer: Sequence[str]) -> Job:
    """Make every choice that the options leave open.

    Args:
        options: Options of this program.
        made_by: The arguments that they were read from.
        trainer: Arguments of the trainer.

    Raises:
        ConfigError: An option does not fit the others.
    """
    site = SITES[options.site]
    scheduler = options.scheduler or site.schedulers[0]
    _check(options, scheduler)
    if not trainer:
        raise ConfigError("The trainer's options are missing: write them after --.")
    minutes = read_minutes(options.time)
    _check_time(options, minutes)
    trainer = _with_what_the_job_needs(options, trainer, minutes)
    return Job(
        made_by=_without_output(made_by),
        scheduler=scheduler,
        site=site,
        name=options.name,
        account=options.account,
        queue=choose_queue(site, asked=options.queue, nodes=options.nodes, minutes=minutes),
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node or site.gpus_per_node,
        cpus_per_gpu=options.cpus_per_gpu or site.cpus_per_gpu,
        minutes=minutes,
        launcher=options.launcher or site.launcher,
        venv=options.venv,
        image=options.container,
        requeue=options.requeue,
        chain=options.chain,
        sweep=_read_sweep(options, trainer),
        output_dir=_output_dir(trainer),
        trainer=tuple(trainer),
    )


def _with_what_the_job_needs(
    options: JobOptions, trainer: Sequence[str], minutes: int
) -> list[str]:
    """The trainer's arguments and those that let it end in time and go on."""
    given = [word for word in trainer if word.startswith("--")]
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in given}
    words = list(trainer)
    if options.chain and "exit_after" not in named:
        # Long enough before the limit for the start of the job and the last checkpoint.
        words += ["--exit_after", str(minutes - max(15, minutes // 20))]
    if not named & {"resume_from_checkpoint", "no_resume_from_checkpoint"}:
        words.append("--resume_from_checkpoint")
    return words


def _output_dir(trainer: Sequence[str]) -> str:
    """The run's folder, from options that the trainer accepts.

    Raises:
        ConfigError: It would refuse them, or does not know where to write to.
    """
    folder = parse_args(trainer).output_dir
    if folder is None:
        raise ConfigError("--output_dir is missing among the trainer's options.")
    return folder


def _check_time(options: JobOptions, minutes: int) -> None:
    """Refuse a limit that leaves no time between start and warning."""
    for name in ("requeue", "chain"):
        if getattr(options, name) and minutes <= _LEAST_MINUTES:
            raise ConfigError(
                f"--{name} needs a --time of more than {_LEAST_MINUTES} minutes, to start, train "
                f"and save in; --time {options.time} is less."
            )


def _check(options: JobOptions, scheduler: Scheduler) -> None:
    """Refuse what a site or a scheduler has no counterpart of."""
    offered = SITES[options.site].schedulers
    if scheduler not in offered:
        raise ConfigError(
            f"--site {options.site} knows {' and '.join(offered)}, not {scheduler}; write "
            f"python -m llm.jobs {offered[0]}."
        )
    for name in ("requeue", "sweep", "container"):
        if scheduler == "pbs" and getattr(options, name):
            instead = "; --chain goes on in a next job" if name == "requeue" else ""
            raise ConfigError(f"--{name} is for slurm, not for pbs{instead}.")
    if scheduler == "slurm" and options.chain:
        raise ConfigError("--chain is for pbs; on slurm --requeue does it without a second job.")
    for name in ("name", "account", "queue"):
        value = getattr(options, name)
        if value is not None and re.search(r"\s", value):
            raise ConfigError(
                f"--{name} '{value}' has a blank in it, which a directive cannot have."
            )
    if options.requeue and options.sweep:
        raise ConfigError("--requeue and --sweep do not go together; leave one of them out.")


def _read_sweep(options: JobOptions, trainer: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    if options.sweep is None:
        return None
    name, equals, values = options.sweep.partition("=")
    found = tuple(value for value in values.split(",") if value)
    if not equals or len(found) < 2:
        raise ConfigError(
            f"--sweep {options.sweep} expects an option and its values, as in "
            "--sweep learning_rate=1e-4,3e-4."
        )
    for value in found:
        parse_args([*trainer, f"--{name}", value])
    return name, found


def _without_output(argv: Sequence[str]) -> tuple[str, ...]:
    """The arguments, but for where the script is written to."""
    kept = [word for word in argv if not word.startswith("--output=")]
    if "--output" in kept:
        place = kept.index("--output")
        del kept[place : place + 2]
    return tuple(kept)


def _write(path: Path, text: str) -> None:
    if path.exists():
        raise ConfigError(f"--output {path} is there already; remove it, or name another file.")
    try:
        write_whole(path, text)
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}.") from error


if __name__ == "__main__":
    sys.exit(main())
