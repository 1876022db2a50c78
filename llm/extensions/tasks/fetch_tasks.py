"""Tasks with data on the Hub, for a machine without a network."""

import functools
import json
from pathlib import Path
from typing import Any

from llm.errors import ConfigError, one_line
from llm.runtime.files import write_whole
from llm.trainers.gpt.seams import FetchDataset


def fetch_task(name: str, folder: Path, fetch_dataset: FetchDataset) -> str:
    """Download the data of a task; return a YAML file that reads local data.

    Args:
        name: A YAML file, or the name of a task that comes with lm-eval.
        folder: Where to write to; a file for each task with data on the Hub goes into `tasks/`.
        fetch_dataset: Downloads a data set.

    Raises:
        ConfigError: It is not a single task, or its data are neither local nor on the Hub.
    """
    source_path = _find_task(name)
    settings = _task_settings(source_path)
    if "group" in settings or "class" in settings or not isinstance(settings.get("task"), str):
        raise ConfigError(f"--eval_tasks {name} is not a single task; name its tasks by YAML file.")
    data_files = (settings.get("dataset_kwargs") or {}).get("data_files")
    if "://" in str(data_files):
        raise ConfigError(
            f"--eval_tasks {name} reads {data_files}: download the file and use its path in your "
            "YAML file."
        )
    dataset = settings.get("dataset_path")
    if data_files is not None or dataset is None or Path(dataset).exists():
        return str(source_path)
    local_settings = {
        "include": str(source_path),
        "dataset_path": fetch_dataset("eval_tasks", dataset, settings.get("dataset_name")),
    }
    task_path = folder / "tasks" / f"{settings['task']}.yaml"
    task_path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(task_path, json.dumps(local_settings, indent=2) + "\n")  # JSON is valid YAML
    return str(task_path)


def _find_task(name: str) -> Path:
    """Return the absolute path of a YAML file, or of a task that comes with lm-eval."""
    if Path(name).is_file():
        return Path(name).absolute()
    try:
        task_entry = _task_index().get(name)
    except ImportError as error:
        raise ConfigError(
            f"--eval_tasks {name} is not a file; the tasks of lm-eval need pip install "
            "'llm-trainers[tasks]'."
        ) from error
    if task_entry is None:
        raise ConfigError(
            f"--eval_tasks {name} is neither a YAML file nor a task that comes with lm-eval; "
            "`lm_eval ls tasks` lists those."
        )
    if task_entry.yaml_path is None:
        raise ConfigError(f"--eval_tasks {name} is a group of tasks; name its tasks one by one.")
    return Path(task_entry.yaml_path)


@functools.cache  # it reads thousands of files
def _task_index() -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    index: dict[str, Any] = TaskManager().task_index
    return index


def _task_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a task's file, merged over the files that it includes."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Skips the functions that a task names instead of importing them."""

    Loader.add_constructor("!function", lambda loader, node: None)
    try:
        settings: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
        if not isinstance(settings, dict):
            raise ConfigError(f"--eval_tasks {path} is not the YAML file of a task.")
        included_files = settings.pop("include", [])
        for file_name in [included_files] if isinstance(included_files, str) else included_files:
            settings = _task_settings(path.parent / file_name) | settings
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--eval_tasks {path} cannot be read: {one_line(error)}.") from error
    return settings
