"""The script of a job that prepares token files, with one process on each node.

`llm-trainers jobs prepare slurm --nodes 10 -- PREPARE OPTIONS` fills in the template
`prepare_slurm.sh` or `prepare_pbs.sh`. The options of `prepare`, which follow `--`, are checked
when the script is written.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from llm.config.command_line import parse
from llm.config.shell import shell_line
from llm.errors import ConfigError
from llm.prepare.options import PrepareConfig, check
from llm.tools.jobs.notes import input_notes, queue_notes, submit_notes, unfilled_notes
from llm.tools.jobs.options import PreparationJobOptions
from llm.tools.jobs.scripts import (
    check_job,
    load_template,
    quoted_rows,
    read_minutes,
    without_output,
    write_file,
)
from llm.tools.jobs.sites import choose_queue, find_site


def write_preparation_job(argv: Sequence[str]) -> int:
    """Write the script of a preparation job; return the exit code.

    Args:
        argv: `prepare`, the options of the job, `--`, and the options of `llm-trainers prepare`.

    Raises:
        ConfigError: An option does not fit the others, or `llm-trainers prepare` refuses its own.
    """
    arguments = list(argv)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse(
        PreparationJobOptions,
        arguments[1:separator],
        prog="llm-trainers jobs prepare",
        description="Write a job script that prepares token files, with one process on each node; "
        "the options of llm-trainers prepare follow after --.",
        positional="scheduler",
        usage="SCHEDULER [--OPTION VALUE ...] -- PREPARE OPTIONS",
        example="slurm --nodes 10 --output job.sh -- --input 'text/*.jsonl' "
        "--tokenizer_name gpt2 --output_prefix data/web",
    )
    site = find_site(options.site)
    job = replace(options, scheduler=options.scheduler or site.schedulers[0])
    check_job(job, site)
    prepare_arguments = arguments[separator + 1 :]
    if not prepare_arguments:
        raise ConfigError("The options of llm-trainers prepare are missing: write them after --.")
    config = parse(PrepareConfig, prepare_arguments, prog="llm-trainers prepare", description="")
    check(config)
    _check_one_rank_per_node(config, num_nodes=job.nodes)
    minutes = read_minutes(job.time)
    queue = choose_queue(site, queue_name=job.queue, nodes=job.nodes, minutes=minutes)
    job = replace(job, queue=queue)
    site = site.for_queue(queue)
    text = load_template(f"prepare_{job.scheduler}.sh").render(
        job=job,
        site=site,
        walltime=f"{minutes // 60:02}:{minutes % 60:02}:00",
        options=[" ".join(row) for row in quoted_rows(prepare_arguments)],
        made_by=shell_line(without_output(arguments[:separator])),
    )
    write_file(options.output, text, is_executable=True)
    notes = [
        *unfilled_notes(job, site),
        *queue_notes(job, site),
        *input_notes(config),
        *submit_notes(job),
    ]
    sys.stderr.write("".join(f"{note}\n" for note in notes))
    return 0


def _check_one_rank_per_node(config: PrepareConfig, *, num_nodes: int) -> None:
    """Refuse options of `llm-trainers prepare` that do not go with one rank on each node."""
    conflicts = {"executor dask": config.executor == "dask", "rank": config.rank is not None}
    for name, is_set in conflicts.items():
        if is_set:
            raise ConfigError(
                f"--{name} does not go into this script, which starts one rank on each node; "
                "leave it out."
            )
    if config.overwrite and num_nodes > 1:
        raise ConfigError(
            f"--overwrite goes with one process only, and --nodes {num_nodes} starts one on each "
            "node; remove the files that exist."
        )
