"""Token files on the disk: located by the name that a user gives, mapped into memory."""

import heapq
import mmap
import os
import stat
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llm.errors import DataError


def locate(path: Path) -> tuple[Path, bool]:
    """Finds token files by their name.

    Args:
        path: `PREFIX`, `PREFIX.bin` or `PREFIX.idx` for a pair. A flat file is named with its
            `.bin`, which has no `.idx` beside it.

    Returns:
        (the path without suffix, whether it is a flat file).

    Raises:
        DataError: There is none; the message names those that are near.
    """
    path = Path(path)
    if os.path.exists(beside(path, ".idx")):
        return path, False
    prefix = path
    if path.suffix in (".bin", ".idx"):
        prefix = path.with_suffix("")
        if os.path.exists(beside(prefix, ".idx")):
            return prefix, False
        if path.suffix == ".bin" and os.path.exists(path):
            return prefix, True
    raise _missing(path, prefix)


def _missing(path: Path, prefix: Path) -> DataError:
    if os.path.exists(beside(prefix, ".bin")):
        return DataError(
            f"The token file {prefix}.bin has no index {prefix}.idx beside it; if it is a flat "
            f"file of uint16 ids, as nanoGPT writes them, name it with its suffix: {prefix}.bin."
        )
    folder = path if os.path.isdir(path) else path.parent
    try:
        prefixes = [name[:-4] for name in os.listdir(folder) if name.endswith(".idx")]
    except (OSError, ValueError):
        prefixes = []
        hint = f"the folder {folder} cannot be read"
    else:
        hint = f"the folder {folder} holds no .idx at all"
    if prefixes:

        def likeness(name: str) -> tuple[bool, float]:
            return name.startswith(prefix.name), SequenceMatcher(None, name, prefix.name).ratio()

        near = heapq.nlargest(5, sorted(prefixes), likeness)
        hint = "near it there are " + ", ".join(str(folder / name) for name in near)
    looked_for = f"{prefix}.bin and {prefix}.idx" if path == prefix else str(path)
    return DataError(f"There is no token file {path}: looked for {looked_for}; {hint}.")


def map_file(path: Path) -> NDArray[np.uint8]:
    """Maps a whole file into memory, read-only.

    Returns:
        Its bytes [size].

    Raises:
        DataError: It is missing, unreadable, or no regular file.
    """
    try:
        # To open a pipe would wait for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(f"The token file {path} cannot be read: it is no regular file.")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:  # cannot be mapped
                return np.empty(0, np.uint8)
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(
            f"The token file {path} cannot be read: {error.strerror or error}."
        ) from error
    except ValueError as error:  # a zero byte in the name; a file that has just been cut short
        raise DataError(f"The token file {path} cannot be read: {error}.") from error
    return np.frombuffer(memory, np.uint8)


def beside(prefix: Path, suffix: str) -> Path:
    """The file PREFIX + suffix."""
    # Path.with_suffix would eat the "-v1.2" of "text-v1.2".
    return Path(f"{prefix}{suffix}")
