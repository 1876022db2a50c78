"""Writes a job script: `llm-trainers jobs slurm --nodes 4 --time 6:00:00 -- TRAINER OPTIONS`.

The trainer's options follow `--` and are checked when the script is written. The script fills the
template `slurm.sh` or `pbs.sh` with the options and the settings in `sites.toml`.
`llm-trainers jobs prepare slurm ...` writes one that prepares token files.
"""

import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from llm.config.command_line import option_name, parse
from llm.config.program import program
from llm.config.shell import shell_line
from llm.errors import ConfigError
from llm.tools.jobs.detection import detect_site
from llm.tools.jobs.job_ranks import check_ranks
from llm.tools.jobs.notes import describe_script
from llm.tools.jobs.options import JobOptions
from llm.tools.jobs.output_dir import print_output_dir
from llm.tools.jobs.planned_memory import plan_notes
from llm.tools.jobs.preparation_job import write_preparation_job
from llm.tools.jobs.scripts import (
    check_job,
    load_template,
    quoted_rows,
    read_minutes,
    without_output,
    write_file,
)
from llm.tools.jobs.site_tables import site_description, site_table
from llm.tools.jobs.sites import Site, choose_queue, find_site, known_sites
from llm.trainers.gpt.main import parse_args

_MIN_MINUTES = 30
"""Time for a job to start, train and save."""

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
    if argv[:1] == ["prepare"]:
        return write_preparation_job(argv)
    if argv[:1] == ["output_dir"]:
        return print_output_dir(argv[1:])
    arguments = list(argv)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    command, trainer_arguments = arguments[:separator], arguments[separator + 1 :]
    option_names = [option_name(word) for word in command if word.startswith("--")]
    needs_trainer = {"detect", "list_sites", "help"}.isdisjoint(
        option_names
    ) and "-h" not in command
    if separator == len(arguments) and needs_trainer:
        raise ConfigError(_NO_TRAINER_OPTIONS)
    if option_names.count("sweep") > 1:
        raise ConfigError(
            "--sweep is given twice; for a job per combination, list all options after one, as in "
            "--sweep learning_rate=1e-4,3e-4 seed=1,2."
        )
    options = parse(
        JobOptions,
        command,
        prog="llm-trainers jobs",
        description="Write a job script; the trainer's options follow after --. With the word "
        "prepare first, it prepares token files: llm-trainers jobs prepare --help.",
        positional="scheduler",
        usage="SCHEDULER [--OPTION VALUE ...] -- TRAINER OPTIONS",
        example="slurm --nodes 8 --requeue --output job.sh -- --config run.toml",
    )
    if options.list_sites:
        return _print_sites(options.site)
    if options.detect:
        return _write_draft(options.output)
    text, notes = job_script(options, command=command, trainer_arguments=trainer_arguments)
    write_file(options.output, text, is_executable=True)
    sys.stderr.write("".join(f"{note}\n" for note in notes))
    return 0


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


def job_script(
    options: JobOptions, *, command: Sequence[str], trainer_arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the text of a job script, and sentences about it.

    Args:
        options: Options of this program.
        command: The arguments of this program, repeated at the head of the script.
        trainer_arguments: Arguments of the trainer.

    Raises:
        ConfigError: An option does not fit the others, or the trainer refuses its arguments.
    """
    if not trainer_arguments:
        raise ConfigError(_NO_TRAINER_OPTIONS)
    site = find_site(options.site)
    minutes = read_minutes(options.time)
    _check_scheduler(replace(options, scheduler=options.scheduler or site.schedulers[0]), site)
    num_nodes = options.nodes + options.spare_nodes
    queue = choose_queue(site, queue_name=options.queue, nodes=num_nodes, minutes=minutes)
    site = site.for_queue(queue)
    job = replace(_fill_in_site(options, site), queue=queue)
    _check_minutes(job, minutes)
    # Time for the job to start and to save its last checkpoint.
    exit_after = minutes - max(15, minutes // 20) if job.chain else None
    added_arguments = _resume_arguments(trainer_arguments, exit_after)
    all_arguments = [*trainer_arguments, *added_arguments]
    config = parse_args(all_arguments)
    if config.output_dir is None:
        raise ConfigError("--output_dir is missing among the trainer's options.")
    values_by_option = _read_sweep(job.sweep)
    assert job.gpus_per_node is not None
    combinations = [*product(*values_by_option.values())]
    arguments_of_runs = [
        [*all_arguments, *map("--{}={}".format, values_by_option, values)]
        for values in combinations
    ]
    for run_arguments in arguments_of_runs:
        check_ranks(parse_args(run_arguments), nodes=job.nodes, ranks_per_node=job.gpus_per_node)

    text = load_template(f"{job.scheduler}.sh").render(
        job=job,
        site=site,
        torchrun=job.launcher == "torchrun",
        walltime=f"{minutes // 60:02}:{minutes % 60:02}:00",
        sweep=dict(zip(values_by_option, zip(*combinations, strict=True), strict=True)),
        num_jobs=len(combinations),
        has_whole_nodes=job.nodes > 1
        or (site.device is not None and job.gpus_per_node == site.gpus_per_node),
        exit_after=exit_after,
        trainer=_option_rows(all_arguments, excluded=values_by_option),
        made_by=shlex.join(without_output(command)),
    )
    plan: list[str] = []
    if site.device is not None and not job.skip_plan:
        plan = plan_notes(job, site.device, arguments_of_runs[0])
    notes = describe_script(
        job,
        site,
        config,
        trainer_arguments=trainer_arguments,
        added_arguments=added_arguments,
        plan=plan,
    )
    return text, notes


def _fill_in_site(options: JobOptions, site: Site) -> JobOptions:
    """Return the options of a job with the site's values where you give none."""
    return replace(
        options,
        scheduler=options.scheduler or site.schedulers[0],
        gpus_per_node=options.gpus_per_node or site.gpus_per_node,
        cpus_per_gpu=options.cpus_per_gpu or site.cpus_per_gpu,
        launcher=options.launcher or site.launcher,
    )


def _check_minutes(job: JobOptions, minutes: int) -> None:
    """Refuse a job that continues in another one, but has no time to train."""
    for name in ("requeue", "chain"):
        if getattr(job, name) and minutes <= _MIN_MINUTES:
            raise ConfigError(
                f"--{name} needs a --time of more than {_MIN_MINUTES} minutes, to start, train "
                f"and save in; --time {job.time} is less."
            )


def _check_scheduler(job: JobOptions, site: Site) -> None:
    """Refuse options that the scheduler does not have, or that break the script."""
    check_job(job, site)
    for name in ("requeue", "sweep", "container"):
        if job.scheduler == "pbs" and getattr(job, name):
            remedy = "; --chain continues in the next job" if name == "requeue" else ""
            raise ConfigError(f"--{name} is for slurm, not for pbs{remedy}.")
    if job.scheduler == "slurm" and job.chain:
        raise ConfigError("--chain is for pbs; on slurm --requeue does it without a second job.")
    if job.spare_nodes and job.nodes == 1:
        raise ConfigError("--spare_nodes needs --nodes of 2 or more; leave it out.")
    for name in ("sweep", "container"):
        if job.spare_nodes and getattr(job, name):
            raise ConfigError(
                f"--spare_nodes and --{name} do not go together; leave one of them out."
            )
    if job.requeue and job.sweep:
        raise ConfigError("--requeue and --sweep do not go together; leave one of them out.")


def _resume_arguments(trainer_arguments: Sequence[str], exit_after: int | None) -> list[str]:
    """Return the arguments that make the trainer end in time and resume, if they are missing."""
    option_names = {option_name(word) for word in trainer_arguments if word.startswith("--")}
    arguments = []
    if exit_after is not None and "exit_after" not in option_names:
        arguments += ["--exit_after", str(exit_after)]
    if not option_names & {"resume_from_checkpoint", "no_resume_from_checkpoint"}:
        arguments.append("--resume_from_checkpoint")
    return arguments


def _read_sweep(sweep: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option that an array varies; empty without an array.

    Args:
        sweep: The option `sweep`, such as `["learning_rate=1e-4,3e-4", "seed=1,2"]`.

    Raises:
        ConfigError: An option or a value is missing or repeated, or the option is `output_dir`.
    """
    values_by_option: dict[str, list[str]] = {}
    for text in sweep:
        name = option_name(text)
        _, _, value_list = text.partition("=")
        values = [value for value in value_list.split(",") if value]
        if len(values) < 2:
            raise ConfigError(
                f"--sweep {text} expects an option and two values or more, as in "
                "--sweep learning_rate=1e-4,3e-4."
            )
        if len(set(values)) < len(values):
            raise ConfigError(
                f"--sweep {text} has a value twice, for two jobs with one folder; give each once."
            )
        if name == "output_dir":
            raise ConfigError(
                f"--sweep {text}: the script itself names a folder for each job, below "
                "--output_dir; vary another option."
            )
        if name in values_by_option:
            raise ConfigError(
                f"--sweep {text} varies {name} again; list all of its values in one item."
            )
        values_by_option[name] = values
    return values_by_option


def _option_rows(trainer_arguments: Sequence[str], *, excluded: Collection[str]) -> list[str]:
    """Quote the trainer's arguments for bash, one option per line.

    Args:
        trainer_arguments: The arguments.
        excluded: The options that an array varies, which the script adds.
    """
    lines = []
    for row in quoted_rows(trainer_arguments):
        name = option_name(row[0])
        if name in excluded:
            continue
        variable = _VARIABLE_BY_OPTION.get(name)
        if variable is not None and len(row) == 2:
            flag, value = row
            row = [flag, f'"${{{variable}:-{value}}}"']
        lines.append(" ".join(row))
    return lines
