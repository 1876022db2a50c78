"""Sources of text: files in many formats, plain or compressed, by name, glob or folder."""

import copy
import dataclasses
import glob
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from llm.data.dataset_folder import find_split_names
from llm.data.text_folder import find_text_files, refuse_duplicates
from llm.data.text_identity import (
    Json,
    Stamps,
    TextUnit,
    check_text_file,
    file_identity,
    file_options,
    file_stamp,
    is_compressed,
    kind_of,
    refuse_broken_links,
)
from llm.errors import DataError
from llm.prepare.text.blocks import BadRecordPolicy, FileChunk
from llm.prepare.text.json_reader import read_json_texts, read_jsonl_texts
from llm.prepare.text.readers import (
    Reader,
    csv_records,
    num_row_groups,
    paragraphs,
    read_bare_lines,
    read_parquet_texts,
    read_text_lines,
)

_READERS: dict[str, Reader] = {
    ".csv": csv_records,
    ".json": read_json_texts,
    ".jsonl": read_jsonl_texts,
    ".ndjson": read_jsonl_texts,
    ".parquet": read_parquet_texts,
}

logger = logging.getLogger("llm.data")


class Source(Protocol):
    """Text that can be tokenized.

    Attributes:
        name: Its name in messages and logs.
        num_bytes: Its size on disk, for progress; None if unknown.
        consumed: Bytes on disk that were read so far.
        one_document: Whether its texts are pieces of one document; otherwise each text is a
            document.
        files: Size and modification time of the local files when the source was created.
    """

    name: str
    num_bytes: int | None
    one_document: bool
    files: Stamps

    @property
    def consumed(self) -> int:
        """Return the bytes on disk that were read so far."""

    def identity(self) -> dict[str, Json]:
        """Return values that identify this text, without reading it."""

    def exists(self) -> bool:
        """Return whether the text exists; may load the data set."""

    def split(self, num_bytes: int) -> list["Source"]:
        """Split into chunks of about this size that yield the same texts in the same order."""

    def batches(self, on_bad_record: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        """Yield the texts in batches of a few MiB.

        Args:
            on_bad_record: What to do with unusable records; None stops at the first.

        Raises:
            DataError: The text cannot be read; the message locates the fault.
        """


def make_file_source(
    path: Path,
    *,
    text_column: str | None,
    keep_linebreaks: bool = True,
    text_unit: TextUnit = "file",
    option: str = "--train_file",
) -> Source:
    """Return the source of a text file: .txt, .csv, .json or .jsonl, also packed, or .parquet.

    Args:
        path: The file.
        text_column: The field with the text; None takes `text`, else the only field of strings.
        keep_linebreaks: Whether lines keep their line breaks; otherwise blank lines are dropped.
            Only for the unit `file`.
        text_unit: Which unit of a text file is a document.
        option: The option that named the file, for messages.

    Raises:
        DataError: The file is missing, a folder, empty or of another kind.
    """
    path = Path(path)
    check_text_file(path, option)
    kind = kind_of(path)
    options = file_options(
        path, text_column=text_column, keep_linebreaks=keep_linebreaks, text_unit=text_unit
    )
    if kind != ".txt":
        return _FileSource(path, _READERS[kind], text_column=text_column, options=options)
    line_reader = read_text_lines if options["keep_linebreaks"] else read_bare_lines
    return _FileSource(
        path,
        paragraphs if text_unit == "paragraph" else line_reader,
        one_document=text_unit == "file",
        options=options,
    )


def find_text_sources(
    inputs: Sequence[str], *, text_column: str | None, text_unit: TextUnit = "file"
) -> list[Source]:
    """Return the sources of --input (files, globs and folders) in the given order.

    Files of a glob or a folder are sorted by name. A folder yields all files of known kinds at any
    depth, except hidden files, documentation and the results of earlier preparations.

    Args:
        inputs: Paths and patterns; `**` in a pattern stands for any folders.
        text_column: As for `make_file_source`.
        text_unit: As for `make_file_source`.

    Raises:
        DataError: An input matches no file or a broken link, or a file is given twice.
    """
    paths: list[Path] = []
    for name in inputs:
        if not name:  # pathlib would take it for the working directory
            raise DataError("--input has an empty name; name files, patterns and folders.")
        if os.path.isdir(name):
            files = find_text_files(Path(name), "--input")
            _warn_of_mixed_splits(files, Path(name))
        elif os.path.lexists(name) or not glob.has_magic(name):
            files = [Path(name)]
            refuse_broken_links(files, "--input")
        else:
            files = _find_matching_files(name)
        paths += files
    refuse_duplicates(paths, "--input")
    return [
        make_file_source(path, text_column=text_column, text_unit=text_unit, option="--input")
        for path in paths
    ]


def _find_matching_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted by name.

    Raises:
        DataError: It matches no file, or a broken link.
    """
    matches = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
    folder_patterns = [
        str(folder) for folder in Path(pattern).parents if glob.has_magic(str(folder))
    ]
    folders = [
        Path(path) for folder in folder_patterns for path in glob.glob(folder, recursive=True)
    ]
    refuse_broken_links([*matches, *folders], f"--input {pattern}:")
    files = [path for path in matches if os.path.isfile(path)]
    if not files:
        raise DataError(
            f"--input {pattern} matches no file that can be read; check the pattern, and the "
            "permissions of its folders."
        )
    return files


def _warn_of_mixed_splits(files: Sequence[Path], folder: Path) -> None:
    """Log a warning if a folder seems to hold the test text next to the training text."""
    splits = {split for file in files for split in find_split_names(file.relative_to(folder))}
    if len(splits) > 1:
        logger.warning(
            f"--input {folder}: all its files are read, and their names tell the splits "
            f"{', '.join(sorted(splits))}; name the files of one split to read it alone"
        )


class _FileSource:
    """The text of a file, or of a chunk of it."""

    def __init__(
        self,
        path: Path,
        reader: Reader,
        *,
        text_column: str | None = None,
        one_document: bool = False,
        options: dict[str, Json],
    ) -> None:
        self.name = str(path)
        self.one_document = one_document
        self.files = {path: file_stamp(path)}
        self.num_bytes: int | None = self.files[path]["size"]
        self._path = path
        self._reader = reader
        self._options = options  # options that affect the texts
        self._chunk = FileChunk(path=path, text_column=text_column)

    @property
    def consumed(self) -> int:
        return self._chunk.consumed

    def exists(self) -> bool:
        return True

    def identity(self) -> dict[str, Json]:
        return file_identity(self._path, self.files[self._path], self._options)

    def split(self, num_bytes: int) -> list[Source]:
        size = self.files[self._path]["size"]
        bounds = self._choose_chunk_bounds(size, num_bytes)
        if len(bounds) < 3 or self.one_document:
            return [self]
        chunks: list[Source] = []
        for start, end in itertools.pairwise(bounds):
            chunk = copy.copy(self)
            chunk._chunk = dataclasses.replace(self._chunk, start=start, stop=end)
            chunk.num_bytes = size * (end - start) // bounds[-1]
            chunks.append(chunk)
        return chunks

    def _choose_chunk_bounds(self, size: int, num_bytes: int) -> list[int]:
        """Return the bounds of chunks of `num_bytes`, in row groups of Parquet, else in bytes."""
        if self._reader is read_parquet_texts:
            num_groups = num_row_groups(self._path)
            num_chunks = max(1, min(num_groups, round(size / num_bytes)))
            return [num_groups * index // num_chunks for index in range(num_chunks + 1)]
        if self._reader in (read_bare_lines, read_jsonl_texts) and not is_compressed(self._path):
            return [*range(0, size, num_bytes), size]
        return [0]

    def batches(self, on_bad_record: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        self._chunk = dataclasses.replace(
            self._chunk, on_bad_record=on_bad_record or BadRecordPolicy(), consumed=0
        )
        return self._reader(self._chunk)


def check_sources_unchanged(sources: Iterable[Source]) -> None:
    """Compare the files of sources with their state when the sources were made.

    Raises:
        DataError: A file has changed, so the text may be a mixture of old and new.
    """
    for source in {source.name: source for source in sources}.values():  # chunks share their files
        for path, original_stamp in source.files.items():
            try:
                is_unchanged = file_stamp(path) == original_stamp
            except OSError:
                is_unchanged = False
            if not is_unchanged:
                raise DataError(
                    f"{path} has changed while the text was prepared, and nothing was written; "
                    "repeat the command when no program writes to the file any more."
                )
