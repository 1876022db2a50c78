"""Where text comes from: a file, a folder that the `datasets` library reads, a Hub data set.

A source yields rows. A row is what is encoded at once: a line of a text file, a record of any
other. A text file is one document; of the others, each record is one.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from llm.data.readers import (
    RECORD_READERS,
    Located,
    check_text,
    choose_column,
    first_line,
    read_lines,
)
from llm.errors import DataError

Json = str | int | bool | None | list[list[str | int]]
Row = tuple[str, bool]

_BATCH_ROWS = 1000

log = logging.getLogger("llm.data")


class Source(Protocol):
    """Text that can be tokenised.

    Attributes:
        name: For messages and logs.
        num_bytes: Its size on disk, for progress; None where it is not known.
    """

    name: str
    num_bytes: int | None

    def identity(self) -> dict[str, Json]:
        """What tells this text from any other, found without reading it."""

    def exists(self) -> bool:
        """Whether there is such a text; may load the data set."""

    def rows(self) -> Iterator[Row]:
        """Yields (text, whether this row ends a document); an empty text is no row.

        Raises:
            DataError: The text cannot be read; the message says where it is wrong.
        """


def file_source(
    path: Path, *, text_column: str | None, keep_linebreaks: bool, option: str = "--train_file"
) -> Source:
    """The source for a .txt, .csv, .json, .jsonl or .parquet file.

    Args:
        path: The file.
        text_column: The field with the text; None takes `text`, else the first field.
        keep_linebreaks: Whether a line of a text file keeps its line break. Without them, blank
            lines are dropped.
        option: The option that named the file, for messages.

    Raises:
        DataError: The file is missing, a folder, empty or of another kind.
    """
    path = Path(path)
    reader = RECORD_READERS.get(path.suffix.lower())
    if not path.exists():
        raise DataError(f"{option} {path} does not exist; check the path.")
    if not path.is_file():
        raise DataError(f"{option} {path} is no file; for a folder of files use --dataset_name.")
    if reader is None and path.suffix.lower() != ".txt":
        kinds = ", ".join([".txt", *RECORD_READERS])
        raise DataError(f"{option} {path} is of an unknown kind; give one of {kinds}.")
    if path.stat().st_size == 0:
        raise DataError(f"{option} {path} is empty; give a file with text.")
    if reader is None:
        return _TextFile(path, keep_linebreaks)
    return _RecordFile(path, text_column, reader)


def dataset_sources(
    dataset_name: str,
    dataset_config_name: str | None,
    *,
    text_column: str | None,
    trust_remote_code: bool,
) -> dict[str, Source]:
    """The splits `train` and `validation` of a Hub data set or a local folder.

    Nothing is loaded before a source is asked whether it exists, or for its rows.

    Args:
        dataset_name: A Hub name, or a folder: what `Dataset.save_to_disk` wrote, or files that
            `datasets.load_dataset` takes.
        dataset_config_name: The configuration; or None.
        text_column: The column with the text; None takes `text`, else the first column.
        trust_remote_code: Handed to `datasets`.

    Raises:
        DataError: `dataset_name` is a file, or a path at which there is nothing.
    """
    path = Path(dataset_name)
    if path.is_file():
        raise DataError(f"--dataset_name {dataset_name} is a file; name it with --train_file.")
    if not path.is_dir() and (path.is_absolute() or dataset_name.startswith(("./", "../", "~"))):
        raise DataError(f"--dataset_name {dataset_name} does not exist; check the path.")
    loader = _DatasetLoader(dataset_name, dataset_config_name, trust_remote_code)
    return {split: _DatasetSplit(loader, split, text_column) for split in ("train", "validation")}


class _File:
    """What all kinds of files have in common."""

    def __init__(self, path: Path, **options: Json) -> None:
        self._path = path
        self._options = options
        self.name = str(path)
        self.num_bytes: int | None = path.stat().st_size

    def identity(self) -> dict[str, Json]:
        return {"path": os.path.abspath(self._path), **_stamp(self._path), **self._options}

    def exists(self) -> bool:
        return True


class _TextFile(_File):
    def __init__(self, path: Path, keep_linebreaks: bool) -> None:
        super().__init__(path, keep_linebreaks=keep_linebreaks)
        self._keep = keep_linebreaks

    def rows(self) -> Iterator[Row]:
        # One line behind, because only the last one ends the document.
        previous: str | None = None
        for _, line in read_lines(self._path):
            line = line if self._keep else line.rstrip("\r\n")
            if not self._keep and not line.strip():
                continue
            if previous is not None:
                yield previous, False
            previous = line
        if previous is not None:
            yield previous, True


class _RecordFile(_File):
    def __init__(
        self,
        path: Path,
        text_column: str | None,
        reader: Callable[[Path, str | None], Iterator[Located]],
    ) -> None:
        super().__init__(path, text_column=text_column)
        self._text_column = text_column
        self._reader = reader

    def rows(self) -> Iterator[Row]:
        for value, where in self._reader(self._path, self._text_column):
            yield check_text(value, f"{self._path}, {where}"), True


class _DatasetLoader:
    """A data set that is loaded at most once, when its first split is needed."""

    def __init__(self, name: str, config: str | None, trust_remote_code: bool) -> None:
        self.name = name
        self.config = config
        self.folder = Path(name) if Path(name).is_dir() else None
        # Newer versions of `datasets` complain about the argument itself.
        self._options = {"trust_remote_code": True} if trust_remote_code else {}
        self._splits: dict[str, Any] | None = None

    def splits(self) -> dict[str, Any]:
        """The `datasets.Dataset` of each split."""
        if self._splits is None:
            import datasets

            log.info(f"loading the data set {self.name}")
            bars = datasets.is_progress_bar_enabled()
            datasets.disable_progress_bars()
            try:
                loaded = self._load()
            except Exception as error:  # the library raises dozens of kinds
                raise self._explain(error) from error
            finally:
                if bars:
                    datasets.enable_progress_bars()
            single = isinstance(loaded, datasets.Dataset)
            self._splits = {"train": loaded} if single else dict(loaded)
        return self._splits

    def _load(self) -> Any:
        import datasets

        if self.folder is None:
            return datasets.load_dataset(self.name, self.config, **self._options)
        # A folder that stands in for a Hub data set often has no configurations, or has them
        # as folders of their own.
        inner = self.folder / self.config if self.config else self.folder
        for folder in (inner, self.folder):
            if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
                return datasets.load_from_disk(str(folder))
        try:
            return datasets.load_dataset(str(self.folder), self.config, **self._options)
        except ValueError as error:
            if "Available: ['default']" not in str(error):
                raise
            folder = inner if inner.is_dir() else self.folder
            log.warning(f"{self.folder} has no configurations; reading {folder}")
            return datasets.load_dataset(str(folder), **self._options)

    def _explain(self, error: Exception) -> DataError:
        message = str(error)
        if isinstance(error, ValueError) and re.search("BuilderConfig|Config name", message):
            known = re.search(r"\[(.*?)\]", message)
            lack = "several configurations" if self.config is None else f"no {self.config!r}"
            return DataError(
                f"The data set {self.name} has {lack}; choose a configuration with "
                f"--dataset_config_name from: {known[1] if known else 'see its page'}."
            )
        if self.folder is not None:
            reason = first_line(error.__cause__ or error)
            return DataError(f"--dataset_name {self.folder} cannot be read: {reason}.")
        return DataError(
            f"--dataset_name {self.name} cannot be loaded from the Hugging Face Hub "
            f"({first_line(error)}); check the name and the connection, or name a local folder, "
            "which works too."
        )


class _DatasetSplit:
    def __init__(self, loader: _DatasetLoader, split: str, text_column: str | None) -> None:
        self._loader = loader
        self._split = split
        self._text_column = text_column
        config = f" {loader.config}" if loader.config else ""
        self.name = f"{loader.name}{config} [{split}]"
        self.num_bytes: int | None = None

    def identity(self) -> dict[str, Json]:
        identity: dict[str, Json] = {
            "dataset": self._loader.name,
            "config": self._loader.config,
            "split": self._split,
            "text_column": self._text_column,
        }
        folder = self._loader.folder
        if folder is not None:
            identity["dataset"] = str(folder.resolve())
            identity["files"] = [
                [str(file.relative_to(folder)), *_stamp(file).values()]
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            ]
        return identity

    def exists(self) -> bool:
        return self._split in self._loader.splits()

    def rows(self) -> Iterator[Row]:
        splits = self._loader.splits()
        if self._split not in splits:
            raise DataError(
                f"The data set {self._loader.name} has no split {self._split!r}, only: "
                f"{', '.join(splits)}."
            )
        column = choose_column(splits[self._split].column_names, self._text_column, self.name)
        number = 0
        for batch in splits[self._split].select_columns(column).iter(_BATCH_ROWS):
            for value in batch[column]:
                number += 1
                yield check_text(value, f"{self.name}, row {number}"), True


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
