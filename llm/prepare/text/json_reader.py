"""The texts in one JSON file: one object per line, or an array of objects.

orjson reads nearly all records. Python's parser reads the records that orjson refuses, and locates
errors.
"""

import contextlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from llm.errors import DataError
from llm.prepare.text.blocks import BOM, FileChunk
from llm.prepare.text.readers import (
    batch_record_texts,
    check_text,
    choose_column,
    describe_decode_error,
)

_NUM_COLUMN_RECORDS = 100
"""Number of records at the beginning of a file that decide its text column."""


def read_jsonl_texts(chunk: FileChunk) -> Iterator[list[str]]:
    """Yield the texts of a file with one JSON object per line."""
    column = chunk.text_column
    if column is None:  # from the beginning of the file, so that all chunks choose the same column
        column = _choose_record_column(
            _first_records(chunk.path), chunk.path, log_choice=chunk.start == 0
        )
    num_preceding_lines = 0
    for block in chunk.read_line_blocks():
        texts = _read_block(chunk, block, column, num_preceding_lines)
        num_preceding_lines += block.count(b"\n")
        if texts:
            yield texts


def _read_block(chunk: FileChunk, block: bytes, column: str, num_preceding_lines: int) -> list[str]:
    """Return the texts of a block of whole lines of a chunk; report lines that are bad records."""
    texts: list[str] = []
    line_number = num_preceding_lines
    block_view, line_start = memoryview(block), 0  # a view, so that slices are not copied
    while line_start < len(block):
        line_end = block.find(b"\n", line_start)
        line_end = len(block) if line_end < 0 else line_end
        line_number += 1
        # Fast path for nearly all lines; the others take the slow path below.
        try:
            text = orjson.loads(block_view[line_start:line_end])[column]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if type(text) is str:
            texts.append(text)
        elif raw_line := block[line_start:line_end].strip():
            try:
                texts.append(_extract_text(_parse_line(raw_line), column))
            except DataError as error:
                chunk.on_bad_record(chunk.make_line_error(line_number, str(error)))
        line_start = line_end + 1
    return texts


def _first_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file of lines, except those that cannot be read."""
    for block in FileChunk(path=path).read_line_blocks():
        for raw in filter(None, map(bytes.strip, io.BytesIO(block))):
            with contextlib.suppress(DataError):
                yield _parse_line(raw)


def _choose_record_column(records: Iterable[Any], path: Path, *, log_choice: bool = True) -> str:
    """Choose the text column of a file by its first records.

    Raises:
        DataError: There is no `text`, and not exactly one column of strings.
    """
    values_by_column: dict[str, list[Any]] = {}
    for record in itertools.islice(records, _NUM_COLUMN_RECORDS):
        if isinstance(record, dict):
            for name, value in record.items():
                values_by_column.setdefault(name, []).append(value)
    if not values_by_column:  # reading the records reports what is wrong
        return "text"
    text_columns, null_columns = [], []
    for name, values in values_by_column.items():
        if any(isinstance(value, str) for value in values):
            text_columns.append(name)
        elif all(value is None for value in values):
            null_columns.append(name)
    return choose_column(
        list(values_by_column),
        None,
        path,
        text_columns=text_columns,
        null_columns=null_columns,
        record_scope=f"in the first {_NUM_COLUMN_RECORDS} records",
        log_choice=log_choice,
    )


def _extract_text(record: Any, column: str) -> str:
    """Return the text of a JSON object.

    Raises:
        DataError: It is not an object with this key, or the value is not a text.
    """
    if not isinstance(record, dict):
        raise DataError("a record must be a JSON object with fields.")
    if column not in record:
        keys = ", ".join(map(repr, record)) or "none at all"
        raise DataError(
            f"the record has no key {column!r}, only {keys}; mend the line, or choose another "
            "--text_column."
        )
    return check_text(record[column])


def _parse_line(raw_line: bytes) -> Any:
    try:
        return _parse_json(raw_line.decode())
    except UnicodeDecodeError as error:
        raise DataError(describe_decode_error(error)) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"malformed JSON, {error.msg} (column {error.colno}); mend the line."
        ) from error


def _parse_json(text: str) -> Any:
    try:
        # orjson does not read NaN or very long numbers, so they are read here. Their values are not
        # used, and int() would refuse more than 4,300 digits.
        return json.loads(text, parse_int=lambda digits: 0)
    except RecursionError as error:  # 10^5 brackets
        raise DataError("the brackets are nested too deep for JSON.") from error


def read_json_texts(chunk: FileChunk) -> Iterator[list[str]]:
    """Yield the texts of a file with a JSON array of objects, or with one object per line.

    An array is read as a whole.
    """
    path = chunk.path
    if not _holds_array(path):
        yield from read_jsonl_texts(chunk)
        return
    records = _parse_array(path, b"".join(chunk.read_blocks()).removeprefix(BOM))
    column = chunk.text_column
    if column is None:
        column = _choose_record_column(records, path)
    yield from batch_record_texts(
        records,
        lambda number: f"{path}, record {number}",
        chunk.on_bad_record,
        lambda record: _extract_text(record, column),
    )


def _holds_array(path: Path) -> bool:
    """Return whether the first character of a file, except blanks, begins a JSON array."""
    for block in FileChunk(path=path).read_blocks():
        text = block.removeprefix(BOM).lstrip()
        if text:
            return text.startswith(b"[")
    return False


def _parse_array(path: Path, content: bytes) -> Any:
    """Return the records of a file with a JSON array.

    Raises:
        DataError: It is not JSON; single records of such a file cannot be skipped.
    """
    try:
        return _parse_json(content.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start + 1} is not UTF-8; convert the file to UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: malformed JSON, {error.msg} (column {error.colno}); "
            "mend the array, or write each of its records on a line of a .jsonl file."
        ) from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
