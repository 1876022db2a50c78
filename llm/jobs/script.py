"""The parts of a job script that all schedulers share."""

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from llm.errors import ConfigError
from llm.jobs.sites import Launcher, Scheduler, Site


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job script is written from, every choice made.

    Attributes:
        made_by: Arguments of `python -m llm.jobs` that give this script, without the trainer's.
        scheduler: Who runs it.
        site: What the cluster asks for.
        name: Of the job.
        account: Who pays.
        queue: Queue, partition or QOS.
        nodes: Number of nodes.
        gpus_per_node: Ranks on each.
        cpus_per_gpu: Cores for each rank.
        minutes: Time limit.
        launcher: Who starts the ranks.
        venv: Folder of the virtual environment; unused with an image.
        image: Container to run in, if any.
        requeue: Whether a job that reaches its limit puts itself into the queue again.
        chain: Whether it saves and ends before its limit, for a next job to go on.
        sweep: Name and values of the option in which the jobs of an array differ.
        output_dir: Folder of the run.
        trainer: The trainer's arguments, with those that the job needs.
    """

    made_by: tuple[str, ...]
    scheduler: Scheduler
    site: Site
    name: str
    account: str
    queue: str
    nodes: int
    gpus_per_node: int
    cpus_per_gpu: int
    minutes: int
    launcher: Launcher
    venv: str
    image: str | None
    requeue: bool
    chain: bool
    sweep: tuple[str, tuple[str, ...]] | None
    output_dir: str
    trainer: tuple[str, ...]

    @property
    def names_run(self) -> bool:
        """Whether the script itself has to know the run's folder."""
        return self.requeue or self.sweep is not None

    @property
    def walltime(self) -> str:
        """The time limit, as both schedulers read it."""
        return f"{self.minutes // 60:02}:{self.minutes % 60:02}:00"


def read_minutes(time: str) -> int:
    """Minutes of a time limit such as 6:00:00, 1-12:00:00 or 90 (minutes).

    Two numbers alone are hours to some schedulers and minutes to others, and refused.

    Raises:
        ConfigError: It is none.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):\d\d|(\d+)", time)
    if match is None:
        raise ConfigError(f"--time {time} is no time limit; write it as 6:00:00 or 1-12:00:00.")
    days, hours, minutes, plain = match.groups()
    found = int(plain or 0) + 1440 * int(days or 0) + 60 * int(hours or 0) + int(minutes or 0)
    if found == 0:
        raise ConfigError(f"--time {time} leaves no minute to train; write it as 6:00:00.")
    return found


def comment(text: str) -> str:
    """A paragraph as comment lines."""
    return textwrap.fill(
        text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def made_by(job: Job) -> str:
    """The comment that says how to write this script anew."""
    words = shlex.join(job.made_by)
    return f"# Made by: python -m llm.jobs {words} -- OPTIONS"


def to_fill_in(job: Job) -> str:
    """The block of what belongs to the user: environment, run, options."""
    where = "IMAGE" if job.image is not None else "VENV"
    what = {
        "VENV": "where `python -m venv` made the environment that holds the llm package",
        "IMAGE": "the image that holds PyTorch and the llm package (a file or a registry's name)",
    }[where]
    lines = [
        comment(
            f"Yours to fill in, like all that stands between double underscores above: {what}, and "
            "the options of the training."
        ),
        f"{where}={_word(job.image if job.image is not None else job.venv)}",
    ]
    if job.sweep is not None:
        name, values = job.sweep
        lines += [
            f"VALUES=({' '.join(map(_word, values))})  # one job of the array each",
            "VALUE=${VALUES[${SLURM_ARRAY_TASK_ID:-0}]}",
            f"RUN={_word(job.output_dir)}/{name}-$VALUE",
        ]
    elif job.names_run:
        lines.append(f"RUN={_word(job.output_dir)}")
    return "\n".join([*lines, options_block(job)])


def options_block(job: Job) -> str:
    """The trainer's options as a bash array, one option a line."""
    rows: list[list[str]] = []
    for word in job.trainer:
        if word.startswith("--") or not rows:
            rows.append([])
        rows[-1].append(_word(word))
    computed = ["output_dir"] if job.names_run else []
    computed += [job.sweep[0]] if job.sweep is not None else []
    rows = [_from_outside(row) for row in rows if _option_of(row) not in computed]
    if job.sweep is not None:
        rows.append([f"--{job.sweep[0]}", '"$VALUE"'])
    if job.names_run:
        rows.append(["--output_dir", '"$RUN"'])
    return "\n".join(["OPTIONS=(", *(f"    {' '.join(row)}" for row in rows), ")"])


def _from_outside(row: list[str]) -> list[str]:
    """A size of the layout or of the model, which an environment variable may give instead."""
    variable = _VARIABLES.get(_option_of(row))
    if variable is None or len(row) != 2:
        return row
    return [row[0], f'"${{{variable}:-{row[1]}}}"']


def _option_of(row: list[str]) -> str:
    return row[0].partition("=")[0].lstrip("-").replace("-", "_")


def _word(text: str) -> str:
    return text if re.fullmatch(r"__[A-Z_]+__", text) else shlex.quote(text)


_VARIABLES = {
    "tensor_parallel_size": "TP_SIZE",
    "pipeline_parallel_size": "PP_SIZE",
    "num_layers": "NUM_LAYERS",
    "hidden_size": "HIDDEN_SIZE",
    "num_attention_heads": "NUM_ATTENTION_HEADS",
}
"""As the scripts of Megatron-LM name them: `TP_SIZE=8 PP_SIZE=2 sbatch SCRIPT`."""

_CHECK_FILLED_IN = """\
left=$(grep -o '__[A-Z_]*__' "$0" | sort -u | xargs)
if [[ -n "$left" ]]; then
    echo "Fill in $left at the top of this script." >&2
    exit 2
fi"""

_ACTIVATE = """\
if [[ ! -r "$VENV/bin/activate" ]]; then
    echo "VENV=$VENV has no bin/activate; name the environment that holds the llm package." >&2
    exit 2
fi
# shellcheck disable=SC1091
source "$VENV/bin/activate\""""


def preparation(job: Job) -> list[str]:
    """The sections before those that concern ranks: checks, folder, modules, environment."""
    submitted_from = "SLURM_SUBMIT_DIR" if job.scheduler == "slurm" else "PBS_O_WORKDIR"
    enter = f'cd "${{{submitted_from}:-.}}" || exit 2'
    # Scripts of modules and conda use variables that are not set.
    strict = "set -euo pipefail"
    return [
        _CHECK_FILLED_IN,
        "\n".join(filter(None, [enter, job.site.set_up])),
        strict if job.image is not None else f"{strict}\n{_ACTIVATE}",
    ]


# Launchers hide the exit codes of their ranks; rank 0 writes down how the training ended.
STATUS = """\
status() {  # what the run says of itself, if it has said anything since this job began
    [[ "$(cat "$RUN/status.json" 2>/dev/null)" != "$BEFORE" ]] || return 0
    sed -n 's/^ *"status": "\\(.*\\)",$/\\1/p' "$RUN/status.json"
}
BEFORE=$(cat "$RUN/status.json" 2>/dev/null || true)"""


def array(name: str, rows: Sequence[str]) -> str:
    """A bash array of words, a row a line."""
    return "\n".join([f"{name}=(", *(f"    {row}" for row in rows), ")"])


def join(sections: Sequence[str]) -> str:
    """A script of its sections, an empty line between two of them."""
    return "\n\n".join(section for section in sections if section) + "\n"
