"""Data sets that the `datasets` library reads: on the Hugging Face Hub, or saved by itself."""

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from llm.data.dataset_folder import find_saved_dataset
from llm.data.hub_files import explain_dataset_errors, find_repository
from llm.data.text_identity import Json, identify_dataset, stamp_dataset_files
from llm.errors import DataError
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.readers import batch_record_texts, choose_column
from llm.prepare.text.sources import Source
from llm.runtime.offline import offline_if_unreachable

_BATCH_ROWS = 1000
_ROWS_PER_CHUNK = 100_000
_STRING_TYPES = ("string", "large_string", "string_view")
_ColumnKind = Literal["text", "null", "other"]

logger = logging.getLogger("llm.data")


def make_dataset_source(
    dataset_name: str,
    dataset_config_name: str | None,
    split: str,
    *,
    text_column: str | None,
    trust_remote_code: bool,
    streaming: bool = False,
) -> Source:
    """Return a split of a data set on the Hub, or in a folder of `Dataset.save_to_disk`.

    The data set is loaded when you call the source's `exists` or read its rows.

    Args:
        dataset_name: A Hub name, or the folder.
        dataset_config_name: The configuration; or None.
        split: Name of the split.
        text_column: The column with the text; None takes `text`, else the only column of
            strings.
        trust_remote_code: As for `datasets.load_dataset`.
        streaming: Read the data set over the network while it is used, with no copy on disk.

    Raises:
        DataError: The folder has a broken link.
    """
    loader = _DatasetLoader(dataset_name, dataset_config_name, trust_remote_code, streaming)
    return _DatasetSplit(loader, split, text_column)


class _DatasetLoader:
    """A data set that is loaded at most once, when it is needed."""

    def __init__(
        self, name: str, config: str | None, trust_remote_code: bool, streaming: bool
    ) -> None:
        self.name = name
        self.config = config
        self.folder = find_saved_dataset(name, config)
        self.files = stamp_dataset_files(name)
        # Newer versions of `datasets` warn about trust_remote_code, whatever its value.
        self._options = {"trust_remote_code": True} if trust_remote_code else {}
        if streaming:
            self._options["streaming"] = True
        self.streaming = streaming
        self._splits: dict[str, Any] | None = None

    def splits(self) -> dict[str, Any]:
        """Return the `datasets.Dataset` of each split."""
        if self._splits is None:
            self._splits = self._load_splits()
        return self._splits

    def _load_splits(self) -> dict[str, Any]:
        """Load the data set without progress bars; note whether its splits are streamed."""
        import datasets
        from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

        if self.folder is None and self.name in _PACKAGED_DATASETS_MODULES:
            raise DataError(
                f"--dataset_name {self.name} is a file format of the `datasets` library, not a "
                "data set, and the folder does not exist; check the path."
            )
        logger.info(f"loading the data set {self.name}")
        shows_progress = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            with self.explain_dataset_errors():
                dataset = self._load_dataset()
        finally:
            if shows_progress:
                datasets.enable_progress_bars()
        is_one_split = isinstance(dataset, datasets.Dataset | datasets.IterableDataset)
        splits = {"train": dataset} if is_one_split else dict(dataset)
        # A data set that is already on the disk is not streamed.
        self.streaming = all(
            isinstance(split, datasets.IterableDataset) for split in splits.values()
        )
        return splits

    def _load_dataset(self) -> Any:
        """Load the data set from the Hub, or from the folder of `save_to_disk`."""
        import datasets

        if self.folder is None:
            with offline_if_unreachable(self.name):
                return datasets.load_dataset(
                    find_repository(self.name), self.config, **self._options
                )
        if self.config and self.folder.name != self.config:
            logger.warning(
                f"--dataset_config_name {self.config} has no effect: save_to_disk wrote "
                f"{self.name}, which has no configurations"
            )
        return datasets.load_from_disk(str(self.folder))

    def explain_dataset_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that turns the library's dozens of error types into a DataError."""
        return explain_dataset_errors(self.name, self.config, is_local=self.folder is not None)


class _DatasetSplit:
    """One split, or a chunk of it: a range of rows, or one shard of a streamed split."""

    one_document = False
    consumed = 0

    def __init__(self, loader: _DatasetLoader, split: str, text_column: str | None) -> None:
        self._loader = loader
        self._split = split
        self._text_column = text_column
        config = f" {loader.config}" if loader.config else ""
        self.name = f"{loader.name}{config} [{split}]"
        self.num_bytes: int | None = None
        self.files = loader.files
        # (first row, end), or (shard, number of shards) of a stream; None is the whole split.
        self._range: tuple[int, int] | None = None

    def identity(self) -> dict[str, Json]:
        return identify_dataset(
            self._loader.name,
            self._loader.config,
            split=self._split,
            text_column=self._text_column,
            stamps=self.files,
        )

    def exists(self) -> bool:
        return self._split in self._loader.splits()

    def split(self, num_bytes: int) -> list[Source]:
        data = self._select_split()
        if self._loader.streaming:
            ranges = [(index, data.num_shards) for index in range(data.num_shards)]
        else:
            starts = range(0, data.num_rows, _ROWS_PER_CHUNK)
            ranges = [(start, min(start + _ROWS_PER_CHUNK, data.num_rows)) for start in starts]
        chunks: list[Source] = []
        for chunk_range in ranges:
            chunk = copy.copy(self)
            chunk._range = chunk_range
            chunks.append(chunk)
        return chunks

    def batches(self, on_bad_record: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        data = self._select_split()
        column = self._choose_column(data)
        first_row, location = 0, self.name
        if self._range is not None and self._loader.streaming:
            shard, num_shards = self._range
            data = data.shard(num_shards=num_shards, index=shard)
            location = f"{location}, shard {shard + 1}"
        elif self._range is not None:
            first_row, end_row = self._range
            data = data.select(range(first_row, end_row))
        yield from batch_record_texts(
            self._read_column(data, column),
            lambda number: f"{location}, row {first_row + number}",
            on_bad_record or BadRecordPolicy(),
        )

    def _read_column(self, data: Any, column: str) -> Iterator[Any]:
        """Yield the values of a column of a data set."""
        with self._loader.explain_dataset_errors():  # a stream's network, a broken file
            for batch in data.select_columns(column).iter(_BATCH_ROWS):
                yield from batch[column]

    def _select_split(self) -> Any:
        """Return the split's data; raise a DataError if the data set has no such split."""
        splits = self._loader.splits()
        if self._split not in splits:
            raise DataError(
                f"The data set {self._loader.name} has no split {self._split!r}, only: "
                f"{', '.join(splits)}."
            )
        return splits[self._split]

    def _choose_column(self, data: Any) -> str:
        """Choose the column with the text; for a stream without features, by its first row."""
        with self._loader.explain_dataset_errors():
            if data.features:
                kind_by_column = _read_column_kinds(data.features)
                record_scope = ""
            else:
                kind_by_column = _guess_column_kinds(next(iter(data), {}))
                record_scope = "in its first row"
        return choose_column(
            list(kind_by_column),
            self._text_column,
            self.name,
            text_columns=[name for name, kind in kind_by_column.items() if kind == "text"],
            null_columns=[name for name, kind in kind_by_column.items() if kind == "null"],
            record_scope=record_scope,
            log_choice=self._range is None or self._range[0] == 0,
        )


def _read_column_kinds(features: Mapping[str, Any]) -> dict[str, _ColumnKind]:
    """Return the kind of each column from the features that a data set declares."""
    kinds: dict[str, _ColumnKind] = {}
    for name, feature in features.items():
        dtype = getattr(feature, "dtype", "")
        kinds[name] = "text" if dtype in _STRING_TYPES else "null" if dtype == "null" else "other"
    return kinds


def _guess_column_kinds(row: Mapping[str, Any]) -> dict[str, _ColumnKind]:
    """Return the kind of each column from the values of one row."""
    kinds: dict[str, _ColumnKind] = {}
    for name, value in row.items():
        kinds[name] = "text" if isinstance(value, str) else "null" if value is None else "other"
    return kinds
