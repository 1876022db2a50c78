"""A local data set of text files, divided into splits.

The card of a data set (`README.md`) can list the files of each configuration and split. Otherwise
the names of files and folders tell the splits.
"""

import glob
import logging
import os
import re
import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm.data.text_folder import find_text_files, refuse_duplicates
from llm.data.text_identity import bare_name, check_dataset_name
from llm.errors import DataError, one_line
from llm.runtime.logging import counted

_SPLIT_BY_NAME = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD_NUMBER = re.compile(r"[-._ ]?\d+(-of-\d+)?(-[0-9a-f]{16})?$")
_OPTION = "--dataset_name"

logger = logging.getLogger("llm.data")


@dataclass(frozen=True, kw_only=True)
class DatasetFolder:
    """The files of a local data set.

    Attributes:
        name: Its name in messages: the value of `--dataset_name`.
        splits: The files of each split, in the order of reading.
    """

    name: str
    splits: Mapping[str, Sequence[Path]]

    def list_files(self, split: str) -> Sequence[Path]:
        """Return the files of a split.

        Raises:
            DataError: The split does not exist.
        """
        if split not in self.splits:
            raise DataError(
                f"The data set {self.name} has no split {split!r}, only: {', '.join(self.splits)}."
            )
        return self.splits[split]


def find_saved_dataset(dataset_name: str, config_name: str | None) -> Path | None:
    """Return the folder that the datasets library has written with `save_to_disk`, if it is one."""
    folder = Path(os.path.abspath(dataset_name))
    for path in (folder / config_name, folder) if config_name else (folder,):
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return path
    return None


def open_dataset_folder(
    dataset_name: str, config_name: str | None, *, file_option: str
) -> DatasetFolder | None:
    """Find the splits of a local folder of text files, and log what was chosen.

    Args:
        dataset_name: A Hub name, or a folder.
        config_name: A configuration in the folder's card, or the name of a folder in it; or None.
        file_option: The option for a file, for messages.

    Returns:
        The files; None if the datasets library reads it: a data set on the Hub, or a folder that
        `save_to_disk` has written.

    Raises:
        DataError: The folder does not exist or has no text file, the configuration does not exist,
            the card is broken, or the split of a file is unclear.
    """
    check_dataset_name(dataset_name, file_option)
    folder = Path(dataset_name)
    if not folder.is_dir() or find_saved_dataset(dataset_name, config_name) is not None:
        return None
    if configurations := _read_configurations(folder / "README.md"):
        configuration = _choose_configuration(configurations, config_name, dataset_name)
        folder = _path_inside(folder, str(configuration.get("data_dir") or ""))
        patterns = _parse_file_patterns(configuration.get("data_files") or {})
    else:
        folder = _find_configuration_folder(folder, config_name)
        patterns = {}
    if patterns:
        splits, reason = _group_by_patterns(folder, patterns), "as README.md says"
    else:
        splits, reason = _group_by_names(folder, file_option)
    split_counts = [f"{split} is {counted(len(files), 'file')}" for split, files in splits.items()]
    logger.info(f"{_OPTION} {folder}: {', '.join(split_counts)}, {reason}")
    for files in splits.values():
        refuse_duplicates(files, _OPTION)
    return DatasetFolder(name=dataset_name, splits=splits)


def _read_configurations(card_path: Path) -> list[dict[str, Any]]:
    """Return the configurations in the metadata of a card; none without card or metadata."""
    if not card_path.is_file():
        return []
    from huggingface_hub import metadata_load  # imported here: most folders have no card

    try:
        if not _has_metadata(card_path):
            return []
        configurations = (metadata_load(card_path) or {}).get("configs", [])
    except Exception as error:  # YAML's own, ValueError, OSError
        raise DataError(
            f"{_OPTION} {card_path.parent}: the metadata at the top of README.md cannot be read "
            f"({one_line(error)}); mend or remove them."
        ) from error
    if not isinstance(configurations, list) or not all(
        isinstance(configuration, dict) and isinstance(configuration.get("config_name"), str)
        for configuration in configurations
    ):
        raise _unknown_form_error("configs", configurations)
    return configurations


def _has_metadata(card_path: Path) -> bool:
    """Return whether a card begins with a block of YAML, perhaps after blanks."""
    with open(card_path, "rb") as file:
        return file.read(100).lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"---")


def _choose_configuration(
    configurations: list[dict[str, Any]], config_name: str | None, dataset_name: str
) -> dict[str, Any]:
    """Return a configuration by its name; without a name, the only one or the default."""
    configuration_by_name = {
        configuration["config_name"]: configuration for configuration in configurations
    }
    defaults = [
        name
        for name in configuration_by_name
        if name == "default" or configuration_by_name[name].get("default")
    ]
    if config_name is None and (len(configuration_by_name) == 1 or len(defaults) == 1):
        config_name = defaults[0] if defaults else next(iter(configuration_by_name))
    if config_name not in configuration_by_name:
        fault = "several configurations" if config_name is None else f"no {config_name!r}"
        raise DataError(
            f"The data set {dataset_name} has {fault}; choose a configuration with "
            f"--dataset_config_name from: {', '.join(map(repr, configuration_by_name))}."
        )
    return configuration_by_name[config_name]


def _find_configuration_folder(folder: Path, config_name: str | None) -> Path:
    """Return the folder of a configuration, for a data set without a card."""
    if config_name in (None, "default"):
        return folder
    configuration_folder = folder / str(config_name)
    if not configuration_folder.is_dir():
        raise DataError(
            f"{_OPTION} {folder} has no configuration {config_name!r}: neither its README.md nor a "
            "folder has this name. Leave --dataset_config_name out to read the whole folder."
        )
    return configuration_folder


def _parse_file_patterns(data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of the files of each split; without splits, all are for training."""
    if isinstance(data_files, str | list) and all(isinstance(entry, str) for entry in data_files):
        data_files = {"train": data_files}
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    patterns_by_split: dict[str, list[str]] = defaultdict(list)
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        match entry:
            case {"split": str(split), "path": str(path)}:
                patterns_by_split[split].append(path)
            case {"split": str(split), "path": [*paths]} if all(isinstance(p, str) for p in paths):
                patterns_by_split[split] += paths
            case _:
                raise _unknown_form_error("data_files", entry)
    return patterns_by_split


def _unknown_form_error(field: str, value: Any) -> DataError:
    """Return the error for a field of a card with a value that the specification lacks."""
    return DataError(
        f"{_OPTION}: the field {field} of README.md has a form that is not known "
        f"({reprlib.repr(value)}); mend it, or remove the field, so that names tell the splits."
    )


def _group_by_patterns(
    folder: Path, patterns_by_split: Mapping[str, Sequence[str]]
) -> dict[str, list[Path]]:
    """Return the files of each split that match its patterns, in the order of the patterns."""
    files_by_split: dict[str, list[Path]] = {}
    for split, patterns in patterns_by_split.items():
        matching_files = [file for pattern in patterns for file in _match_pattern(folder, pattern)]
        files_by_split[split] = list(dict.fromkeys(matching_files))
    _log_unlisted_files(folder, files_by_split)
    return files_by_split


def _log_unlisted_files(folder: Path, files_by_split: Mapping[str, Sequence[Path]]) -> None:
    """Log how many text files of a folder belong to no split."""
    listed_files = {file for files in files_by_split.values() for file in files}
    text_files = find_text_files(folder, _OPTION)
    unlisted_files = [file for file in text_files if file not in listed_files]
    if unlisted_files:
        logger.info(
            f"{_OPTION} {folder}: README.md does not list "
            f"{counted(len(unlisted_files), 'text file')} for this configuration, such as "
            f"{unlisted_files[0]}"
        )


def _path_inside(folder: Path, name: str) -> Path:
    """Return a path in a folder; refuse one outside, since the card may be from a stranger."""
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise DataError(
            f"{_OPTION} {folder}: README.md names {name}, which is outside of the folder; mend "
            "README.md."
        )
    return folder / name


def _match_pattern(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder that match a pattern of its card, sorted by name."""
    _path_inside(folder, pattern)
    names = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise DataError(
            f"{_OPTION} {folder}: README.md names {pattern}, which matches no file; download it, "
            "or remove the name from README.md."
        )
    return files


def _group_by_names(folder: Path, file_option: str) -> tuple[dict[str, list[Path]], str]:
    """Group the text files of a folder by the split in the name of the file or of its folder.

    Returns:
        The files of each split; and the reason, as the end of a sentence.
    """
    files_by_split: dict[str, list[Path]] = {
        split: [] for split in dict.fromkeys(_SPLIT_BY_NAME.values())
    }
    files_without_split: list[Path] = []
    remedy = (
        "move the files of each split into a folder train, validation or test, or name the file to "
        f"read with {file_option}."
    )
    for file in find_text_files(folder, _OPTION):
        split_names = find_split_names(file.relative_to(folder))
        if len(split_names) > 1:
            raise DataError(
                f"{_OPTION}: {file} is named like the splits {' and '.join(split_names)}; {remedy}"
            )
        split_files = files_by_split[split_names[0]] if split_names else files_without_split
        split_files.append(file)
    files_by_split = {split: files for split, files in files_by_split.items() if files}
    if not files_by_split:
        return {"train": files_without_split}, "since no name of a file or folder tells a split"
    if files_without_split:
        split, files = next(iter(files_by_split.items()))
        raise DataError(
            f"{_OPTION}: {files[0]} is named like the split {split}, and {files_without_split[0]} "
            f"like none; {remedy}"
        )
    return files_by_split, "as the names of files or folders tell"


def find_split_names(path: Path) -> list[str]:
    """Return the splits that the names of a file and its folders begin or end with.

    Args:
        path: The path of the file, relative to the data set.
    """
    split_names: dict[str, None] = {}
    for name in (*path.parts[:-1], bare_name(path)):
        name_parts = re.split(r"[-._ ]+", _SHARD_NUMBER.sub("", name.lower()))
        split_names |= {
            _SPLIT_BY_NAME[name_part]: None
            for name_part in (name_parts[0], name_parts[-1])
            if name_part in _SPLIT_BY_NAME
        }
    return list(split_names)
