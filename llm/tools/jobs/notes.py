"""Notes about a job script that the program has written."""

import os
from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any

from llm.config.options import fields, path_options
from llm.config.shell import shell_line
from llm.prepare.options import PrepareConfig
from llm.tools.fetch import FetchOptions
from llm.tools.jobs.job_chain import JobChain, describe_chain
from llm.tools.jobs.options import JobOptions, SchedulerOptions
from llm.tools.jobs.planned_memory import plan_command
from llm.tools.jobs.scripts import find_cache_folders, read_minutes
from llm.tools.jobs.sites import NOBODY, Site, queue_flag
from llm.trainers.gpt.config import CoreConfig

_OUTPUT_OPTIONS = ("output_dir", "metrics_file", "output_prefix")
"""Options with a path that a run or a preparation creates."""

_FILE_OPTIONS = {"data_path", "train_file", "validation_file", "vocab_file", "merges_file", "input"}
"""Options that name files only. Others, such as tokenizer_name, also take names on the Hub."""

_LOGIN_BY_TOKEN = {"HF_TOKEN": "hf auth login", "WANDB_API_KEY": "wandb login"}
"""Variables that scripts must not contain, each with the command that saves its token in a file."""


def describe_script(
    job: JobOptions,
    site: Site,
    config: CoreConfig,
    *,
    trainer_arguments: Sequence[str],
    added_arguments: Sequence[str],
    plan: Sequence[str],
    job_chain: JobChain | None,
) -> list[str]:
    """Return sentences about the needs of a script, its site, its plan and the next step.

    Args:
        job: The job, with the site's defaults.
        site: Its site, with the nodes of the job's queue.
        config: The options of its trainer.
        trainer_arguments: The same options as the user's arguments.
        added_arguments: The arguments that this program adds to what the user has set.
        plan: Sentences about memory and time; empty if they have not been planned.
        job_chain: The chain of jobs; None for a single job.
    """
    lines = [f"Added: {' '.join(added_arguments)}."] if added_arguments else []
    if site.device is not None and job.gpus_per_node != site.gpus_per_node:
        lines.append(
            f"The job uses {job.gpus_per_node} of the {site.gpus_per_node} devices of each node."
        )
    if job.spare_nodes:
        num_requested = job.nodes + job.spare_nodes
        lines.append(f"The job requests {num_requested} nodes, {job.spare_nodes} of them spare.")
    if job.launcher == "torchrun" and site.launcher != "torchrun":
        lines.append(f"The pages of {job.site} start a task per device, without torchrun.")
    lines += [
        *unfilled_notes(job, site),
        *queue_notes(job, site),
        *input_notes(config),
        *environment_notes(job),
        *plan,
    ]
    if not plan:
        command = plan_command(job, site.device or "DEVICE", trainer_arguments)
        lines.append(
            "Model, tokenizer, memory, time and disk have not been checked. To read the model and "
            f"predict the rest: {shell_line(command)}"
        )
    if job_chain is not None:
        return [*lines, *describe_chain(job_chain, job)]
    return [*lines, *submit_notes(job)]


def describe_preparation(job: SchedulerOptions, site: Site, config: PrepareConfig) -> list[str]:
    """Return sentences about the needs of a preparation's script, its site and the next step."""
    return [
        *unfilled_notes(job, site),
        *queue_notes(job, site),
        *input_notes(config),
        *environment_notes(job),
        *submit_notes(job),
    ]


def unfilled_notes(job: SchedulerOptions, site: Site) -> list[str]:
    """Return a sentence for each placeholder in a script, with the option that fills it."""
    fields = (("--account", job.account), (queue_flag(site, job.scheduler), job.queue or ""))
    return [
        f"Fill in {value} before you submit, or give {flag}."
        for flag, value in fields
        if value.startswith("__")
    ]


def queue_notes(job: SchedulerOptions, site: Site) -> list[str]:
    """Return sentences about a known site and the queue of a job."""
    notes = []
    num_nodes = job.nodes + getattr(job, "spare_nodes", 0)
    for queue in site.queues:
        minutes = read_minutes(job.time)
        if queue.name == job.queue and queue.accepts(nodes=num_nodes, minutes=minutes):
            option = queue_flag(site, job.scheduler).removeprefix("--")
            notes.append(f"The job goes to the {option} {queue.name} ({queue.limits}).")
            break
    queue_names = dict.fromkeys(queue.name for queue in site.queues)
    if queue_names and job.queue not in queue_names:
        notes.append(
            f"The table of {job.site}{f', of {site.date},' if site.date else ''} has no "
            f"{queue_flag(site, job.scheduler)} {job.queue}, so its limits have not been checked. "
            f"It has {', '.join(queue_names)}."
        )
    if site.is_preemptable(job.queue or ""):
        notes.append(f"A job in {job.queue} can be ended at any time: save often.")
    if site.queues and site.date:  # a file of the user's has no date
        ran = f"On this site, llm-trainers was run by {site.ran}."
        if site.ran == NOBODY:
            ran = "Nobody has run llm-trainers on this site yet."
        notes.append(
            f"{ran} Its settings are of {site.date}: "
            f"llm-trainers jobs --list_sites --site {job.site}"
        )
    return notes


def input_notes(config: Any) -> list[str]:
    """Return a sentence for each file that is missing here, and one about inputs on the Hub."""
    # Checkpoints are staged in a folder of the nodes, which this machine need not have.
    notes = [
        f"--{name} {path} must exist on the nodes."
        if name == "stage_checkpoints"
        else f"--{name} {path} is not on this machine; the job needs it."
        for name, path in path_options(config)
        if name in _FILE_OPTIONS or (name not in _OUTPUT_OPTIONS and _is_path(path))
        if not exists_here(path)
    ]
    hub_inputs = _inputs_on_hub(config)
    if hub_inputs:
        notes.append(
            f"Nodes load {' and '.join(hub_inputs)} from the Hub. If they do not reach it, first "
            f"run {shell_line(_fetch_command(config))} and give the paths in offline/run.toml."
        )
    return notes


def _inputs_on_hub(config: Any) -> list[str]:
    """Return the flags that name something on the Hub, each with its value."""
    flags = []
    for field in fields(FetchOptions):
        if not field.option.path and not field.is_list:
            continue
        value = getattr(config, field.name, field.default)
        flags += [
            f"--{field.name} {name}"
            for name in (value if field.is_list else [value])
            if name not in (None, "accuracy")  # a metric of the trainer
            if not _is_path(name) and not Path(name).exists()
        ]
    return flags


def _is_path(name: str) -> bool:
    """Return whether a name cannot be on the Hub, where names are `NAME` or `OWNER/NAME`."""
    return name.startswith((".", "/")) or name.count("/") > 1


def _fetch_command(config: Any) -> list[str]:
    """Return the command that downloads what the options name on the Hub."""
    command = ["llm-trainers", "fetch", "offline"]
    for field in fields(FetchOptions):
        value = getattr(config, field.name, field.default)
        if value == field.default or (isinstance(value, str) and _is_path(value)):
            continue
        if field.is_switch:
            command.append(f"--{field.name}")
        else:
            values = value if field.is_list else [value]
            command += [f"--{field.name}", *map(str, values)]
    return command


def environment_notes(job: SchedulerOptions) -> list[str]:
    """Return sentences about the environment that the job needs, or takes from here."""
    notes = []
    if job.venv is not None and not Path(job.venv, "bin", "python").exists():
        notes.append(f"--venv {job.venv} has no bin/python on this machine; the job needs it.")
    cache_folders = find_cache_folders(job)
    if cache_folders:
        notes.append(f"The script sets {' and '.join(cache_folders)} to the folders of this shell.")
    if job.scheduler == "pbs":
        notes += [
            f"qsub does not pass {variable} to the job; run `{command}` once."
            for variable, command in _LOGIN_BY_TOKEN.items()
            if variable in os.environ
        ]
    return notes


def exists_here(path: str) -> bool:
    """Return whether a file, a pattern, or the prefix of token files or parts exists."""
    if glob(path, recursive=True) or Path(f"{path}.bin").exists():
        return True
    return bool(glob(f"{escape(path)}-*-of-*.bin"))


def submit_notes(job: SchedulerOptions) -> list[str]:
    """Return the command that submits a script; empty if the script is not in a file."""
    if job.output is None:
        return []
    submit = "sbatch" if job.scheduler == "slurm" else "qsub"
    return [f"Submit it: {shell_line([submit, Path(job.output)])}"]
