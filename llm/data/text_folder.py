"""The text files in a folder: which are read, and which are left out."""

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from llm.data.text_identity import COMPRESSIONS, KINDS, bare_name, kind_of, refuse_broken_links
from llm.errors import DataError
from llm.runtime.logging import list_first

_DOCUMENTATION_NAMES = (
    *("readme", "license", "licence", "copying", "notice", "changelog"),
    *("dataset_info", "dataset_infos"),  # of the datasets library
)
_TOKENIZER_MARKERS = ("tokenizer.json", "tokenizer_config.json")
_FILES_OF_TOKENIZERS = (
    *_TOKENIZER_MARKERS,
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
)
_MAX_LOGGED_NAMES = 3

logger = logging.getLogger("llm.data")


def find_text_files(folder: Path, option: str) -> list[Path]:
    """Return the text files in a folder at any depth, in the order of their paths.

    Files of unknown suffixes, hidden files, documentation such as `README.txt`, tokenizers, and the
    results of earlier preparations are left out; the log counts and names them.

    Args:
        folder: The folder.
        option: The option that named it, for messages.

    Raises:
        DataError: The folder has no text file, a folder in it is unreadable, or a link is broken.
    """
    paths = _walk_folder(folder, option)
    excluded_names_by_reason: dict[str, list[str]] = defaultdict(list)
    text_files: list[Path] = []
    for path in paths:
        if reason := _find_exclusion_reason(path, folder):
            excluded_names_by_reason[reason].append(str(path.relative_to(folder)))
        else:
            text_files.append(path)
    if excluded_names_by_reason:
        exclusions = ", ".join(
            f"{list_first(names, _MAX_LOGGED_NAMES)} ({reason})"
            for reason, names in excluded_names_by_reason.items()
        )
        num_excluded = len(paths) - len(text_files)
        logger.info(
            f"{option} {folder}: {num_excluded:,} of {len(paths):,} files are left out: "
            f"{exclusions}"
        )
    if not text_files:
        raise DataError(
            f"{option} {folder} is a folder without any file of a known kind: {', '.join(KINDS)}, "
            f"plain or packed as {', '.join(COMPRESSIONS)}. Plain text such as source code has to "
            "be in files that end in .txt."
        )
    return text_files


def refuse_duplicates(paths: Sequence[Path], option: str) -> None:
    """Raise a DataError if two paths are the same file."""
    real_paths: set[Path] = set()
    for path in paths:
        if (real_path := path.resolve()) in real_paths:
            raise DataError(f"{option} names {path} twice; give each file once.")
        real_paths.add(real_path)


def _walk_folder(folder: Path, option: str) -> list[Path]:
    """Return all files in a folder at any depth, following links; refuse unreadable folders."""

    def refuse_folder(error: OSError) -> None:
        raise DataError(
            f"{option} {folder}: {error.filename} cannot be read ({error.strerror}); fix this, or "
            "name the files to read."
        ) from error

    paths: list[Path] = []
    visited_folders: set[str] = set()
    for folder_name, folders, files in os.walk(folder, onerror=refuse_folder, followlinks=True):
        real_folder = os.path.realpath(folder_name)
        # A link to a folder above it would be followed endlessly.
        if real_folder in visited_folders:
            folders.clear()
            continue
        visited_folders.add(real_folder)
        paths += [Path(folder_name) / file for file in files]
    refuse_broken_links(paths, f"{option} {folder}:")
    return sorted(paths)


def _find_exclusion_reason(path: Path, folder: Path) -> str | None:
    """Return why a file in a folder is not read as text; None if it is."""
    relative_path = path.relative_to(folder)
    if any(name.startswith(".") for name in relative_path.parts):
        return "hidden"
    # Token files and the folder of an interrupted preparation may be next to their text.
    if any(name.endswith(".parts") for name in relative_path.parts[:-1]):
        return "an unfinished preparation"
    if path.stem.lower() in _DOCUMENTATION_NAMES or bare_name(path).lower() in _DOCUMENTATION_NAMES:
        return "documentation"
    if path.name in _FILES_OF_TOKENIZERS and any(
        (path.parent / name).exists() for name in _TOKENIZER_MARKERS
    ):
        return "a tokenizer"
    if not path.is_file() or kind_of(path) not in KINDS:
        return "not a known kind of text"
    return "token files" if path.suffix == ".json" and _is_sidecar(path) else None


def _is_sidecar(path: Path) -> bool:
    if not path.with_suffix(".bin").exists():
        return False
    from llm.data.formats.sidecar import read_sidecar  # imported here because it loads numpy

    try:
        return read_sidecar(path.with_suffix("")) is not None
    except DataError:  # a text that happens to have the name of a sidecar
        return False
