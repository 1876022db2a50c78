"""Tasks with data on the Hub, for a machine without a network."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm.errors import ConfigError
from llm.extensions.tasks.task_files import find_task_files, has_hub_data, read_settings
from llm.extensions.tasks.task_sets import read_set
from llm.runtime.files import write_whole
from llm.trainers.gpt.seams import FetchDataset


def fetch_tasks(names: Sequence[str], folder: Path, fetch_dataset: FetchDataset) -> tuple[str, ...]:
    """Download the data of tasks; return YAML files that read local data.

    Args:
        names: YAML files, and names of tasks that come with lm-eval and of sets.
        folder: Where to write to; a file for each task or set with data on the Hub goes into
            `tasks/`.
        fetch_dataset: Downloads a data set.

    Raises:
        ConfigError: One is not a single task or a set, or its data are neither local nor on the
            Hub.
    """
    task_files = find_task_files(names)
    return tuple(
        str(_fetch_file(name, Path(task_files[name]), task_files, folder, fetch_dataset))
        for name in names
    )


def _fetch_file(
    name: str,
    source_path: Path,
    task_files: Mapping[str, str],
    folder: Path,
    fetch_dataset: FetchDataset,
) -> Path:
    """Download the data of a task or of a set; return its file, which may be a new one."""
    settings = read_settings(source_path)
    if "set" in settings:
        read_set(source_path, task_files)  # checks the settings
        entries = {
            member_name: _download_member(
                f"{name}: the task {member_name}", entry, source_path, task_files, fetch_dataset
            )
            for member_name, entry in settings["tasks"].items()
        }
        local_settings: dict[str, Any] = settings | {"tasks": entries}
        file_name = settings["set"]
    else:
        if "group" in settings or not isinstance(settings.get("task"), str):
            raise ConfigError(
                f"--eval_tasks {name} is not a single task; name its tasks by YAML file."
            )
        local_data = _download_data(name, settings, fetch_dataset)
        if not local_data:
            return source_path
        local_settings = {"include": str(source_path), **local_data}
        file_name = settings["task"]
    task_path = folder / "tasks" / f"{file_name}.yaml"
    task_path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(task_path, json.dumps(local_settings, indent=2) + "\n")  # JSON is valid YAML
    return task_path


def _download_member(
    subject: str,
    entry: dict[str, Any],
    set_path: Path,
    task_files: Mapping[str, str],
    fetch_dataset: FetchDataset,
) -> dict[str, Any]:
    """Download the data of a task of a set; return its settings, with the paths of local files."""
    file = set_path.parent / entry.get("include", task_files.get(entry.get("task", ""), ""))
    local_data = _download_data(subject, read_settings(file) | entry, fetch_dataset)
    return entry | {"include": str(file), **local_data}


def _download_data(
    subject: str, settings: Mapping[str, Any], fetch_dataset: FetchDataset
) -> dict[str, str]:
    """Download the data of a task.

    Returns:
        The setting that names them; empty for a task that reads local data.
    """
    if "class" in settings:
        raise ConfigError(
            f"--eval_tasks {subject} is a Python class, which finds its data itself; leave it out."
        )
    data_files = (settings.get("dataset_kwargs") or {}).get("data_files")
    if "://" in str(data_files):
        raise ConfigError(
            f"--eval_tasks {subject} reads {data_files}: download the file and use its path in "
            "your YAML file."
        )
    if not has_hub_data(settings):
        return {}
    name, config_name = settings["dataset_path"], settings.get("dataset_name")
    return {"dataset_path": fetch_dataset("eval_tasks", name, config_name)}
