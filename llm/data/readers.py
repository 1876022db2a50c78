"""The values of the text column of one file, whatever its kind, each with where it stands.

Files are streamed: memory does not grow with them, except for a JSON array.
"""

import csv
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llm.errors import DataError

Located = tuple[Any, str]  # a value and where it stands: "line 3"

_BOM = b"\xef\xbb\xbf"
_BATCH_ROWS = 1000

log = logging.getLogger("llm.data")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line with its line break); a line ends at a line feed.

    Raises:
        DataError: The file cannot be read or is not UTF-8.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                yield number, (raw.removeprefix(_BOM) if number == 1 else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: byte {error.start + 1} of the line is not UTF-8; "
            "convert the file to UTF-8."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def check_text(value: object, where: str) -> str:
    """The text of one record; a missing value is an empty text.

    Args:
        value: What the text column holds.
        where: File and line, for messages.

    Raises:
        DataError: The value is no string, or one that cannot be written as UTF-8.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise DataError(f"{where}: the text is a value of type {kind}, not a string.")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise DataError(f"{where}: the text holds a lone surrogate, no character.") from error
    return value


def choose_column(columns: list[str], wanted: str | None, where: str) -> str:
    """The column with the text: the one asked for, else `text`, else the first.

    Args:
        columns: Those that there are.
        wanted: The one asked for; or None.
        where: File and line, for messages.

    Raises:
        DataError: There is no such column; the message lists those that there are.
    """
    if wanted is None:
        wanted = "text" if "text" in columns or not columns else columns[0]
        if wanted != "text":
            log.info(f"{where}: there is no column 'text'; taking the first one, {wanted!r}")
    if wanted not in columns:
        raise DataError(
            f"{where} has no column {wanted!r}; choose one with --text_column from: "
            f"{', '.join(columns) or 'none at all'}."
        )
    return wanted


def _csv_values(path: Path, text_column: str | None) -> Iterator[Located]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit is 128 KiB
    reader = csv.reader((line for _, line in read_lines(path)), strict=True)
    try:
        header = next(reader, [])
        column = header.index(choose_column(header, text_column, str(path)))
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: there are {len(fields)} fields, "
                    f"but the header names {len(header)}."
                )
            yield fields[column], f"line {reader.line_num}"
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: malformed CSV, {error}.") from error


def _json_values(path: Path, text_column: str | None) -> Iterator[Located]:
    records = _json_array(path) if _starts_array(path) else _json_lines(path)
    column = None
    for record, where in records:
        if not isinstance(record, dict):
            raise DataError(f"{path}, {where}: a record must be a JSON object with fields.")
        if column is None or column not in record:
            column = choose_column(list(record), column or text_column, f"{path}, {where}")
        yield record[column], where


def _starts_array(path: Path) -> bool:
    if path.suffix.lower() != ".json":
        return False
    return next((line.lstrip()[0] == "[" for _, line in read_lines(path) if line.strip()), False)


def _json_lines(path: Path) -> Iterator[Located]:
    for number, line in read_lines(path):
        # Without its line break, at which the parser would count one line more.
        if record := line.strip():
            yield _parse_json(record, path, number), f"line {number}"


def _json_array(path: Path) -> Iterator[Located]:
    records = _parse_json("".join(line for _, line in read_lines(path)), path, 1)
    for number, record in enumerate(records, 1):
        yield record, f"record {number}"


def _parse_json(text: str, path: Path, start_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = start_line + error.lineno - 1
        raise DataError(f"{path}, line {line}: malformed JSON, {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 10^5 brackets
        raise DataError(f"{path}, line {start_line}: JSON out of bounds, {error}.") from error


def _parquet_values(path: Path, text_column: str | None) -> Iterator[Located]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            column = choose_column(file.schema_arrow.names, text_column, str(path))
            for batch in file.iter_batches(_BATCH_ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield value, f"row {number}"
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {first_line(error)}.") from error


RECORD_READERS: dict[str, Callable[[Path, str | None], Iterator[Located]]] = {
    ".csv": _csv_values,
    ".json": _json_values,
    ".jsonl": _json_values,
    ".parquet": _parquet_values,
}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to end a sentence with."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
