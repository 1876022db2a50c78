"""Writes a job script: `python -m llm.jobs slurm --nodes 4 --time 6:00:00 -- TRAINER OPTIONS`.

The trainer's options follow `--` and are checked when the script is written. The script fills the
template `slurm.sh` or `pbs.sh` with the options and the settings in `sites.toml`.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jinja2

from llm.config.command_line import parse
from llm.config.program import program
from llm.errors import ConfigError
from llm.jobs.options import JobOptions
from llm.jobs.sites import SITES, choose_queue
from llm.runtime.files import write_whole
from llm.trainers.gpt.main import parse_args
from llm.trainers.gpt.ranks import check_ranks

_LEAST_MINUTES = 30
"""To start, train and save."""

# Names from the scripts of Megatron-LM: `TP_SIZE=8 PP_SIZE=2 sbatch SCRIPT`.
_ENVIRONMENT_VARIABLES = {
    "tensor_parallel_size": "TP_SIZE",
    "pipeline_parallel_size": "PP_SIZE",
    "num_layers": "NUM_LAYERS",
    "hidden_size": "HIDDEN_SIZE",
    "num_attention_heads": "NUM_ATTENTION_HEADS",
}


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    options = parse(
        JobOptions,
        words[:cut],
        prog="python -m llm.jobs",
        description="Write a job script; the trainer's options follow after --.",
        positional="scheduler",
        usage="SCHEDULER [--OPTION VALUE ...] -- TRAINER OPTIONS",
        example="slurm --nodes 8 --requeue --output job.sh -- --config run.toml",
    )
    text = job_script(options, command=words[:cut], trainer=words[cut + 1 :])
    if options.output is None:
        sys.stdout.write(text)
    else:
        _write(Path(options.output), text)
    return 0


def job_script(options: JobOptions, *, command: Sequence[str], trainer: Sequence[str]) -> str:
    """Return the text of a job script.

    Args:
        options: Options of this program.
        command: The arguments of this program, repeated at the head of the script.
        trainer: Arguments of the trainer.

    Raises:
        ConfigError: An option does not fit the others, or the trainer refuses its arguments.
    """
    site = SITES[options.site]
    per_node = options.gpus_per_node or site.gpus_per_node
    job = replace(
        options,
        scheduler=options.scheduler or site.schedulers[0],
        gpus_per_node=per_node,
        cpus_per_gpu=options.cpus_per_gpu or site.cpus_per_gpu,
        launcher=options.launcher or site.launcher,
    )
    _check(job)
    if not trainer:
        raise ConfigError("The trainer's options are missing: write them after --.")
    minutes = read_minutes(job.time)
    for name in ("requeue", "chain"):
        if getattr(job, name) and minutes <= _LEAST_MINUTES:
            raise ConfigError(
                f"--{name} needs a --time of more than {_LEAST_MINUTES} minutes, to start, train "
                f"and save in; --time {job.time} is less."
            )
    # Time for the job to start and to save its last checkpoint.
    exit_after = minutes - max(15, minutes // 20) if job.chain else None
    trainer = _with_stop_and_resume(trainer, exit_after)
    queue = choose_queue(site, asked=job.queue, nodes=job.nodes, minutes=minutes)
    swept, values = _read_sweep(job.sweep)
    if parse_args(trainer).output_dir is None:
        raise ConfigError("--output_dir is missing among the trainer's options.")
    for words in [[f"--{swept}", value] for value in values] or [[]]:
        check_ranks(
            parse_args([*trainer, *words]), ranks=job.nodes * per_node, ranks_per_node=per_node
        )
    return _template(f"{job.scheduler}.sh").render(
        job=replace(job, queue=queue),
        site=site,
        torchrun=job.launcher == "torchrun",
        walltime=f"{minutes // 60:02}:{minutes % 60:02}:00",
        sweep=swept,
        values=values,
        exit_after=exit_after,
        trainer=_rows(trainer, without=swept),
        made_by=shlex.join(_without_output(command)),
    )


def _template(name: str) -> jinja2.Template:
    """Load the template of a job script from the folder of this file."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        comment_start_string="{##",  # ${#ARRAY[@]} is a length in bash
    )
    templates.filters["quote"] = shlex.quote
    return templates.get_template(name)


def read_minutes(time: str) -> int:
    """Return the minutes of a time limit such as 6:00:00, 1-12:00:00 or 90 (minutes).

    Raises:
        ConfigError: The text is not a time limit, or is ambiguous like 6:00: some schedulers read
            it as hours and minutes, others as minutes and seconds.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):\d\d|(\d+)", time)
    if match is None:
        raise ConfigError(f"--time {time} is not a time limit; write it as 6:00:00 or 1-12:00:00.")
    days, hours, minutes, plain = (int(number or 0) for number in match.groups())
    total = plain + 1440 * days + 60 * hours + minutes
    if total == 0:
        raise ConfigError(f"--time {time} leaves no minute to train; write it as 6:00:00.")
    return total


def _check(job: JobOptions) -> None:
    """Refuse options that the site or the scheduler does not have, or that break the script."""
    for name, value in vars(job).items():
        if value == "":
            raise ConfigError(f"--{name} is empty; give it a value, or leave it out.")
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(
                f"--{name} {value!a} contains a line break or another unprintable character; "
                "remove it."
            )
    offered = SITES[job.site].schedulers
    if job.scheduler not in offered:
        raise ConfigError(
            f"--site {job.site} knows {' and '.join(offered)}, not {job.scheduler}; write "
            f"python -m llm.jobs {offered[0]}."
        )
    for name in ("requeue", "sweep", "container"):
        if job.scheduler == "pbs" and getattr(job, name):
            instead = "; --chain continues in the next job" if name == "requeue" else ""
            raise ConfigError(f"--{name} is for slurm, not for pbs{instead}.")
    if job.scheduler == "slurm" and job.chain:
        raise ConfigError("--chain is for pbs; on slurm --requeue does it without a second job.")
    for name in ("name", "account", "queue"):
        value = getattr(job, name)
        if value is not None and re.fullmatch(r"[\w.:,@+-]+", value) is None:
            raise ConfigError(
                f"--{name} '{value}' contains a blank or another character that a directive cannot "
                "have; use letters, digits and _.:,@+-."
            )
    if job.requeue and job.sweep:
        raise ConfigError("--requeue and --sweep do not go together; leave one of them out.")


def _with_stop_and_resume(trainer: Sequence[str], exit_after: int | None) -> list[str]:
    """Add trainer arguments that make it end in time and resume."""
    named = {_option_of(word) for word in trainer if word.startswith("--")}
    words = list(trainer)
    if exit_after is not None and "exit_after" not in named:
        words += ["--exit_after", str(exit_after)]
    if not named & {"resume_from_checkpoint", "no_resume_from_checkpoint"}:
        words.append("--resume_from_checkpoint")
    return words


def _read_sweep(sweep: str | None) -> tuple[str, list[str]]:
    """Return the option that an array varies, and its values; both empty without an array."""
    if sweep is None:
        return "", []
    name, _, after = sweep.partition("=")
    values = [value for value in after.split(",") if value]
    if len(values) < 2:
        raise ConfigError(
            f"--sweep {sweep} expects an option and its values, as in "
            "--sweep learning_rate=1e-4,3e-4."
        )
    if len(set(values)) < len(values):
        raise ConfigError(
            f"--sweep {sweep} has a value twice, for two jobs with one folder; give each once."
        )
    if _option_of(name) == "output_dir":
        raise ConfigError(
            f"--sweep {sweep}: the script itself names a folder for each job, below --output_dir; "
            "vary another option."
        )
    return name, values


def _rows(trainer: Sequence[str], *, without: str) -> list[str]:
    """Quote the trainer's arguments for bash, one option per line.

    Args:
        trainer: The arguments.
        without: The option that an array varies, which the script adds; "" without an array.
    """
    rows: list[list[str]] = []
    for word in trainer:
        if word.startswith("--") or not rows:
            rows.append([])
        rows[-1].append(shlex.quote(word))
    for row in rows:
        variable = _ENVIRONMENT_VARIABLES.get(_option_of(row[0]))
        if variable is not None and len(row) == 2:
            row[1] = f'"${{{variable}:-{row[1]}}}"'
    return [" ".join(row) for row in rows if _option_of(row[0]) != without]


def _option_of(word: str) -> str:
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _without_output(command: Sequence[str]) -> list[str]:
    kept = [word for word in command if not word.startswith("--output=")]
    if "--output" in kept:
        place = kept.index("--output")
        del kept[place : place + 2]
    return kept


def _write(path: Path, text: str) -> None:
    if path.exists():
        raise ConfigError(f"--output {path} already exists; remove it, or name another file.")
    try:
        write_whole(path, text)
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}.") from error


if __name__ == "__main__":
    sys.exit(main())
