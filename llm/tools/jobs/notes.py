"""Notes about a job script that the program has written."""

from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path

from llm.config.options import path_options
from llm.config.shell import shell_line
from llm.tools.jobs.options import JobOptions
from llm.trainers.gpt.config import CoreConfig

_OUTPUT_OPTIONS = ("output_dir", "metrics_file")
"""Options with a path that a run creates."""

_FILE_OPTIONS = {
    "data_path",
    "train_file",
    "validation_file",
    "vocab_file",
    "merges_file",
    "config_name",
}
"""Options that name files only. Others, such as tokenizer_name, also take names on the Hub."""


def describe_script(
    job: JobOptions,
    config: CoreConfig,
    *,
    trainer_arguments: Sequence[str],
    added_arguments: Sequence[str],
) -> list[str]:
    """Return sentences about a script: what it needs, and what to do next.

    Args:
        job: The job, with the site's defaults.
        config: The options of its trainer.
        trainer_arguments: The same options as the user's arguments.
        added_arguments: The arguments of the trainer that this program adds.
    """
    assert job.gpus_per_node is not None
    lines = [f"Added: {' '.join(added_arguments)}."] if added_arguments else []
    for placeholder, flag in _unfilled_fields(job):
        lines.append(f"Fill in {placeholder} before you submit, or give {flag}.")
    for name, path in _input_files(config):
        if not _exists_here(path):
            lines.append(f"--{name} {path} is not on this machine; the job needs it.")
    command = ["llm-trainers", "plan", "--nodes", str(job.nodes)]
    command += ["--gpus_per_node", str(job.gpus_per_node), *trainer_arguments]
    lines.append(
        "Model, tokenizer, memory, time and disk have not been checked. To read the model and "
        f"predict the rest for a device, add --device: {shell_line(command)}"
    )
    if job.output is not None:
        submit = "sbatch" if job.scheduler == "slurm" else "qsub"
        lines.append(f"Submit it: {shell_line([submit, Path(job.output)])}")
    return lines


def _exists_here(path: str) -> bool:
    """Return whether a file, a pattern, or the prefix of token files or parts exists."""
    if glob(path) or Path(f"{path}.bin").exists():
        return True
    return bool(glob(f"{escape(path)}-*-of-*.bin"))


def _unfilled_fields(job: JobOptions) -> list[tuple[str, str]]:
    """Return the placeholders in a script, and the options that fill them."""
    fields = (("account", job.account), ("queue", job.queue or ""))
    return [(value, f"--{name}") for name, value in fields if value.startswith("__")]


def _input_files(config: CoreConfig) -> list[tuple[str, str]]:
    """Return the options that name files to read, and each file."""
    return [
        (name, path)
        for name, path in path_options(config)
        if name in _FILE_OPTIONS or (name not in _OUTPUT_OPTIONS and path.startswith((".", "/")))
    ]
