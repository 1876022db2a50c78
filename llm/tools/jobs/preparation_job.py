"""The script of a job that prepares token files, with one process on each node.

`llm-trainers jobs prepare slurm --nodes 10 -- PREPARE OPTIONS` fills in the template
`prepare_slurm.sh` or `prepare_pbs.sh`. The options of `prepare`, which follow `--`, are checked
when the script is written.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llm.config.command_line import parse_options
from llm.config.shell import shell_line
from llm.data.text_identity import kind_of
from llm.errors import ConfigError
from llm.prepare.options import PrepareConfig, check_prepare_config
from llm.prepare.text.sources import find_text_sources
from llm.tools.jobs.notes import describe_preparation, exists_here
from llm.tools.jobs.options import PreparationJobOptions
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
    write_script,
)
from llm.tools.jobs.sites import Site, choose_queue, find_site


def write_preparation_job(argv: Sequence[str]) -> int:
    """Write the script of a preparation job; return the exit code.

    Args:
        argv: The options of the job, `--`, and the options of `llm-trainers prepare`.

    Raises:
        ConfigError: An option does not fit the others, or `llm-trainers prepare` refuses its own.
        DataError: `llm-trainers prepare` refuses the first text that is here.
    """
    command, prepare_arguments = split_arguments(argv)
    options = _parse_options(command)
    config = _parse_prepare_options(prepare_arguments)
    _check_one_rank_per_node(config, num_nodes=options.nodes)
    _check_first_text(config)
    job, site = _place_job(options)
    check_queue_option(command, job, site)
    text = load_template(f"prepare_{job.scheduler}.sh").render(
        job=job,
        site=site,
        cache_folders=find_cache_folders(job),
        walltime=format_walltime(read_minutes(job.time)),
        options=[" ".join(row) for row in quoted_rows(prepare_arguments)],
        made_by=shell_line(["prepare", *without_output(command)]),
    )
    write_script(options.output, text, describe_preparation(job, site, config))
    return 0


def _parse_options(command: Sequence[str]) -> PreparationJobOptions:
    """Read the options of the job, which stand before `--`."""
    return parse_options(
        PreparationJobOptions,
        command,
        prog="llm-trainers jobs prepare",
        description="Write a job script that prepares token files, with one process on each node; "
        "the options of llm-trainers prepare follow after --.",
        positional="scheduler",
        usage="SCHEDULER [--OPTION VALUE ...] -- PREPARE OPTIONS",
        example="slurm --nodes 10 --output job.sh -- --input 'text/*.jsonl' "
        "--tokenizer_name gpt2 --output_prefix data/web",
    )


def _parse_prepare_options(arguments: Sequence[str]) -> PrepareConfig:
    """Read and check the options of `llm-trainers prepare`."""
    if not arguments:
        raise ConfigError("The options of llm-trainers prepare are missing: write them after --.")
    config = parse_options(PrepareConfig, arguments, prog="llm-trainers prepare", description="")
    check_prepare_config(config)
    return config


def _check_first_text(config: PrepareConfig) -> None:
    """Refuse a first text that is here but has no such column, or unusable records.

    The first few MiB of the first file are read. JSON files may be arrays, which are read as a
    whole, so they are left out, as are files without columns.

    Raises:
        DataError: They cannot be read; the message is `llm-trainers prepare`'s.
    """
    if config.on_error == "skip":
        return
    for name in filter(exists_here, config.input):
        for source in find_text_sources(
            [name], text_column=config.text_column, text_unit=config.text_unit
        ):
            if kind_of(Path(source.name)) not in (".json", ".txt"):
                next(source.batches(), None)
                return


def _place_job(options: PreparationJobOptions) -> tuple[PreparationJobOptions, Site]:
    """Return a job with its scheduler and queue, and its site with the queue's nodes."""
    site = find_site(options.site)
    job = replace(options, scheduler=options.scheduler or site.schedulers[0])
    check_job(job, site)
    queue = choose_queue(
        site, queue_name=job.queue, nodes=job.nodes, minutes=read_minutes(job.time)
    )
    return replace(job, queue=queue), site.for_queue(queue)


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
