"""Where text comes from: files of many kinds, plain or compressed, alone, by glob or by folder."""

import copy
import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from llm.data.text.json_reader import json_lines, json_records
from llm.data.text.readers import (
    BadRecordPolicy,
    FileChunk,
    Reader,
    csv_records,
    paragraphs,
    parquet_records,
    text_lines,
)
from llm.data.text.text_blocks import COMPRESSIONS, TextBlocks, is_compressed, kind_of
from llm.errors import DataError

Json = str | int | bool | None | list[list[str | int]]
TextUnit = Literal["line", "paragraph", "file"]

_READERS: dict[str, Reader] = {
    ".csv": csv_records,
    ".json": json_records,
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".parquet": parquet_records,
}
KINDS = (".txt", *_READERS)


class Source(Protocol):
    """Text that can be tokenised.

    Attributes:
        name: For messages and logs.
        num_bytes: Its size on disk, for progress; None where it is not known.
        consumed: How many of these were read so far.
        one_document: Whether all its texts are one document, encoded piece by piece; otherwise
            each of them is one.
        files: Size and time of change of the local files that it reads, from when it was made.
    """

    name: str
    num_bytes: int | None
    one_document: bool
    files: dict[Path, dict[str, int]]

    @property
    def consumed(self) -> int:
        """Bytes on disk that were read so far."""

    def identity(self) -> dict[str, Json]:
        """What tells this text from any other, without reading it."""

    def exists(self) -> bool:
        """Whether there is such a text; may load the data set."""

    def split(self, num_bytes: int) -> list["Source"]:
        """Chunks of about this size that together hold the same texts in the same order."""

    def batches(self, faults: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        """Yields the texts in batches of a few MiB.

        Args:
            faults: What becomes of records that cannot be used; None stops at the first.

        Raises:
            DataError: The text cannot be read; the message says where it is wrong.
        """


def file_source(
    path: Path,
    *,
    text_column: str | None,
    keep_linebreaks: bool = True,
    text_unit: TextUnit = "file",
    option: str = "--train_file",
) -> Source:
    """The source for a .txt, .csv, .json, .jsonl or .parquet file, the first four also compressed.

    Args:
        path: The file.
        text_column: The field with the text; None takes `text`, else the only field of strings.
        keep_linebreaks: Whether a line of a text file keeps its line break. Without them, blank
            lines are dropped. For the unit `file` alone.
        text_unit: What of a text file is a document.
        option: The option that named the file, for messages.

    Raises:
        DataError: The file is missing, a folder, empty or of another kind.
    """
    path = Path(path)
    kind = kind_of(path)
    if not os.path.exists(path):
        raise DataError(
            f"{option} {path} does not exist, or its folder may not be read; check the path."
        )
    if not path.is_file():
        raise DataError(f"{option} {path} is no file; for a folder of files use --dataset_name.")
    if kind not in KINDS or (kind == ".parquet" and is_compressed(path)):
        raise DataError(
            f"{option} {path} is of an unknown kind; give one of {', '.join(KINDS)}, or one of "
            f"the first four packed as {', '.join(COMPRESSIONS)}."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{option} {path} is empty; give a file with text.")
    if kind == ".txt":
        return _TextFile(path, keep_linebreaks=keep_linebreaks, text_unit=text_unit)
    return _RecordFile(path, text_column)


def text_sources(
    inputs: Sequence[str],
    *,
    text_column: str | None,
    text_unit: TextUnit = "file",
    option: str = "--input",
) -> list[Source]:
    """The sources for files, globs and folders, in the order given; those of each one by name.

    Of a folder, all files of a known kind at any depth are taken, but hidden ones and those that
    lie there from preparing token files.

    Args:
        inputs: Paths and patterns; `**` in a pattern stands for any folders.
        text_column: As for `file_source`.
        text_unit: As for `file_source`.
        option: The option that named them, for messages.

    Raises:
        DataError: One of them gives no file or a broken link, or a file is given twice.
    """
    paths: list[Path] = []
    for name in inputs:
        if os.path.isdir(name):
            files = [path for path in _walk(Path(name), option) if _is_text(path, Path(name))]
            if not files:
                raise DataError(
                    f"{option} {name} is a folder without any file of a known kind: "
                    f"{', '.join(KINDS)}, plain or packed as {', '.join(COMPRESSIONS)}."
                )
        elif os.path.lexists(name) or not glob.has_magic(name):
            files = [Path(name)]
            refuse_broken_links(files, option)
        else:
            files = [Path(path) for path in sorted(glob.glob(name, recursive=True))]
            folders = [folder for folder in Path(name).parents if glob.has_magic(str(folder))]
            inner = [path for folder in folders for path in glob.glob(str(folder), recursive=True)]
            refuse_broken_links([*files, *map(Path, inner)], f"{option} {name}:")
            files = [path for path in files if os.path.isfile(path)]
            if not files:
                raise DataError(
                    f"{option} {name} matches no file that can be read; check the pattern, and the "
                    "permissions of its folders."
                )
        paths += files
    seen: set[Path] = set()
    for path in paths:
        if (real := path.resolve()) in seen:
            raise DataError(f"{option} names {path} twice; give each file once.")
        seen.add(real)
    return [
        file_source(path, text_column=text_column, text_unit=text_unit, option=option)
        for path in paths
    ]


def _walk(folder: Path, option: str) -> list[Path]:
    """All that lies in a folder at any depth, behind links too; what cannot be read is an error."""

    def refuse(error: OSError) -> None:
        raise DataError(
            f"{option} {folder}: {error.filename} cannot be read ({error.strerror}); mend that, or "
            "name what is to be read."
        ) from error

    paths: list[Path] = []
    entered: set[str] = set()
    for name, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(name)
        if real in entered:  # a link that leads back
            folders.clear()
            continue
        entered.add(real)
        paths += [Path(name) / file for file in files]
    refuse_broken_links(paths, f"{option} {folder}:")
    return sorted(paths)


def refuse_broken_links(paths: list[Path], where: str) -> None:
    """Raises a DataError that begins with `where` if a path is a broken link."""
    for path in paths:
        if os.path.islink(path) and not os.path.exists(path):
            raise DataError(
                f"{where} {path} is a broken link; remove it, or name what is to be read."
            )


def _is_text(path: Path, folder: Path) -> bool:
    relative = path.relative_to(folder)
    hidden = any(name.startswith(".") for name in relative.parts)
    # What this program writes may lie in the same folder.
    unfinished = any(name.endswith(".parts") for name in relative.parts[:-1])
    sidecar = path.suffix == ".json" and path.with_suffix(".bin").exists()
    return path.is_file() and not (hidden or unfinished or sidecar) and kind_of(path) in KINDS


class _File:
    """What all kinds of files have in common: a range of a path, and how it is read."""

    one_document = False

    def __init__(self, path: Path, text_column: str | None, reader: Reader) -> None:
        self.name = str(path)
        self.files = {path: stamp(path)}
        self.num_bytes: int | None = self.files[path]["size"]
        self._path = path
        self._reader = reader
        self._text_column = text_column
        self._range: tuple[int, int | None] = (0, None)
        self._blocks = TextBlocks(path)

    @property
    def consumed(self) -> int:
        return self._blocks.consumed

    def exists(self) -> bool:
        return True

    def split(self, num_bytes: int) -> list[Source]:
        return [self]

    def identity(self) -> dict[str, Json]:
        return {"path": os.path.abspath(self._path), **self.files[self._path]}

    def batches(self, faults: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        start, stop = self._range
        self._blocks = TextBlocks(self._path, start=start, stop=stop)
        chunk = FileChunk(
            path=self._path,
            text_column=self._text_column,
            faults=faults or BadRecordPolicy(),
            blocks=self._blocks,
            start=start,
            stop=stop,
        )
        return self._reader(chunk)


class _TextFile(_File):
    def __init__(self, path: Path, *, keep_linebreaks: bool, text_unit: TextUnit) -> None:
        super().__init__(path, None, paragraphs if text_unit == "paragraph" else text_lines)
        self.one_document = text_unit == "file"
        self._keep = keep_linebreaks and text_unit == "file"
        self._unit = text_unit

    def identity(self) -> dict[str, Json]:
        return {**super().identity(), "keep_linebreaks": self._keep, "text_unit": self._unit}

    def split(self, num_bytes: int) -> list[Source]:
        return _split_lines(self, num_bytes) if self._unit == "line" else [self]

    def batches(self, faults: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        for rows in super().batches(faults):
            if self._keep or self._unit == "paragraph":
                yield rows
            else:  # a blank line becomes an empty text, which is counted and dropped
                yield [row.rstrip("\r\n") if row.strip() else "" for row in rows]


class _RecordFile(_File):
    def __init__(self, path: Path, text_column: str | None) -> None:
        self._kind = kind_of(path)
        super().__init__(path, text_column, _READERS[self._kind])

    def identity(self) -> dict[str, Json]:
        return {**super().identity(), "text_column": self._text_column}

    def split(self, num_bytes: int) -> list[Source]:
        if self._reader is json_lines:
            return _split_lines(self, num_bytes)
        if self._kind == ".parquet":
            return _split_row_groups(self, num_bytes)
        return [self]


def _split_lines(file: _File, num_bytes: int) -> list[Source]:
    size = file.num_bytes or 0
    if is_compressed(file._path) or size <= num_bytes:
        return [file]
    starts = range(0, size, num_bytes)
    return [_chunk_of(file, start, min(start + num_bytes, size)) for start in starts]


def _split_row_groups(file: _File, num_bytes: int) -> list[Source]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file._path) as parquet:
            groups = parquet.num_row_groups
    except Exception:  # reading the file will report what is wrong
        return [file]
    size = file.num_bytes or 0
    count = max(1, min(groups, round(size / num_bytes)))
    bounds = [groups * i // count for i in range(count + 1)]
    chunks = [_chunk_of(file, start, stop) for start, stop in itertools.pairwise(bounds)]
    for chunk in chunks:
        chunk.num_bytes = size // count
    return list[Source](chunks)


def _chunk_of(file: _File, start: int, stop: int) -> _File:
    chunk = copy.copy(file)
    chunk._range = (start, stop)
    chunk.num_bytes = stop - start
    return chunk


def stamp(path: Path) -> dict[str, int]:
    """Size and time of change, which tell a file from what it was before."""
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def check_unchanged(sources: Iterable[Source]) -> None:
    """Compares the files that sources have read with what they were when the sources were made.

    Raises:
        DataError: One of them has changed, so that what was read may be old in one place and new
            in another.
    """
    for source in {source.name: source for source in sources}.values():  # chunks share their files
        for path, before in source.files.items():
            try:
                unchanged = stamp(path) == before
            except OSError:
                unchanged = False
            if not unchanged:
                raise DataError(
                    f"{path} has changed while the text was prepared, and nothing was written; "
                    "give the same command again when no program writes to the file any more."
                )
