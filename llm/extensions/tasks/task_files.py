"""The files of tasks: YAML files of lm-eval by path or by name, and the sets of this package."""

import difflib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm.errors import ConfigError, one_line

SETS_FOLDER = Path(__file__).with_name("sets")
"""The files of the sets, NAME.yaml; the folder `tasks` in it has tasks that lm-eval lacks."""


def set_names() -> list[str]:
    """Return the names of the sets of this package."""
    return sorted(path.stem for path in SETS_FOLDER.glob("*.yaml"))


def find_task_files(names: Sequence[str]) -> dict[str, str]:
    """Return the absolute path of the file of each task, and of each task of the sets among them.

    Names of lm-eval are looked up in all files of lm-eval, which takes seconds.

    Args:
        names: Values of `--eval_tasks`: YAML files, names of sets, or names of tasks of lm-eval.

    Returns:
        Paths by name; the tasks of a set are listed by their names in lm-eval.

    Raises:
        ConfigError: A name is neither, or a file cannot be read.
    """
    path_by_name = {name: _find_file(name) for name in names}
    for name, path in list(path_by_name.items()):
        for task_name in _list_named_members(path):
            path_by_name[task_name] = _find_named_task(task_name, f"{name}: the task {task_name}")
    return {name: str(path) for name, path in path_by_name.items()}


def _list_named_members(path: Path) -> list[str]:
    """Return the tasks of lm-eval that the file of a set names; empty for the file of a task."""
    settings = read_settings(path)
    members = settings.get("tasks")
    if "set" not in settings or not isinstance(members, dict):
        return []
    return [
        str(member.get("task"))
        for member in members.values()
        if isinstance(member, dict) and "include" not in member
    ]


def _find_file(name: str) -> Path:
    if Path(name).is_file():
        return Path(name).absolute()
    if name in set_names():
        return SETS_FOLDER / f"{name}.yaml"
    return _find_named_task(name, name)


def _find_named_task(name: str, subject: str) -> Path:
    """Return the file of a task that comes with lm-eval.

    Args:
        name: The name of the task.
        subject: The task in a message, after the option.
    """
    try:
        task_index = _read_task_index()
    except ImportError as error:
        raise ConfigError(
            f"--eval_tasks {subject} is not a file; the tasks of lm-eval need pip install "
            "'llm-trainers[tasks]'."
        ) from error
    task_entry = task_index.get(name)
    if task_entry is None:
        close_names = difflib.get_close_matches(name, [*task_index, *set_names()], n=3)
        raise ConfigError(
            f"--eval_tasks {subject} is neither a YAML file, nor a set ({', '.join(set_names())}), "
            "nor a task that comes with lm-eval; "
            + (f"did you mean {' or '.join(close_names)}? " if close_names else "")
            + "`lm_eval ls tasks` lists the tasks."
        )
    settings = task_entry.cfg or {}
    if task_entry.yaml_path is None or "group" in settings:
        members = settings.get("task") or sorted(task_entry.tags)
        names = [member for member in members if isinstance(member, str)]  # others are settings
        raise ConfigError(
            f"--eval_tasks {subject} is a group of tasks; name its tasks one by one: "
            f"{' '.join(names)}."
        )
    return Path(task_entry.yaml_path)


@functools.cache  # it reads thousands of files
def _read_task_index() -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    index: dict[str, Any] = TaskManager().task_index
    return index


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a task or a set, merged over the files that it includes.

    Raises:
        ConfigError: The file is not YAML, or not that of a task or a set.
    """
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
            settings = read_settings(path.parent / file_name) | settings
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--eval_tasks {path} cannot be read: {one_line(error)}.") from error
    return settings


def has_hub_data(settings: Mapping[str, Any]) -> bool:
    """Return whether a task reads a data set on the Hub, and not files."""
    dataset = settings.get("dataset_path")
    has_files = bool((settings.get("dataset_kwargs") or {}).get("data_files"))
    return dataset is not None and not has_files and not Path(dataset).exists()
