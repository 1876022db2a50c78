"""Plans the run of a job script for the devices of its site."""

import os
from collections.abc import Sequence

from llm.config.shell import shell_line
from llm.errors import ConfigError
from llm.tools.jobs.options import JobOptions
from llm.tools.jobs.scripts import read_minutes


def plan_command(job: JobOptions, device: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that plans the run of a job.

    Args:
        job: The job, with the site's values.
        device: Device of each rank by its name in `llm-trainers plan`, or a placeholder.
        arguments: Arguments of the trainer.
    """
    command = ["llm-trainers", "plan", "--nodes", str(job.nodes)]
    command += ["--gpus_per_node", str(job.gpus_per_node), "--device", device]
    return [*command, *arguments]


def plan_run(
    job: JobOptions, device: str, arguments: Sequence[str], num_members: int
) -> tuple[list[str], float | None]:
    """Plan the run of a job.

    Models on the Hub are planned only if they are in the cache, because a login node may have no
    network.

    Args:
        job: The job, with the site's values.
        device: Device of each rank by its name in `llm-trainers plan`.
        arguments: Arguments of the trainer.
        num_members: Members of an array; 0 for a single job.

    Returns:
        Sentences about memory and time, and the hours of the whole run if they are known.

    Raises:
        ConfigError: The run does not fit the device's memory.
    """
    command = plan_command(job, device, arguments)
    is_mode_set = "HF_HUB_OFFLINE" in os.environ
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from llm.tools.plan.plan import summarize_plan

    try:
        lines, fits, hours = summarize_plan(command[2:])
    except ConfigError as error:
        note = (
            f"Memory and time have not been planned: {error} Later, plan them by: "
            f"{shell_line(command)}"
        )
        return [note], None
    finally:
        if not is_mode_set:
            del os.environ["HF_HUB_OFFLINE"]
    if not fits:
        raise ConfigError(
            f"{lines[0]}. {lines[1]} To write the script all the same, add --skip_plan."
        )
    notes = [f"Plan: {line}" for line in lines]
    minutes = read_minutes(job.time)
    if hours is not None and 60 * hours > minutes and not (job.chain or job.requeue):
        flag = "--chain" if job.scheduler == "pbs" else "--requeue"
        remedy = "submit the script again" if num_members else f"add {flag}"
        notes.append(
            f"The plan of {hours:,.1f} hours is longer than --time {job.time}: {remedy}, or choose "
            "a longer --time."
        )
    return notes, hours
