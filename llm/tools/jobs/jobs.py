"""Writes a job script: `llm-trainers jobs slurm --nodes 4 --time 6:00:00 -- TRAINER OPTIONS`.

The trainer's options follow `--` and are checked when the script is written. The script fills the
template `slurm.sh` or `pbs.sh` with the options and the settings in `sites.toml`.
`llm-trainers jobs prepare slurm ...` writes one that prepares token files, and `llm-trainers jobs
sweep slurm ... -- SWEEP OPTIONS` an array with a job for each member of a sweep.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from llm.config.command_line import option_name, parse_options
from llm.config.program import program
from llm.config.shell import shell_line
from llm.errors import ConfigError
from llm.runtime.logging import counted
from llm.runtime.world import ignore_ranks
from llm.tools.jobs.detection import detect_site
from llm.tools.jobs.job_chain import make_job_chain
from llm.tools.jobs.job_ranks import check_epochs, check_ranks, check_schedule
from llm.tools.jobs.notes import describe_script
from llm.tools.jobs.options import JobOptions
from llm.tools.jobs.planned_memory import plan_run
from llm.tools.jobs.preparation_job import write_preparation_job
from llm.tools.jobs.scripts import (
    check_job,
    check_queue_option,
    find_cache_folders,
    format_walltime,
    load_template,
    quoted_rows,
    read_minutes,
    split_arguments,
    without_output,
    write_file,
    write_script,
)
from llm.tools.jobs.site_tables import site_description, site_table
from llm.tools.jobs.sites import Site, choose_queue, find_site, known_sites
from llm.tools.plan.options import find_float8_problems
from llm.tools.sweep.members import Base, Member
from llm.tools.sweep.options import SweepOptions
from llm.tools.sweep.sweep import parse_sweep, read_outcomes, read_sweep
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.main import parse_args

_MIN_MINUTES = 30
"""Time for a job to start, train and save."""

_DESCRIPTION = (
    "Write a job script; the trainer's options follow after --. With the word prepare or sweep "
    "first, it prepares token files or trains the members of a sweep: llm-trainers jobs prepare "
    "--help."
)
_SWEEP_DESCRIPTION = (
    "Write the script of an array with a job for each unfinished member of a sweep; the options of "
    "llm-trainers sweep follow after --."
)
_NO_SWEEP_OPTIONS = "The options of llm-trainers sweep are missing: write them after --."
_NO_TRAINER_OPTIONS = "The trainer's options are missing: write them after --."

# Names from the scripts of Megatron-LM: `TP_SIZE=8 PP_SIZE=2 sbatch SCRIPT`.
_VARIABLE_BY_OPTION = {
    "tensor_parallel_size": "TP_SIZE",
    "pipeline_parallel_size": "PP_SIZE",
    "num_layers": "NUM_LAYERS",
    "hidden_size": "HIDDEN_SIZE",
    "num_attention_heads": "NUM_ATTENTION_HEADS",
}


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    with _without_repeated_warnings():
        match list(argv):
            case ["prepare", *arguments]:
                return write_preparation_job(arguments)
            case ["output_dir", *arguments]:
                return _print_output_dir(arguments)
            case ["sweep", *arguments]:
                return _write_training_job(arguments, is_sweep=True)
            case arguments:
                return _write_training_job(arguments, is_sweep=False)


@contextlib.contextmanager
def _without_repeated_warnings() -> Iterator[None]:
    """Log each warning once, although the trainer's options are read for each check and member."""
    messages = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_repeated = message in messages
        messages.add(message)
        return not is_repeated

    logger = logging.getLogger("llm")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _print_output_dir(trainer_arguments: Sequence[str]) -> int:
    """Print the folder of a run, which job scripts ask for; return the exit code."""
    output_dir = parse_args(trainer_arguments).output_dir
    if output_dir is None:
        raise ConfigError("The job script needs an output_dir; add it to the trainer's options.")
    sys.stdout.write(f"{output_dir}\n")
    return 0


def _write_training_job(arguments: Sequence[str], *, is_sweep: bool) -> int:
    """Write the script of a run or of a sweep, or answer about sites; return the exit code."""
    command, trainer_arguments = split_arguments(arguments)
    if not trainer_arguments and not _asks_about_sites(command):
        raise ConfigError(_NO_SWEEP_OPTIONS if is_sweep else _NO_TRAINER_OPTIONS)
    options = _parse_options(command, is_sweep=is_sweep)
    if options.list_sites:
        return _print_sites(options.site)
    if options.detect:
        return _write_draft(options.output)
    ignore_ranks()  # an interactive shell of srun or mpiexec has the variables of a rank
    if is_sweep:
        text, notes = array_script(options, command=command, sweep_arguments=trainer_arguments)
    else:
        text, notes = job_script(options, command=command, trainer_arguments=trainer_arguments)
    write_script(options.output, text, notes)
    return 0


def _asks_about_sites(command: Sequence[str]) -> bool:
    """Return whether a command writes no script: it asks for sites, for a draft or for help."""
    option_names = {option_name(word) for word in command if word.startswith("--")}
    return "-h" in command or not option_names.isdisjoint({"detect", "list_sites", "help"})


def _parse_options(command: Sequence[str], *, is_sweep: bool) -> JobOptions:
    """Read the options of the job, which stand before `--`."""
    if any(option_name(word) == "sweep" for word in command if word.startswith("--")):
        raise ConfigError(
            "--sweep is now a program with a table of the results: write llm-trainers jobs sweep "
            "SCHEDULER -- --output_dir FOLDER --grid OPTION=A,B -- TRAINER OPTIONS."
        )
    return parse_options(
        JobOptions,
        command,
        prog="llm-trainers jobs sweep" if is_sweep else "llm-trainers jobs",
        description=_SWEEP_DESCRIPTION if is_sweep else _DESCRIPTION,
        positional="scheduler",
        usage=f"SCHEDULER [--OPTION VALUE ...] -- {'SWEEP' if is_sweep else 'TRAINER'} OPTIONS",
        example="slurm --time 2:00:00 --output sweep.sh -- base.toml --grid seed=1,2,3"
        if is_sweep
        else "slurm --nodes 8 --requeue --output job.sh -- --config run.toml",
    )


def _print_sites(name: str) -> int:
    """Print the known sites, or all about one of them; return the exit code."""
    site = find_site(name)
    is_chosen = name != JobOptions().site
    lines = site_description(name, site) if is_chosen else site_table(known_sites())
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _write_draft(path: str | None) -> int:
    """Write the file of the site of this machine; return the exit code."""
    text, unknown = detect_site()
    write_file(path, text)
    sys.stderr.write("".join(f"Not found: {item}.\n" for item in unknown))
    if path is not None:
        command = shell_line(["llm-trainers", "jobs", "--site", Path(path)])
        sys.stderr.write(f"Complete the draft, and use it: {command}\n")
    return 0


def array_script(
    options: JobOptions, *, command: Sequence[str], sweep_arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the text of an array with a job for each unfinished member of a sweep, and sentences.

    Args:
        options: Options of this program.
        command: The arguments of this program, repeated at the head of the script.
        sweep_arguments: Arguments of `llm-trainers sweep`.

    Raises:
        ConfigError: An option does not fit the others, or a member cannot run.
    """
    site = find_site(options.site)
    sweep_options, trainer_arguments = parse_sweep(sweep_arguments)
    _check_array_options(sweep_options)
    base, members = read_sweep(
        sweep_options,
        trainer_arguments,
        nodes=options.nodes,
        nproc_per_node=options.gpus_per_node or site.gpus_per_node,
    )
    array_members, member_notes = _select_array_members(base, members)
    sweep_words, _ = split_arguments(sweep_arguments)
    text, notes = job_script(
        options,
        command=["sweep", *command, "--", *sweep_words],
        trainer_arguments=base.arguments,
        member_arguments=[base.member_arguments(member) for member in array_members],
    )
    status = ["llm-trainers", "sweep", *sweep_words, "--status"]
    status += ["--", *trainer_arguments] if trainer_arguments else []
    status_note = f"Later, see how far the members are: {shell_line(status)}"
    return text, [*member_notes, *notes, status_note]


def _check_array_options(options: SweepOptions) -> None:
    """Refuse options of a sweep that the jobs of an array cannot have."""
    if options.sampler is not None:
        raise ConfigError(
            "--sampler chooses values while members train, and the jobs of an array are fixed; "
            "start llm-trainers sweep itself in one or several jobs."
        )
    if (options.nodes, options.nproc_per_node) != (1, 1):
        raise ConfigError(
            "--nodes and --nproc_per_node of llm-trainers sweep are the job's --nodes and "
            "--gpus_per_node here; write them in front of --."
        )


def _select_array_members(base: Base, members: Sequence[Member]) -> tuple[list[Member], list[str]]:
    """Return the members that jobs can train now, and sentences about the others."""
    outcomes = read_outcomes(base, members)
    finished_names = {name for name in outcomes if outcomes[name].state == "finished"}
    running_names = {name for name in outcomes if outcomes[name].state == "running"}
    idle_members = [
        member for member in members if member.name not in finished_names | running_names
    ]
    array_members = [member for member in idle_members if member.parent in {None, *finished_names}]
    if not array_members:
        raise ConfigError(
            f"All members of {base.folder} have finished, run now, or branch from one that runs."
            if running_names
            else f"All members of {base.folder} have finished."
        )
    notes = []
    if finished_names:
        verb = "has" if len(finished_names) == 1 else "have"
        notes.append(f"Left out: {counted(len(finished_names), 'member')} that {verb} finished.")
    if running_names:
        verb = "runs" if len(running_names) == 1 else "run"
        notes.append(f"Left out: {counted(len(running_names), 'member')} that {verb} now.")
    if num_branches := len(idle_members) - len(array_members):
        notes.append(
            f"Left out: {counted(num_branches, 'branch')} of runs that have not finished; write "
            "the script again when they have."
        )
    return array_members, notes


def job_script(
    options: JobOptions,
    *,
    command: Sequence[str],
    trainer_arguments: Sequence[str],
    member_arguments: Sequence[Sequence[str]] = (),
) -> tuple[str, list[str]]:
    """Return the text of a job script, and sentences about it.

    Args:
        options: Options of this program.
        command: The arguments of this program, repeated at the head of the script.
        trainer_arguments: Arguments of the trainer.
        member_arguments: Further arguments for each job of an array; empty for a single job.

    Raises:
        ConfigError: An option does not fit the others, or the trainer refuses its arguments.
    """
    if not trainer_arguments:
        raise ConfigError(_NO_TRAINER_OPTIONS)
    job, site = _place_job(options, num_members=len(member_arguments))
    check_queue_option(command, job, site)
    minutes = read_minutes(job.time)
    exit_after = None
    if job.scheduler == "pbs" and minutes > _MIN_MINUTES:
        # PBS kills a job soon after its time limit, so the run ends by itself. The job needs time
        # to start and to save its last checkpoint.
        exit_after = minutes - max(15, minutes // 20)
    first_arguments = [*trainer_arguments, *(member_arguments[0] if member_arguments else ())]
    first_config = parse_args(first_arguments)
    sets_end = first_config.exit_after is not None
    added_arguments = _resume_arguments(trainer_arguments, None if sets_end else exit_after)
    all_arguments = [*trainer_arguments, *added_arguments]
    arguments_of_runs = [[*all_arguments, *arguments] for arguments in member_arguments or [()]]
    *_, config = [_check_run(job, site, arguments) for arguments in arguments_of_runs]

    plan: list[str] = []
    hours = None
    if site.device is not None and not job.skip_plan:
        plan, hours = plan_run(job, site.device, arguments_of_runs[0], len(member_arguments))
    job_chain = None
    if job.chain:
        assert config.exit_after is not None  # --chain is refused for a shorter time
        job_chain = make_job_chain(job, site, hours=hours, minutes=config.exit_after)
    text = load_template(f"{job.scheduler}.sh").render(
        job=job,
        site=site,
        torchrun=job.launcher == "torchrun",
        cache_folders=find_cache_folders(job),
        walltime=format_walltime(minutes),
        members=[" ".join(chain(*quoted_rows(arguments))) for arguments in member_arguments],
        has_whole_nodes=job.nodes > 1
        or (site.device is not None and job.gpus_per_node == site.gpus_per_node),
        exit_after=exit_after,
        chain=job_chain,
        options=_option_rows(all_arguments),
        made_by=shell_line(without_output(command)),
    )
    notes = describe_script(
        job,
        site,
        config,
        trainer_arguments=trainer_arguments,
        added_arguments=[
            word
            for word in added_arguments
            if word != "--resume_from_checkpoint" or not first_config.resume_from_checkpoint
        ],
        plan=plan,
        job_chain=job_chain,
    )
    return text, notes


def _place_job(options: JobOptions, *, num_members: int) -> tuple[JobOptions, Site]:
    """Return a job with the values of its site and queue, and its site with the queue's nodes."""
    site = find_site(options.site)
    minutes = read_minutes(options.time)
    scheduler = options.scheduler or site.schedulers[0]
    options = replace(options, scheduler=scheduler)
    _check_scheduler(options, site, is_array=num_members > 0)
    num_nodes = options.nodes + options.spare_nodes
    num_jobs = 2 if options.chain else max(1, num_members)
    queue = choose_queue(
        site,
        queue_name=options.queue,
        nodes=num_nodes,
        minutes=minutes,
        jobs=num_jobs,
        continue_flag=None if num_members else "--chain" if scheduler == "pbs" else "--requeue",
    )
    site = site.for_queue(queue)
    job = replace(
        options,
        queue=queue,
        gpus_per_node=options.gpus_per_node or site.gpus_per_node,
        cpus_per_gpu=options.cpus_per_gpu or site.cpus_per_gpu,
        launcher=options.launcher or site.launcher,
    )
    _check_resources(job, site, minutes)
    return job, site


def _check_run(job: JobOptions, site: Site, arguments: Sequence[str]) -> CoreConfig:
    """Return the options of a run of the job, checked for its ranks, its length and its device."""
    assert job.gpus_per_node is not None
    config = parse_args(arguments)
    if config.output_dir is None:
        raise ConfigError("--output_dir is missing among the trainer's options.")
    check_ranks(config, nodes=job.nodes, ranks_per_node=job.gpus_per_node)
    check_schedule(config)
    check_epochs(config, nodes=job.nodes, ranks_per_node=job.gpus_per_node)
    if site.device is not None and (problems := find_float8_problems(config, site.device)):
        raise ConfigError(" ".join(problems))
    return config


def _check_resources(job: JobOptions, site: Site, minutes: int) -> None:
    """Refuse ranks and a launcher that the site's nodes do not have, and no time to train."""
    assert job.gpus_per_node is not None
    if site.device is not None and job.gpus_per_node > site.gpus_per_node:
        raise ConfigError(
            f"--gpus_per_node {job.gpus_per_node} is more than the {site.gpus_per_node} devices of "
            f"a node in {job.queue} of --site {job.site}; choose a smaller number, or leave it out."
        )
    if job.launcher == "torchrun" and not site.has_torchrun:
        raise ConfigError(
            f"--launcher torchrun does not work with the settings of --site {job.site}, which need "
            f"{site.launcher}; leave it out."
        )
    for name in ("requeue", "chain"):
        if getattr(job, name) and minutes <= _MIN_MINUTES:
            raise ConfigError(
                f"--{name} needs a --time of more than {_MIN_MINUTES} minutes, to start, train "
                f"and save in; --time {job.time} is less."
            )


def _check_scheduler(job: JobOptions, site: Site, *, is_array: bool) -> None:
    """Refuse options that the scheduler does not have, or that break the script."""
    check_job(job, site)
    for name in ("requeue", "container"):
        if job.scheduler == "pbs" and getattr(job, name):
            remedy = "; --chain continues in the next job" if name == "requeue" else ""
            raise ConfigError(f"--{name} is for slurm, not for pbs{remedy}.")
    for name in ("requeue", "chain", "spare_nodes"):
        if is_array and getattr(job, name):
            raise ConfigError(
                f"--{name} does not go with an array; submit the script again, and interrupted "
                "members resume."
            )
    if job.scheduler == "slurm" and job.chain:
        raise ConfigError("--chain is for pbs; on slurm --requeue does it without a second job.")
    if job.spare_nodes and job.nodes == 1:
        raise ConfigError("--spare_nodes needs --nodes of 2 or more; leave it out.")
    if job.spare_nodes and job.container:
        raise ConfigError(
            "--spare_nodes and --container do not go together; leave one of them out."
        )


def _resume_arguments(trainer_arguments: Sequence[str], exit_after: int | None) -> list[str]:
    """Return the arguments that make the trainer end in time and resume, if they are missing."""
    option_names = {option_name(word) for word in trainer_arguments if word.startswith("--")}
    arguments = [] if exit_after is None else ["--exit_after", str(exit_after)]
    if not option_names & {"resume_from_checkpoint", "no_resume_from_checkpoint"}:
        arguments.append("--resume_from_checkpoint")
    return arguments


def _option_rows(trainer_arguments: Sequence[str]) -> list[str]:
    """Quote the trainer's arguments for bash, one option per line."""
    lines = []
    for row in quoted_rows(trainer_arguments):
        variable = _VARIABLE_BY_OPTION.get(option_name(row[0]))
        if variable is not None and len(row) == 2 and row[1].isalnum():
            flag, value = row
            row = [flag, f'"${{{variable}:-{value}}}"']
        lines.append(" ".join(row))
    return lines
