"""The texts in one JSON file: an object a line, or an array of objects."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from llm.data.readers import Faults, Part, batched, check_text, choose_column, not_utf8
from llm.data.text_blocks import TextBlocks
from llm.errors import DataError


def json_lines(part: Part) -> Iterator[list[str]]:
    """The texts of a file with one JSON object a line."""
    column = part.text_column or "text"
    settled = False  # whether a record has had it
    if part.start and part.text_column is None and (first := _first_column(part)) is not None:
        column, settled = first, True
    line = 0
    for block in part.blocks.line_blocks():
        texts: list[str] = []
        view, start = memoryview(block), 0
        while start < len(block):
            stop = block.find(b"\n", start)
            stop = len(block) if stop < 0 else stop
            line += 1
            # The way of nearly all lines, uncopied; what is odd about one is found out below.
            try:
                text = orjson.loads(view[start:stop])[column]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                text = None
            if type(text) is str:
                texts.append(text)
                settled = True
            elif raw := block[start:stop].strip():
                try:
                    column, text = _odd_record(part, raw, line, column if settled else None)
                    texts.append(text)
                    settled = True
                except DataError as fault:
                    part.faults(fault)
            start = stop + 1
        if texts:
            yield texts


def _first_column(part: Part) -> str | None:
    """The column that all parts of a file take: that of its first record that has a text."""
    whole = Part(
        path=part.path, text_column=None, faults=Faults("skip"), blocks=TextBlocks(part.path)
    )
    for block in whole.blocks.line_blocks():
        for raw in filter(None, map(bytes.strip, block.split(b"\n"))):
            try:
                return _odd_record(whole, raw, 1, None, tell=False)[0]
            except DataError:
                continue
    return None


def _odd_record(
    part: Part, raw: bytes, line: int, column: str | None, *, tell: bool = True
) -> tuple[str, str]:
    """The column and text of a line that the fast way did not understand, or the first one."""
    where = part.where(line)
    try:
        record = _parse_json(raw.decode(), lambda _: where)
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a record must be a JSON object with fields.")
    if column is None:
        column = choose_column(list(record), part.text_column, where, tell=tell)
    elif column not in record:
        keys = ", ".join(map(repr, record)) or "none at all"
        raise DataError(
            f"{where}: the record has no key {column!r}, only {keys}; mend the line, or prepare "
            "the file with --on_error skip."
        )
    return column, check_text(record[column], where)


def _parse_json(text: str, where: Callable[[int], object]) -> Any:
    # Python's parser reads what orjson does not: NaN, and numbers of any length.
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where(error.lineno)}: malformed JSON, {error.msg} (column {error.colno}); mend the "
            "line, or prepare the file with --on_error skip."
        ) from error
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 10^5 brackets
        raise DataError(f"{where(1)}: JSON out of bounds, {error}.") from error


def json_records(part: Part) -> Iterator[list[str]]:
    """The texts of a file with a JSON array of objects, or with one object a line.

    An array is read as a whole.
    """
    if not _starts_array(part):
        yield from json_lines(part)
        return
    whole = b"".join(TextBlocks(part.path).line_blocks())
    try:
        records = _parse_json(whole.decode(), lambda line: f"{part.path}, line {line}")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{part.path}: byte {error.start + 1} is not UTF-8; convert the file to UTF-8."
        ) from error
    yield from batched(_array_texts(part, records))


def _array_texts(part: Part, records: list[Any]) -> Iterator[str]:
    column = part.text_column
    for number, record in enumerate(records, 1):
        where = f"{part.path}, record {number}"
        try:
            if not isinstance(record, dict):
                raise DataError(f"{where}: a record must be a JSON object with fields.")
            if column is None or column not in record:
                column = choose_column(list(record), column, where)
            text = check_text(record[column], where)
        except DataError as fault:
            part.faults(fault)
        else:
            yield text


def _starts_array(part: Part) -> bool:
    for block in TextBlocks(part.path).line_blocks():
        if start := block.lstrip()[:1]:
            return start == b"["
    return False
