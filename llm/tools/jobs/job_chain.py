"""Chains of PBS jobs: each job starts if the previous one has not finished the training."""

import math
from dataclasses import dataclass
from pathlib import Path

from llm.config.shell import shell_line
from llm.tools.jobs.options import JobOptions
from llm.tools.jobs.sites import Site

_UNPLANNED_JOBS = 4
"""Jobs of a chain for a training with unknown duration."""


@dataclass(frozen=True, kw_only=True)
class JobChain:
    """A chain of jobs of a script.

    Attributes:
        script: Path of the script, or a placeholder.
        num_needed: Number of jobs that the training needs.
        num_jobs: Number of jobs that you can submit now.
    """

    script: str
    num_needed: int
    num_jobs: int

    @property
    def command(self) -> str:
        """The shell line that submits the chain, up to the first job that qsub refuses."""
        script = shell_line([Path(self.script)])
        return (
            f"JOB=$(qsub {script}) && for _ in {{2..{self.num_jobs}}}; do "
            f'JOB=$(qsub -W depend=afternotok:"$JOB" {script}) || break; done'
        )


def make_job_chain(job: JobOptions, site: Site, *, hours: float | None, minutes: float) -> JobChain:
    """Return the chain of jobs that a training needs.

    Args:
        job: The job, with a queue.
        site: Its site.
        hours: Planned duration of the training; None if it has not been planned.
        minutes: Time that each job trains.
    """
    num_needed = _UNPLANNED_JOBS if hours is None else max(2, math.ceil(60 * hours / minutes))
    limits = [queue.max_jobs for queue in site.queues if queue.name == job.queue]
    num_jobs = int(min([num_needed, *limits]))
    return JobChain(script=job.output or "SCRIPT", num_needed=num_needed, num_jobs=num_jobs)


def describe_chain(chain: JobChain, job: JobOptions) -> list[str]:
    """Return the command that submits a chain, and a sentence if the queue takes fewer jobs."""
    notes = []
    if chain.num_jobs < chain.num_needed:
        notes.append(
            f"{job.queue} takes {chain.num_jobs} jobs per user, and the chain needs "
            f"{chain.num_needed}: if training has not finished after {chain.num_jobs}, submit "
            "them again."
        )
    if job.output is not None:
        notes.append(f"Submit the chain of {chain.num_jobs} jobs: {chain.command}")
    return notes
