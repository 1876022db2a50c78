"""The texts in one JSON file: an object a line, or an array of objects."""

import contextlib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from llm.data.text.readers import FileChunk, batched, check_text, choose_column, not_utf8
from llm.data.text.text_blocks import TextBlocks
from llm.errors import DataError

_FIRST_RECORDS = 100
"""Records at the beginning of a file from which its column is chosen."""


def json_lines(chunk: FileChunk) -> Iterator[list[str]]:
    """The texts of a file with one JSON object a line."""
    column = chunk.text_column
    if column is None:  # the same in all chunks of the file
        column = _column_of(_first_records(chunk.path), chunk.path, log_choice=chunk.start == 0)
    line = 0
    for block in chunk.blocks.line_blocks():
        texts: list[str] = []
        view, start = memoryview(block), 0
        while start < len(block):
            stop = block.find(b"\n", start)
            stop = len(block) if stop < 0 else stop
            line += 1
            # The way of nearly all lines, uncopied; the others are examined below.
            try:
                text = orjson.loads(view[start:stop])[column]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                text = None
            if type(text) is str:
                texts.append(text)
            elif raw := block[start:stop].strip():
                where = chunk.where(line)
                try:
                    texts.append(_text_of(_parse_line(raw, where), column, where))
                except DataError as fault:
                    chunk.faults(fault)
            start = stop + 1
        if texts:
            yield texts


def _first_records(path: Path) -> Iterator[Any]:
    """The records at the beginning of a file of lines, but those that cannot be read."""
    for block in TextBlocks(path).line_blocks():
        for raw in filter(None, map(bytes.strip, io.BytesIO(block))):
            with contextlib.suppress(DataError):
                yield _parse_line(raw, path)


def _column_of(records: Iterable[Any], path: Path, *, log_choice: bool = True) -> str:
    """The column with the text of a file, by its first records, where the user names none.

    Raises:
        DataError: There is no `text`, and not exactly one column of strings.
    """
    strings: dict[str, bool] = {}  # whether a column has had a string
    for record in itertools.islice(records, _FIRST_RECORDS):
        if isinstance(record, dict):
            for name, value in record.items():
                strings[name] = strings.get(name, False) or isinstance(value, str)
    if not strings:  # reading the records reports what is wrong
        return "text"
    texts = [name for name, has_strings in strings.items() if has_strings]
    return choose_column(list(strings), None, path, texts=texts, log_choice=log_choice)


def _text_of(record: Any, column: str, where: object) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{where}: a record must be a JSON object with fields.")
    if column not in record:
        keys = ", ".join(map(repr, record)) or "none at all"
        raise DataError(
            f"{where}: the record has no key {column!r}, only {keys}; mend the line, or prepare "
            "the file with another --text_column or with --on_error skip."
        )
    return check_text(record[column], where)


def _parse_line(raw: bytes, where: object) -> Any:
    try:
        return _parse_json(raw.decode(), lambda _: where)
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from error


def _parse_json(text: str, where: Callable[[int], object]) -> Any:
    # Python's parser reads what orjson does not: NaN, and numbers of any length. Their values are
    # not used, and int() refuses more than 4,300 digits.
    try:
        return json.loads(text, parse_int=lambda digits: 0)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where(error.lineno)}: malformed JSON, {error.msg} (column {error.colno}); mend the "
            "line, or prepare the file with --on_error skip."
        ) from error
    except RecursionError as error:  # 10^5 brackets
        raise DataError(f"{where(1)}: the brackets are nested too deep for JSON.") from error


def json_records(chunk: FileChunk) -> Iterator[list[str]]:
    """The texts of a file with a JSON array of objects, or with one object a line.

    An array is read as a whole.
    """
    if not _starts_array(chunk):
        yield from json_lines(chunk)
        return
    whole = b"".join(TextBlocks(chunk.path).line_blocks())
    try:
        records = _parse_json(whole.decode(), lambda line: f"{chunk.path}, line {line}")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{chunk.path}: byte {error.start + 1} is not UTF-8; convert the file to UTF-8."
        ) from error
    yield from batched(_array_texts(chunk, records))


def _array_texts(chunk: FileChunk, records: list[Any]) -> Iterator[str]:
    column = _column_of(records, chunk.path) if chunk.text_column is None else chunk.text_column
    for number, record in enumerate(records, 1):
        try:
            text = _text_of(record, column, f"{chunk.path}, record {number}")
        except DataError as fault:
            chunk.faults(fault)
        else:
            yield text


def _starts_array(chunk: FileChunk) -> bool:
    for block in TextBlocks(chunk.path).line_blocks():
        if start := block.lstrip()[:1]:
            return start == b"["
    return False
