"""Plans a run before it is queued: `llm-trainers plan CONFIG.toml --nodes 64`.

Exit codes: 0 the run fits; 1 it does not fit; 2 an option cannot work.
"""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llm.config.command_line import parse_options
from llm.config.program import program
from llm.errors import ConfigError
from llm.runtime.world import ignore_ranks
from llm.tools.plan.options import PlanOptions, check
from llm.trainers.gpt.config import read_preset_options

if TYPE_CHECKING:
    from llm.tools.plan.estimate import Estimate
    from llm.tools.plan.job import Job

_HELP = (
    "Plan a run: memory, traffic and time of a layout, without a device. You can give the run's "
    "TOML file as the first word."
)


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config")
    lines, fits = _run_plan(_parse_options(arguments))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fits else 1


def summarize_plan(arguments: Sequence[str]) -> tuple[list[str], bool, float | None]:
    """Plan a run for another program, from options of `llm-trainers plan`.

    Returns:
        A few lines about the plan, whether the layout fits, and the hours of the whole run, which
        are None if its tokens are unknown.

    Raises:
        ConfigError: The run cannot be planned.
    """
    job, _, plan, remedy = _make_plan(_parse_options(arguments))
    from llm.tools.plan.render import days_of_run, format_summary

    days = days_of_run(job, plan)
    return format_summary(job, plan, remedy), plan.fits, None if days is None else 24 * days


def _parse_options(arguments: Sequence[str]) -> PlanOptions:
    options = parse_options(
        PlanOptions,
        arguments,
        prog="llm-trainers plan",
        description=_HELP,
        usage="[CONFIG.toml] [--OPTION VALUE ...]",
        inherit=read_preset_options,
    )
    check(options)
    return options


def _make_plan(
    options: PlanOptions,
) -> "tuple[Job, list[Estimate] | None, Estimate, dict[str, Any] | None]":
    """Return the run, the ranking of `--search`, the estimate of its layout, and a remedy."""
    from llm.runtime.logging import quiet_libraries
    from llm.runtime.process_settings import limit_spin_wait

    limit_spin_wait()
    quiet_libraries()
    from llm.tools.plan.batch_size import fit_batch_size
    from llm.tools.plan.estimate import estimate, search
    from llm.tools.plan.job import Job
    from llm.tools.plan.remedy import find_remedy

    if options.per_device_train_batch_size == "auto":
        options = fit_batch_size(options)
    job = Job(options)
    ranking = search(job) if options.search else None
    if ranking == []:
        raise ConfigError("No layout can divide this batch and these layers over these devices.")
    plan = ranking[0] if ranking else estimate(job, job.dims)
    num_samples = job.count_samples(plan.dims)
    # A cooldown may end a branch earlier.
    if job.data is not None and num_samples is not None and options.branch_from is None:
        job.data.refuse_excess_epochs(num_samples)
    remedy = None if plan.fits else find_remedy(job, ranking)
    return job, ranking, plan, remedy


def _run_plan(options: PlanOptions) -> tuple[list[str], bool]:
    """Return the lines to print, and whether the layout fits."""
    from llm.tools.plan import render

    if options.plot is not None:
        render.check_plot_path(options.plot)
    job, ranking, plan, remedy = _make_plan(options)
    if options.plot is not None:
        render.plot_memory(
            (ranking or [plan])[: options.top], usable_bytes=job.usable_bytes, path=options.plot
        )
    if options.json:
        return [json.dumps(render.plan_json(job, plan, remedy, ranking), indent=1)], plan.fits
    lines = render.format_plan(job, plan, remedy)
    if ranking is not None:
        lines = [*render.format_table(job, ranking), "", "the first of them:", *lines]
    return lines, plan.fits
