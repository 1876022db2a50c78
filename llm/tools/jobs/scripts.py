"""Common parts of all job scripts: templates, time limits, checks, and the file that is written."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from llm.config.command_line import option_name
from llm.config.shell import shell_line
from llm.errors import ConfigError
from llm.runtime.files import write_whole
from llm.tools.jobs.options import SchedulerOptions
from llm.tools.jobs.sites import Site, queue_flag

_FOLDER_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "LLM_CACHE_DIR")
"""Variables that name folders of caches."""


def find_cache_folders(job: SchedulerOptions) -> dict[str, str]:
    """Return the folders of caches that are set here and that the scheduler does not pass.

    Returns:
        Absolute paths by variable. `sbatch` passes the environment, and `qsub` does not.
    """
    if job.scheduler == "slurm":
        return {}
    return {
        variable: str(Path(os.environ[variable]).expanduser().absolute())
        for variable in _FOLDER_VARIABLES
        if os.environ.get(variable)
    }


def check_job(job: SchedulerOptions, site: Site) -> None:
    """Refuse options that the site does not have, or that break any script.

    Raises:
        ConfigError: One of them does.
    """
    for name, value in vars(job).items():
        values = value if isinstance(value, tuple) else (value,)
        for text in filter(lambda value: isinstance(value, str), values):
            _check_printable(name, text)
    if job.scheduler not in site.schedulers:
        raise ConfigError(
            f"--site {job.site} knows {' and '.join(site.schedulers)}, not {job.scheduler}; write "
            f"llm-trainers jobs {site.schedulers[0]}."
        )
    flag_by_option = {
        "name": "--name",
        "account": "--account",
        "queue": "--queue, --partition or --qos",
    }
    for name, flag in flag_by_option.items():
        value = getattr(job, name)
        if value is not None and re.fullmatch(r"[\w.:,@+-]+", value) is None:
            raise ConfigError(
                f"{flag} '{value}' contains a blank or another character that a directive cannot "
                "have; use letters, digits and _.:,@+-."
            )


def check_queue_option(command: Sequence[str], job: SchedulerOptions, site: Site) -> None:
    """Refuse `--partition` or `--qos` if the queue of the job is of another kind.

    Args:
        command: The job's arguments.
        job: The job, with a scheduler.
        site: Its site.

    Raises:
        ConfigError: Says how to name the queue.
    """
    option_names = {option_name(word) for word in command if word.startswith("--")}
    flag = queue_flag(site, job.scheduler)
    for name in ("partition", "qos"):
        if name in option_names and flag != f"--{name}":
            remedy = f", and give --{name} to sbatch" if job.scheduler == "slurm" else ""
            raise ConfigError(
                f"--{name} does not name the queue of this job; name it by {flag}{remedy}."
            )


def _check_printable(name: str, text: str) -> None:
    """Refuse a value of an option that is empty, or would break a line of the script."""
    if text == "":
        raise ConfigError(f"--{name} is empty; give it a value, or leave it out.")
    if not text.isprintable():
        raise ConfigError(
            f"--{name} {text!a} contains a line break or another unprintable character; remove it."
        )


def load_template(name: str) -> jinja2.Template:
    """Load the template of a job script from the folder of this file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        comment_start_string="{##",  # ${#ARRAY[@]} is a length in bash
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(name)


def read_minutes(time: str) -> int:
    """Return the minutes of a time limit such as 6:00:00, 1-12:00:00 or 90 (minutes).

    Raises:
        ConfigError: The text is not a time limit, or is ambiguous like 6:00: some schedulers read
            it as hours and minutes, others as minutes and seconds.
    """
    pattern = r"(?:(\d{1,4})-)?(\d{1,6}):([0-5]\d):[0-5]\d|(\d{1,7})"
    match = re.fullmatch(pattern, time, re.ASCII)
    if match is None or (match[1] is not None and int(match[2]) > 23):
        raise ConfigError(f"--time {time} is not a time limit; write it as 6:00:00 or 1-12:00:00.")
    days, hours, minutes, plain_minutes = (int(digits or 0) for digits in match.groups())
    total_minutes = plain_minutes + 1440 * days + 60 * hours + minutes
    if total_minutes == 0:
        raise ConfigError(f"--time {time} leaves no minute to train; write it as 6:00:00.")
    return total_minutes


def quoted_rows(arguments: Sequence[str]) -> list[list[str]]:
    """Quote arguments for bash, in a row for each option."""
    rows: list[list[str]] = []
    for word in arguments:
        if word.startswith("--") or not rows:
            rows.append([])
        quoted = shell_line([word])  # unlike shlex.quote, it escapes unprintable characters
        # ShellCheck takes a bare comma for an attempt to separate elements.
        rows[-1].append(f"'{word}'" if "," in word and quoted == word else quoted)
    return rows


def without_output(command: Sequence[str]) -> list[str]:
    """Return the arguments without `--output`."""
    arguments = [word for word in command if not word.startswith("--output=")]
    if "--output" in arguments:
        index = arguments.index("--output")
        del arguments[index : index + 2]
    return arguments


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the job, before `--`, and of the program that it runs, after it."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    separator = arguments.index("--")
    return arguments[:separator], arguments[separator + 1 :]


def format_walltime(minutes: int) -> str:
    """Return a time limit as directives have it, such as 36:00:00."""
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def write_script(path: str | None, text: str, notes: Sequence[str]) -> None:
    """Write a script to a new file, or to standard output, and the sentences about it to stderr.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """
    write_file(path, text, is_executable=True)
    sys.stderr.write("".join(f"{note}\n" for note in notes))


def write_file(path: str | None, text: str, *, is_executable: bool = False) -> None:
    """Write a text to a new file, or to standard output.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """
    if path is None:
        sys.stdout.write(text)
        return
    file = Path(path)
    if file.exists():
        raise ConfigError(f"--output {path} already exists; remove it, or name another file.")
    try:
        write_whole(file, text)
        if is_executable:
            file.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}.") from error
