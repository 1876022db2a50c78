"""A text file, or a chunk of it: decompressed, in blocks of bytes or of whole lines."""

import bz2
import logging
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from llm.data.text_identity import is_compressed
from llm.errors import DataError

MAX_DOCUMENT_BYTES = 1 << 30
"""Bytes of a document in UTF-8, and of a line with all its fields: both are read into memory."""

_BLOCK_BYTES = 1 << 22
_COMPRESSED_READ_BYTES = 1 << 12  # decompressed, many thousand times as many bytes
BOM = b"\xef\xbb\xbf"

logger = logging.getLogger("llm.data")


class BadRecordPolicy:
    """What to do with records that cannot be used.

    Attributes:
        on_error: `stop` raises the first one; `skip` counts them and logs the first few.
        max_warnings: Number of skipped records to log.
        remedy: A sentence about the option that skips records; empty if there is none.
        skipped: Number of records that were skipped.
    """

    def __init__(
        self,
        on_error: Literal["stop", "skip"] = "stop",
        *,
        max_warnings: int = 3,
        remedy: str = "To skip it, prepare the text with --on_error skip.",
    ) -> None:
        self.skipped = 0
        self.on_error = on_error
        self.max_warnings = max_warnings
        self.remedy = remedy

    def __call__(self, error: DataError) -> None:
        """Raise the error and the remedy, or count it.

        Raises:
            DataError: The record cannot be used, and `on_error` is `stop`.
        """
        if self.on_error == "stop":
            raise DataError(f"{error} {self.remedy}".rstrip()) from error
        self.skipped += 1
        if self.skipped <= self.max_warnings:
            logger.warning(f"skipped: {error}")


@dataclass(kw_only=True)
class FileChunk:
    """A file, or a range of an uncompressed file; read from front to back.

    Ranges of line-based files are in bytes. A chunk has the lines that begin in its range, so
    adjacent chunks together contain each line once. Ranges of Parquet files are in row groups.

    Attributes:
        path: The file.
        text_column: The field with the text; None takes `text`, else the only field of strings.
        on_bad_record: What to do with records that cannot be used.
        start: Where the range begins.
        stop: Where it ends; None is the end of the file.
        consumed: Bytes of the file on disk that were read so far.
    """

    path: Path
    text_column: str | None = None
    on_bad_record: BadRecordPolicy = field(default_factory=BadRecordPolicy)
    start: int = 0
    stop: int | None = None
    consumed: int = 0

    def read_blocks(self) -> Iterator[bytes]:
        """Yield the decompressed bytes of the chunk.

        Raises:
            DataError: The file cannot be read, or its compressed data are cut short or broken.
        """
        try:
            with open(self.path, "rb") as file:
                if is_compressed(self.path):
                    yield from self._decompress_blocks(file)
                else:
                    yield from self._read_range(file)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def _read_range(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the bytes of the lines that begin in the chunk's range."""
        end = None if self.stop is None else _line_start(file, self.stop)
        position = _line_start(file, self.start)
        file.seek(position)
        while True:
            num_bytes = _BLOCK_BYTES if end is None else min(_BLOCK_BYTES, end - position)
            block = file.read(num_bytes)
            if not block:
                return
            position += len(block)
            self.consumed += len(block)
            yield block

    def _decompress_blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the decompressed bytes of a file in blocks of `_BLOCK_BYTES` or a little more."""
        pieces: list[bytes] = []
        num_bytes = 0
        for piece in self._decompress_pieces(file):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes >= _BLOCK_BYTES:
                yield b"".join(pieces)
                pieces, num_bytes = [], 0
        if num_bytes:
            yield b"".join(pieces)

    def _decompress_pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the decompressed bytes of each few bytes of a file.

        Raises:
            DataError: The compressed data are cut short or broken.
        """
        # Use the decompressors directly: gzip.open and similar functions take a broken second
        # stream for the end of the file.
        decompressor = None
        while compressed := file.read(_COMPRESSED_READ_BYTES):
            self.consumed += len(compressed)
            while compressed:
                if decompressor is None:
                    # A file is one stream or several; zero bytes after a stream are padding.
                    compressed = compressed.lstrip(b"\0")
                    if not compressed:
                        break
                    decompressor = self._make_decompressor()
                yield self._decompress_piece(decompressor, compressed)
                compressed = b""
                if decompressor.eof:
                    compressed, decompressor = decompressor.unused_data, None
        if decompressor is not None:
            raise DataError(
                f"{self.path} is cut short: its compressed data end too early; copy it again."
            )

    def _decompress_piece(self, decompressor: Any, compressed: bytes) -> bytes:
        """Decompress a piece of a stream; raise a DataError if it is broken."""
        try:
            return bytes(decompressor.decompress(compressed))
        except Exception as error:  # each library raises its own kind
            reason = str(error) or type(error).__name__
            raise DataError(f"{self.path} cannot be unpacked: {reason}.") from error

    def _make_decompressor(self) -> Any:
        match self.path.suffix.lower():
            case ".gz":
                return zlib.decompressobj(wbits=31)  # 31: data with gzip's header and checksum
            case ".xz":
                return lzma.LZMADecompressor(lzma.FORMAT_XZ)
            case ".bz2":
                return bz2.BZ2Decompressor()
        import zstandard

        # The window of files packed with --long=31, as large corpora are.
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def read_line_blocks(self, *, is_skippable: bool = True) -> Iterator[bytes]:
        """Yield blocks of whole lines with their line feeds; the file's last line may lack one.

        A byte order mark is left out. A line feed is never a byte of another UTF-8 character, so
        every block of valid text can be decoded by itself. A line that is too long is a bad record;
        if it is skipped, an empty line takes its place.

        Args:
            is_skippable: Whether the policy decides about such a line; otherwise it raises.

        Raises:
            DataError: As `read_blocks`, or a line has more than `MAX_DOCUMENT_BYTES`.
        """
        byte_order_mark = BOM if self.start == 0 else b""
        line_pieces: list[bytes] = []  # the beginning of a line, until its end is read
        line_bytes, line_number, is_too_long = 0, 1, False  # of this line
        for block in self.read_blocks():
            first_line_end = block.find(b"\n")
            line_bytes += len(block) if first_line_end < 0 else first_line_end
            if line_bytes > MAX_DOCUMENT_BYTES:
                if not is_too_long:
                    self._report_long_line(line_number, is_skippable=is_skippable)
                is_too_long, line_pieces = True, []
                block = b"" if first_line_end < 0 else block[first_line_end:]

            whole_lines_end = block.rfind(b"\n") + 1
            if whole_lines_end == 0:
                line_pieces.append(block)
                continue
            whole_lines = b"".join([*line_pieces, block[:whole_lines_end]])
            yield whole_lines.removeprefix(byte_order_mark)
            byte_order_mark = b""
            line_pieces = [block[whole_lines_end:]]
            line_bytes, is_too_long = len(block) - whole_lines_end, False
            line_number += whole_lines.count(b"\n")
        if last_line := b"".join(line_pieces).removeprefix(byte_order_mark):
            yield last_line

    def _report_long_line(self, line_number: int, *, is_skippable: bool) -> None:
        """Report a line that is too long as a bad record, or raise the error."""
        error = self.make_line_error(
            line_number,
            f"the line has more than {MAX_DOCUMENT_BYTES:,} bytes, the limit of a "
            "document; cut it into several.",
        )
        if not is_skippable:
            raise error
        self.on_bad_record(error)

    def make_line_error(self, line_number: int, message: str) -> DataError:
        """Return an error that names a line of the file.

        Args:
            line_number: The line, counted from 1, the first line of the chunk.
            message: The fault.
        """
        if self.start == 0:
            return DataError(f"{self.path}, line {line_number}: {message}")
        if self.on_bad_record.on_error == "skip":  # counting lines for each reads the file
            line_and_byte = f"line {line_number} of those from byte {self.start:,} on"
            return DataError(f"{self.path}, {line_and_byte}: {message}")
        preceding = FileChunk(path=self.path, stop=self.start)
        line_number += sum(block.count(b"\n") for block in preceding.read_blocks())
        return DataError(f"{self.path}, line {line_number}: {message}")


def check_size(num_bytes: int) -> None:
    """Refuse a document that is too large to read into memory.

    Args:
        num_bytes: Bytes of its text in UTF-8.

    Raises:
        DataError: It has more than `MAX_DOCUMENT_BYTES`.
    """
    if num_bytes > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"the text has {num_bytes:,} bytes, and a document can have {MAX_DOCUMENT_BYTES:,} at "
            "most; cut it into several."
        )


def _line_start(file: IO[bytes], position: int) -> int:
    """Return the offset of the first line that starts at or after `position`."""
    if position == 0:
        return 0
    # Skip the line that contains the previous byte; if it is a line feed, nothing else is skipped.
    file.seek(position - 1)
    while (piece := file.readline(_BLOCK_BYTES)) and not piece.endswith(b"\n"):
        pass
    return file.tell()
