"""The texts in one file of plain text, CSV or Parquet, in batches of a few MiB.

Files are streamed: memory does not grow with them, except for a paragraph and a single
text.
"""

import csv
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llm.data.text.text_blocks import TextBlocks
from llm.errors import DataError

BATCH_CHARACTERS = 1 << 22
BATCH_ROWS = 1 << 14

log = logging.getLogger("llm.data")


class BadRecordPolicy:
    """What becomes of records that cannot be used.

    Attributes:
        on_error: `stop` raises the first one; `skip` counts them and shows the first three.
        skipped: How many were passed over.

    Args:
        on_error: As above.
    """

    def __init__(self, on_error: Literal["stop", "skip"] = "stop") -> None:
        self.skipped = 0
        self.on_error = on_error

    def __call__(self, error: DataError) -> None:
        """Raises or counts one.

        Raises:
            DataError: The one given.
        """
        if self.on_error == "stop":
            raise error
        self.skipped += 1
        if self.skipped <= 3:
            log.warning(f"skipped: {error}")


@dataclass(frozen=True, kw_only=True)
class FileChunk:
    """A chunk of a file, or all of it, and where its texts stand in it.

    Attributes:
        path: The file.
        text_column: The field with the text; None takes `text`, else the only field of strings.
        faults: What becomes of records that cannot be used.
        blocks: The bytes of this chunk of a file of lines.
        start: Where the chunk begins: a byte of a file of lines, a row group of a Parquet file.
        stop: Where it ends; None is the end of the file.
    """

    path: Path
    text_column: str | None
    faults: BadRecordPolicy
    blocks: TextBlocks
    start: int = 0
    stop: int | None = None

    def where(self, line: int) -> "Place":
        """Return the place of a line of this chunk, counted from 1, for messages."""
        return Place(self, line)


@dataclass(frozen=True)
class Place:
    """A line of a chunk; its number in the file is computed when it is shown.

    Attributes:
        chunk: The chunk.
        line: Counted from 1, the first line that begins in the chunk.
    """

    chunk: FileChunk
    line: int

    def __str__(self) -> str:
        path, start = self.chunk.path, self.chunk.start
        if start == 0:
            return f"{path}, line {self.line}"
        if self.chunk.faults.on_error == "skip":  # there may be many, and counting reads the file
            return f"{path}, line {self.line} of those from byte {start:,} on"
        before, rest = 1, start - 1  # lines that begin before the chunk: one, and after line feeds
        for block in TextBlocks(path).blocks():
            before += block[:rest].count(b"\n")
            rest -= len(block)
            if rest <= 0:
                break
        return f"{path}, line {before + self.line}"


Reader = Callable[[FileChunk], Iterator[list[str]]]


def check_text(value: object, where: object) -> str:
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


def choose_column(
    columns: Sequence[str],
    wanted: str | None,
    where: object,
    *,
    texts: Sequence[str],
    log_choice: bool = True,
) -> str:
    """The column with the text: the one asked for, else `text`, else the only one of strings.

    Args:
        columns: Those that there are.
        wanted: The one asked for; or None.
        where: File and line, for messages.
        texts: Those that hold strings.
        log_choice: Whether to log that it is another one than `text`.

    Raises:
        DataError: There is no such column, or more than one; the message lists those that there
            are.
    """
    if wanted is None:
        wanted = texts[0] if "text" not in columns and len(texts) == 1 else "text"
        if wanted != "text" and log_choice:
            log.info(f"{where}: there is no column 'text'; taking {wanted!r}, the only one of text")
    if wanted not in columns:
        raise DataError(
            f"{where} has no column {wanted!r}; choose one with --text_column from: "
            f"{', '.join(columns) or 'none at all'}."
        )
    if columns.count(wanted) > 1:
        raise DataError(f"{where} has several columns {wanted!r}; rename all but the right one.")
    return wanted


def batched(texts: Iterator[str]) -> Iterator[list[str]]:
    """Groups texts into batches of a few MiB."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_ROWS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def text_lines(chunk: FileChunk) -> Iterator[list[str]]:
    """The lines of a text file, each with its line feed; a line ends nowhere else."""
    line = 1
    for block in chunk.blocks.line_blocks():
        try:
            text = block.decode()
        except UnicodeDecodeError:
            text = _lines_in_utf8(chunk, block, line)
        line += block.count(b"\n")
        rows = text.split("\n")
        last = rows.pop()
        rows = [f"{row}\n" for row in rows]
        if last:
            rows.append(last)
        if rows:
            yield rows


def paragraphs(chunk: FileChunk) -> Iterator[list[str]]:
    """The paragraphs of a text file, which blank lines separate, without their last line break."""

    def texts() -> Iterator[str]:
        begun: list[str] = []
        for rows in text_lines(chunk):
            for row in rows:
                if row.strip():
                    begun.append(row)
                elif begun:
                    yield "".join(begun).rstrip("\r\n")
                    begun = []
        if begun:
            yield "".join(begun).rstrip("\r\n")

    return batched(texts())


def _lines_in_utf8(chunk: FileChunk, block: bytes, line: int) -> str:
    rows = []
    for number, raw in enumerate(io.BytesIO(block), line):
        try:
            rows.append(raw.decode())
        except UnicodeDecodeError as error:
            chunk.faults(not_utf8(chunk.where(number), error))
    return "".join(rows)


def not_utf8(where: object, error: UnicodeDecodeError) -> DataError:
    """What is wrong with a line that cannot be decoded."""
    return DataError(
        f"{where}: byte {error.start + 1} of the line is not UTF-8; convert the file to UTF-8."
    )


def csv_records(chunk: FileChunk) -> Iterator[list[str]]:
    """The texts of a CSV file whose first line names the columns."""
    csv.field_size_limit(2**31 - 1)  # the module's own limit is 128 KiB
    return batched(_csv_texts(chunk))


def _csv_texts(chunk: FileChunk) -> Iterator[str]:
    # A line that is not UTF-8 may break the quotes of its neighbours, so it is never skipped.
    plain = FileChunk(
        path=chunk.path,
        text_column=chunk.text_column,
        faults=BadRecordPolicy("stop"),
        blocks=chunk.blocks,
    )
    reader = csv.reader((row for rows in text_lines(plain) for row in rows), strict=True)
    try:
        header = next(reader, [])
        column = header.index(choose_column(header, chunk.text_column, chunk.path, texts=header))
        for fields in reader:
            if fields and len(fields) != len(header):
                chunk.faults(
                    DataError(
                        f"{chunk.path}, line {reader.line_num}: there are {len(fields)} fields, "
                        f"but the header names {len(header)}."
                    )
                )
            elif fields:
                yield fields[column]
    except csv.Error as error:
        raise DataError(f"{chunk.path}, line {reader.line_num}: malformed CSV, {error}.") from error


def parquet_records(chunk: FileChunk) -> Iterator[list[str]]:
    """The texts of the row groups `start` to `stop` of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def texts(file: Any, column: str) -> Iterator[str]:
        number = sum(file.metadata.row_group(i).num_rows for i in range(chunk.start))
        groups = range(chunk.start, file.num_row_groups if chunk.stop is None else chunk.stop)
        for batch in file.iter_batches(1000, row_groups=list(groups), columns=[column]):
            for value in batch.column(0).to_pylist():
                number += 1
                try:
                    text = check_text(value, f"{chunk.path}, row {number}")
                except DataError as fault:
                    chunk.faults(fault)
                else:
                    yield text

    try:
        with pq.ParquetFile(chunk.path) as file:
            schema = file.schema_arrow
            column = choose_column(
                schema.names,
                chunk.text_column,
                chunk.path,
                texts=[field.name for field in schema if _holds_strings(field.type)],
                log_choice=chunk.start == 0,
            )
            yield from batched(texts(file, column))
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{chunk.path} cannot be read as Parquet: {first_line(error)}.") from error


def _holds_strings(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to end a sentence with."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
