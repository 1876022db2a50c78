"""nanoGPT's flat token files; also finds which kind of token files a path names.

A flat `.bin` holds uint16 ids without header or index.
"""

import os
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llm.data.formats.megatron import TokenFile, add_suffix, map_file
from llm.data.formats.parts import TokenFileParts, find_parts, part_files
from llm.errors import DataError

_LLM_C_MAGIC = (20240520).to_bytes(4, "little")  # llm.c's files also end in .bin


class FlatTokenFile:
    """A `.bin` of uint16 ids, memory-mapped; opening takes the same time for any size.

    It does not say where documents begin.

    Attributes:
        path: The file.
        prefix: The path without `.bin`.
        tokens: All token ids, uint16 [num_tokens].
        num_tokens: Their number.
        num_documents: 0, for not known.

    Args:
        path: The file, with its `.bin`.

    Raises:
        DataError: The file is missing, is cut within an id, or begins with llm.c's header.
    """

    num_documents = 0

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.prefix = Path(str(path).removesuffix(".bin"))
        data = map_file(self.path)
        if data.size % 2:
            raise DataError(
                f"The token file {self.path} is {data.size} bytes long, which cuts a uint16 in "
                "two; it is damaged or of another kind."
            )
        if data[:4].tobytes() == _LLM_C_MAGIC:
            raise DataError(
                f"The token file {self.path} begins with the header of llm.c, not with ids; cut "
                "its first 1,024 bytes off to read the rest as a flat file of uint16 ids."
            )
        self.tokens: NDArray[Any] = data.view("<u2")
        self.num_tokens = int(self.tokens.size)


AnyTokenFile = TokenFile | TokenFileParts | FlatTokenFile


def open_token_file(path: Path) -> AnyTokenFile:
    """Open token files of any kind; see `locate_token_file` for their names.

    Raises:
        DataError: The file is missing, truncated or inconsistent.
    """
    prefix, is_flat = locate_token_file(path)
    return open_token_files(prefix, [] if is_flat else find_parts(prefix), is_flat=is_flat)


def open_token_files(prefix: Path, parts: Sequence[Path], *, is_flat: bool) -> AnyTokenFile:
    """Open token files of a known kind, without a search in their folder.

    Args:
        prefix: The path without suffix.
        parts: The paths of the parts without suffix; empty for one file.
        is_flat: Whether it is a flat file.

    Raises:
        DataError: A file is missing, truncated or inconsistent.
    """
    if is_flat:
        return FlatTokenFile(add_suffix(prefix, ".bin"))
    return TokenFileParts(prefix, parts) if parts else TokenFile(prefix)


def locate_token_file(path: Path) -> tuple[Path, bool]:
    """Find token files by their name.

    Args:
        path: `PREFIX`, `PREFIX.bin` or `PREFIX.idx` for a pair, and `PREFIX` for parts. A flat
            file is named with its `.bin`, and has no `.idx`.

    Returns:
        (the path without suffix, whether it is a flat file).

    Raises:
        DataError: The file does not exist; the message lists similar names.
    """
    path = Path(path)
    # Path.exists would raise an OSError for a name that is too long.
    if os.path.exists(add_suffix(path, ".idx")) or part_files(path):
        return path, False
    prefix = path
    if path.suffix in (".bin", ".idx"):
        prefix = path.with_suffix("")
        if os.path.exists(add_suffix(prefix, ".idx")):
            return prefix, False
        if path.suffix == ".bin" and os.path.exists(path):
            return prefix, True
    if os.path.exists(add_suffix(prefix, ".bin")):
        raise DataError(
            f"The token file {prefix}.bin has no index {prefix}.idx; if it is a flat "
            f"file of uint16 ids, as nanoGPT writes them, name it with its suffix: {prefix}.bin."
        )
    expected_files = f"{prefix}.bin and {prefix}.idx" if path == prefix else str(path)
    raise DataError(
        f"There is no token file {path}: looked for {expected_files}; "
        f"{_describe_similar_files(path, prefix)}."
    )


def _describe_similar_files(path: Path, prefix: Path) -> str:
    """Return the end of a sentence about the token files in the folder of a missing one."""
    folder = path if os.path.isdir(path) else path.parent
    try:
        names = sorted(name[:-4] for name in os.listdir(folder) if name.endswith(".idx"))
    except (OSError, ValueError):
        return f"the folder {folder} cannot be read"
    if not names:
        return f"the folder {folder} holds no .idx at all"

    names.sort(key=partial(_rate_similarity, missing_name=prefix.name), reverse=True)
    return "near it there are " + ", ".join(str(folder / name) for name in names[:5])


def _rate_similarity(name: str, *, missing_name: str) -> tuple[bool, float]:
    """Return how similar a name is to a missing one: a common beginning, then equal letters."""
    return name.startswith(missing_name), SequenceMatcher(None, name, missing_name).ratio()
