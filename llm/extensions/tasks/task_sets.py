"""Sets of tasks: how their files are read, and the one number of each."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from llm.errors import ConfigError
from llm.extensions.tasks.task_files import SETS_FOLDER, read_settings
from llm.metrics.set_scores import SET_SCORES
from llm.runtime.logging import counted

_DATA_KEYS = {"include", "dataset_path", "dataset_name", "dataset_kwargs"}
"""Keys of a member that a copy of a set may change, because its data are elsewhere."""

_MAX_SUFFIX_LENGTH = 60
"""Longer lists of tasks are replaced by a digest, because results also name files."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A task of a set.

    Attributes:
        name: Its name in the set.
        settings: Its settings for lm-eval; `include` is the path of the task that they change.
        metric: The accuracy that counts; None for bits per byte.
        chance: The accuracy of a guess.
    """

    name: str
    settings: dict[str, Any]
    metric: str | None
    chance: float


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """Tasks with one number.

    Attributes:
        set_name: Its name.
        name: Name of the results: of a copy of a set with fewer tasks, it tells what is missing.
        description: The same for the log.
        score: Name of the number: `centered_accuracy` or `answer_bits_per_byte`.
        members: The tasks.
    """

    set_name: str
    name: str
    description: str
    score: str
    members: tuple[Member, ...]

    def write_task_files(self, folder: Path) -> list[str]:
        """Write a file for each task, under a name that no other task has; return the paths."""
        paths = []
        for member in self.members:
            path = folder / f"{self.task_name(member)}.yaml"
            settings = member.settings | {"task": self.task_name(member)}
            path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is valid YAML
            paths.append(str(path))
        return paths

    def task_name(self, member: Member) -> str:
        """Return the name of a task for lm-eval."""
        return f"{self.set_name}_{member.name}"

    def compute_results(
        self, metrics_by_task: Mapping[str, Mapping[str, float]], tasks: Mapping[str, Any]
    ) -> dict[str, float]:
        """Return the score of the set, and the value of each task, by name.

        `centered_accuracy` is the mean over the tasks of (accuracy - chance) / (1 - chance), so a
        guess has 0 and a perfect model 1. `answer_bits_per_byte` is the mean over the tasks.

        Args:
            metrics_by_task: lm-eval's results.
            tasks: lm-eval's tasks, which it has just run.

        Raises:
            ValueError: A task does not have the metric.
        """
        values = {}
        for member in self.members:
            task_name = self.task_name(member)
            if member.metric is None:
                values[member.name] = compute_gold_bits_per_byte(tasks[task_name])
            elif member.metric in metrics_by_task[task_name]:
                values[member.name] = metrics_by_task[task_name][member.metric]
            else:
                raise ValueError(f"the task {task_name} has no metric {member.metric}")
        centered_values = [
            (values[member.name] - member.chance) / (1 - member.chance) for member in self.members
        ]
        return {self.score: fmean(centered_values), **values}


def compute_gold_bits_per_byte(task: Any) -> float:
    """Return the bits per byte of the gold answers of a task of lm-eval.

    A document has -log2 p(answer | prompt) / bytes. The logarithm is the sum over the tokens of the
    answer and of the white space that lm-eval puts before it. The bytes are those of the answer in
    UTF-8, without this white space. The result is the mean over the documents, which have equal
    weights: the `bpb_v1` of https://github.com/allenai/OLMo-in-loop-evals. (lm-eval's metric
    `bits_per_byte`, for whole texts, divides the sums.)

    Args:
        task: A task with choices or with one answer, whose requests have been answered.

    Raises:
        ValueError: A document has no gold answer, several or an empty one.
    """
    bits_by_document = {}
    for request in task.instances:
        if task.OUTPUT_TYPE == "multiple_choice" and request.idx != _gold_index(task, request.doc):
            continue
        answer = request.args[1].lstrip()
        if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood") or not answer:
            raise ValueError("bits per byte need answers to score, and an answer has no text")
        log_prob = request.resps[0][0]
        bits_by_document[request.doc_id] = -log_prob / math.log(2) / len(answer.encode())
    return fmean(bits_by_document.values())


def _gold_index(task: Any, document: Any) -> int:
    """Return the index of the right choice of a document."""
    # A task with several prompts and one answer names the right prompt where others have a text.
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    choices = task.doc_to_choice(document)
    index = choices.index(gold) if gold in choices else gold
    if not isinstance(index, int) or not 0 <= index < len(choices):
        raise ValueError(f"bits per byte need one gold answer, and a document has {gold!r}")
    return index


def read_set(path: Path, task_files: Mapping[str, str]) -> TaskSet:
    """Read the file of a set.

    Args:
        path: The file. A copy of a set of this package may leave out tasks, and read other data.
        task_files: Paths of tasks by their names in lm-eval.

    Raises:
        ConfigError: It does not define a set, or changes one of this package under the same name.
    """
    settings = read_settings(path)
    set_name, score, entries = (settings.get(key) for key in ("set", "score", "tasks"))
    if (
        not isinstance(set_name, str)
        or not re.fullmatch(r"[\w.-]+", set_name)
        or score not in SET_SCORES
        or not isinstance(entries, dict)
    ):
        raise ConfigError(
            f"--eval_tasks {path} is not a set of tasks: it needs the keys set (a name of letters, "
            f"digits, - and _), score ({' or '.join(SET_SCORES)}) and tasks (settings by name)."
        )
    members = []
    for name, entry in entries.items():
        fault = _find_entry_fault(entry, score)
        if fault is not None:
            raise ConfigError(f"--eval_tasks {path}: the task {name} {fault}.")
        members.append(_make_member(str(name), entry, path, task_files))
    name, description = _name_task_set(path, set_name, entries)
    return TaskSet(
        set_name=set_name,
        name=name,
        description=description,
        score=score,
        members=tuple(members),
    )


def _make_member(
    name: str, entry: Mapping[str, Any], set_path: Path, task_files: Mapping[str, str]
) -> Member:
    """Return a task of a set, from its settings in the set, which have no faults."""
    changes = {key: entry[key] for key in entry.keys() - {"task", "metric", "chance"}}
    file = set_path.parent / entry["include"] if "include" in entry else task_files[entry["task"]]
    return Member(
        name=name,
        settings=changes | {"include": str(file)},
        metric=entry.get("metric"),
        chance=float(entry.get("chance", 0)),
    )


def _find_entry_fault(entry: Any, score: str) -> str | None:
    """Return what is wrong with the settings of a task in a set, or None."""
    if not isinstance(entry, dict) or not entry.keys() & {"task", "include"}:
        return "needs a task of lm-eval (task) or a file (include)"
    num_fewshot, chance = entry.get("num_fewshot"), entry.get("chance", 0)
    if not isinstance(num_fewshot, int) or num_fewshot < 0:
        return f"needs a number of examples (num_fewshot), not {num_fewshot!r}"
    if score == "answer_bits_per_byte":
        unused_keys = sorted(entry.keys() & {"metric", "chance"})
        return f"has {unused_keys[0]}, which bits per byte do not use" if unused_keys else None
    if not isinstance(entry.get("metric"), str):
        return "needs the name of an accuracy (metric)"
    if not isinstance(chance, int | float) or not 0 <= chance < 1:
        return f"needs a chance of at least 0 and below 1, not {chance!r}"
    return None


def _name_task_set(path: Path, set_name: str, entries: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a set for the results, and for the log.

    A score of fewer tasks must not look like that of all, so both names say what is left out.

    Raises:
        ConfigError: The tasks differ from those of the set of this package with that name.
    """
    original_path = SETS_FOLDER / f"{set_name}.yaml"
    original_entries = read_settings(original_path)["tasks"] if original_path.is_file() else entries
    _check_entries(path, set_name, entries, original_entries)
    missing_names = [name for name in original_entries if name not in entries]
    if not missing_names:
        return set_name, f"{set_name} ({counted(len(entries), 'task')})"
    num_original = len(original_entries)
    name = f"{set_name}_{len(entries)}_of_{num_original}"
    suffix = f"without_{'_'.join(missing_names)}"
    if len(suffix) > _MAX_SUFFIX_LENGTH:
        suffix = hashlib.sha256(suffix.encode()).hexdigest()[:8]
    return (
        f"{name}_{suffix}",
        f"{set_name} ({len(entries)} of {num_original} tasks: without {', '.join(missing_names)})",
    )


def _check_entries(
    path: Path,
    set_name: str,
    entries: Mapping[str, Any],
    original_entries: Mapping[str, Any],
) -> None:
    """Refuse a set without tasks, and one with other tasks than this package's set of that name."""
    changed_names = [
        name
        for name, entry in entries.items()
        if name not in original_entries
        or _measured_settings(entry) != _measured_settings(original_entries[name])
    ]
    if changed_names:
        raise ConfigError(
            f"--eval_tasks {path} changes {', '.join(changed_names)} of the set {set_name}: give "
            "the set another name."
        )
    if not entries:
        raise ConfigError(f"--eval_tasks {path}: the set {set_name} has no tasks.")


def _measured_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task that decide what is measured, and not where its data are."""
    return {key: value for key, value in entry.items() if key not in _DATA_KEYS}
