"""The texts in one file of plain text, CSV or Parquet, in batches of a few MiB.

Files are streamed: memory grows with the longest text, not with the file. The `datasets` library is
not used: it copies files into its cache, cannot divide one file among workers, and does not report
the line of an error.
"""

import csv
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llm.errors import DataError, one_line
from llm.prepare.text.blocks import MAX_DOCUMENT_BYTES, BadRecordPolicy, FileChunk, check_size
from llm.runtime.logging import counted

BATCH_CHARACTERS = 1 << 22
BATCH_ROWS = 1 << 14

Reader = Callable[[FileChunk], Iterator[list[str]]]

logger = logging.getLogger("llm.data")


def check_text(value: object) -> str:
    """Return the text of one record; a missing value is an empty text.

    Raises:
        DataError: The value is not a string, cannot be written as UTF-8, or is too large.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"the text is a value of type {type(value).__name__}, not a string; mend it, or choose "
            "another --text_column."
        )
    num_bytes = len(value)
    if not value.isascii():
        try:
            num_bytes = len(value.encode("utf-8"))
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise DataError("the text holds a lone surrogate, no character.") from error
    check_size(num_bytes)
    return value


def choose_column(
    columns: Sequence[str],
    requested_column: str | None,
    location: object,
    *,
    text_columns: Sequence[str],
    null_columns: Sequence[str] = (),
    record_scope: str = "",
    log_choice: bool = True,
) -> str:
    """Return the column with the text: the requested one, `text`, or the only column of strings.

    Args:
        columns: All columns.
        requested_column: The column that the user names, or None.
        location: The file or data set, for messages.
        text_columns: The columns that hold strings.
        null_columns: The columns that hold only nulls, which may hold strings in other records.
        record_scope: The records that were searched for strings and nulls, such as `in its first
            row`; all records by default.
        log_choice: Whether to log the choice of another column than `text`.

    Raises:
        DataError: The column does not exist, or exists more than once, or another column may
            hold the text; the message lists the columns of strings.
    """
    column = "text" if requested_column is None else requested_column
    if requested_column is None and "text" not in columns and len(text_columns) == 1:
        column = text_columns[0]
        reason = f"the only column with text {record_scope}".rstrip()
        if null_columns:
            raise _ambiguous_column_error(column, location, reason, null_columns)
        if log_choice:
            logger.info(f"{location}: no column is named 'text'; taking {column!r}, {reason}")
    if column not in columns:
        raise DataError(
            f"{location} has no column {column!r}; choose one with --text_column from: "
            f"{', '.join(text_columns or columns) or 'none at all'}."
        )
    if columns.count(column) > 1:
        raise DataError(f"{location} has several columns {column!r}; rename all but the right one.")
    return column


def _ambiguous_column_error(
    column: str, location: object, reason: str, null_columns: Sequence[str]
) -> DataError:
    """Return the error for a column of strings if columns of nulls may hold the text too."""
    return DataError(
        f"{location} has no column 'text'. {column!r} is {reason}, but {null_columns[0]!r} is null "
        "there and may be the right one; choose with --text_column from: "
        f"{', '.join((column, *null_columns))}."
    )


def batch_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into batches of a few MiB."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_ROWS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def batch_record_texts(
    records: Iterable[Any],
    describe_location: Callable[[int], str],
    on_bad_record: BadRecordPolicy,
    extract_text: Callable[[Any], str] = check_text,
) -> Iterator[list[str]]:
    """Yield the texts of records in batches of a few MiB.

    Args:
        records: The records.
        describe_location: Returns where a record is, counted from 1, for messages.
        on_bad_record: What to do with records that `extract_text` refuses with a DataError.
        extract_text: Returns the text of a record.
    """

    def extract_texts() -> Iterator[str]:
        for record_number, record in enumerate(records, 1):
            try:
                text = extract_text(record)
            except DataError as error:
                on_bad_record(DataError(f"{describe_location(record_number)}: {error}"))
            else:
                yield text

    return batch_texts(extract_texts())


def read_text_lines(chunk: FileChunk, *, is_skippable: bool = True) -> Iterator[list[str]]:
    """Yield the lines of a text file with their line feeds; only line feeds end a line.

    Args:
        chunk: The file, or a chunk of it.
        is_skippable: Whether the policy decides about lines that are not UTF-8 or too long;
            otherwise they raise an error.
    """
    line_number = 1
    for block in chunk.read_line_blocks(is_skippable=is_skippable):
        try:
            text = block.decode()
        except UnicodeDecodeError:
            text = _decode_lines(chunk, block, line_number, is_skippable=is_skippable)
        line_number += block.count(b"\n")
        # str.splitlines would also split at Unicode separators and at a lone "\r".
        lines = text.split("\n")
        last_line = lines.pop()
        lines = [f"{line}\n" for line in lines]
        if last_line:
            lines.append(last_line)
        if lines:
            yield lines


def _decode_lines(
    chunk: FileChunk, block: bytes, first_line_number: int, *, is_skippable: bool
) -> str:
    """Return the lines of a block that are UTF-8; report the others as bad records."""
    lines = []
    for line_number, raw_line in enumerate(io.BytesIO(block), first_line_number):
        try:
            lines.append(raw_line.decode())
        except UnicodeDecodeError as error:
            bad_record_error = chunk.make_line_error(line_number, describe_decode_error(error))
            if not is_skippable:
                raise bad_record_error from error
            chunk.on_bad_record(bad_record_error)
    return "".join(lines)


def describe_decode_error(error: UnicodeDecodeError) -> str:
    """Describe why a line cannot be decoded."""
    return f"byte {error.start + 1} of the line is not UTF-8; convert the file to UTF-8."


def read_bare_lines(chunk: FileChunk) -> Iterator[list[str]]:
    """Yield the lines of a text file without their line breaks; a blank line is an empty text."""
    for lines in read_text_lines(chunk):
        yield [line.rstrip("\r\n") if line.strip() else "" for line in lines]


def paragraphs(chunk: FileChunk) -> Iterator[list[str]]:
    """Yield the paragraphs of a text file, separated by blank lines, without the last break."""
    return batch_record_texts(
        _read_paragraphs(chunk),
        lambda number: f"{chunk.path}, paragraph {number}",
        chunk.on_bad_record,
        _paragraph_text,
    )


class _Paragraph(NamedTuple):
    """A paragraph of a text file.

    Attributes:
        lines: Its lines with their line feeds; not all of them if it is too large.
        num_bytes: Its bytes in UTF-8.
    """

    lines: list[str]
    num_bytes: int


def _read_paragraphs(chunk: FileChunk) -> Iterator[_Paragraph]:
    """Yield the paragraphs of a text file; the lines of one that is too large are not collected."""
    lines: list[str] = []
    num_bytes = 0
    for batch in read_text_lines(chunk):
        for line in batch:
            if line.strip():
                num_bytes += len(line.encode())
                lines.append(line)
                if num_bytes > MAX_DOCUMENT_BYTES:
                    lines.clear()
            elif num_bytes:
                yield _Paragraph(lines, num_bytes)
                lines, num_bytes = [], 0
    if num_bytes:
        yield _Paragraph(lines, num_bytes)


def _paragraph_text(paragraph: _Paragraph) -> str:
    """Return the text of a paragraph; raise a DataError if it is too large."""
    check_size(paragraph.num_bytes)
    return "".join(paragraph.lines).rstrip("\r\n")


def csv_records(chunk: FileChunk) -> Iterator[list[str]]:
    """Yield the texts of a CSV file with the column names in its first line."""
    csv.field_size_limit(MAX_DOCUMENT_BYTES)  # the module's own limit is 128 KiB
    return batch_texts(_read_csv_texts(chunk))


def _read_csv_texts(chunk: FileChunk) -> Iterator[str]:
    """Yield the texts of a CSV file with a header; report rows of another length as bad records."""
    # Skipping a line that is not UTF-8 could break the quotes of its neighbors.
    lines = (line for batch in read_text_lines(chunk, is_skippable=False) for line in batch)
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
        column_index = header.index(
            choose_column(header, chunk.text_column, chunk.path, text_columns=header)
        )
        for fields in reader:
            if len(fields) == len(header):
                yield fields[column_index]
            elif fields:
                message = (
                    f"the row has {counted(len(fields), 'field')}, but the header names "
                    f"{len(header):,}."
                )
                chunk.on_bad_record(chunk.make_line_error(reader.line_num, message))
    except csv.Error as error:
        raise chunk.make_line_error(reader.line_num, f"malformed CSV, {error}.") from error


def read_parquet_texts(chunk: FileChunk) -> Iterator[list[str]]:
    """Yield the texts of the row groups `start` to `stop` of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(chunk.path) as file:
            column = _choose_parquet_column(file, chunk)
            row_groups = range(file.num_row_groups)
            first_row = sum(
                file.metadata.row_group(group_index).num_rows
                for group_index in row_groups[: chunk.start]
            )
            batches = file.iter_batches(
                1000, row_groups=list(row_groups[chunk.start : chunk.stop]), columns=[column]
            )
            values = (value for batch in batches for value in batch.column(0).to_pylist())
            yield from batch_record_texts(
                values,
                lambda number: f"{chunk.path}, row {first_row + number}",
                chunk.on_bad_record,
            )
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{chunk.path} cannot be read as Parquet: {one_line(error)}.") from error


def _choose_parquet_column(file: Any, chunk: FileChunk) -> str:
    """Return the column of a Parquet file with the text, as `choose_column` does."""
    import pyarrow as pa

    schema = file.schema_arrow
    return choose_column(
        schema.names,
        chunk.text_column,
        chunk.path,
        text_columns=[field.name for field in schema if _is_string_type(field.type)],
        null_columns=[field.name for field in schema if pa.types.is_null(field.type)],
        log_choice=chunk.start == 0,
    )


def _is_string_type(column_type: Any) -> bool:
    """Return whether a type of Arrow holds strings, directly or in a dictionary."""
    import pyarrow as pa

    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(column_type) for check in checks)


def num_row_groups(path: Path) -> int:
    """Return the number of row groups of a Parquet file; 0 if it cannot be read."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return int(file.num_row_groups)
    except Exception:  # reading the texts reports the error
        return 0
