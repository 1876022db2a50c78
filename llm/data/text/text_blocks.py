"""The bytes of a text file, compressed or not, in blocks and in blocks of whole lines."""

import bz2
import functools
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from llm.errors import DataError

_BLOCK = 1 << 22
_PACKED_READ = 1 << 17  # of compressed bytes; a block can unpack to many times its size
_BOM = b"\xef\xbb\xbf"


def _zstd_stream() -> Any:
    import zstandard

    # The window of files packed with --long=31, as large corpora are.
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": functools.partial(zlib.decompressobj, wbits=31),
    ".xz": functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
    ".zst": _zstd_stream,
}
COMPRESSIONS = tuple(_DECOMPRESSORS)


def is_compressed(path: Path) -> bool:
    """Whether the name ends with that of a compression that is read here."""
    return path.suffix.lower() in COMPRESSIONS


def kind_of(path: Path) -> str:
    """The suffix that says what is in the file: `.jsonl` of `wiki.jsonl.zst`."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


class TextBlocks:
    """Reads one file from front to back.

    Attributes:
        consumed: Bytes of the file on disk that were read so far.

    Args:
        path: The file.
        start: Of a file that is not compressed: where to begin, in bytes.
        stop: Where to end; None is the end of the file.
    """

    def __init__(self, path: Path, *, start: int = 0, stop: int | None = None) -> None:
        self.path = path
        self.consumed = 0
        self._start = start
        self._stop = stop

    def blocks(self) -> Iterator[bytes]:
        """Yields the unpacked bytes from `start` to the end of the file, `stop` or not.

        Raises:
            DataError: The file cannot be read, or its compressed data are cut short or broken.
        """
        make = _DECOMPRESSORS.get(self.path.suffix.lower())
        try:
            with open(self.path, "rb") as file:
                if make is not None:
                    yield from self._unpacked(file, make)
                    return
                file.seek(self._start)
                while block := file.read(_BLOCK):
                    self.consumed += len(block)
                    yield block
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def _unpacked(self, file: IO[bytes], make: Callable[[], Any]) -> Iterator[bytes]:
        # By the libraries' decompressors: their files take a broken second stream for the end.
        stream = None
        unpacked: list[bytes] = []
        size = 0
        while raw := file.read(_PACKED_READ):
            self.consumed += len(raw)
            while raw := raw if stream else raw.lstrip(b"\0"):  # between streams may be padding
                stream = stream or self._opened(make)
                unpacked.append(self._decompressed(stream, raw))
                size += len(unpacked[-1])
                if size >= _BLOCK:
                    yield b"".join(unpacked)
                    unpacked, size = [], 0
                raw = stream.unused_data if stream.eof else b""
                stream = None if stream.eof else stream
        if stream is not None:
            raise DataError(
                f"{self.path} is cut short: its compressed data end too early; copy it anew."
            )
        if size:
            yield b"".join(unpacked)

    def _opened(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except ImportError as error:
            raise DataError(
                f"{self.path} is packed with zstd, which needs a package: pip install zstandard."
            ) from error

    def _decompressed(self, stream: Any, raw: bytes) -> bytes:
        try:
            return bytes(stream.decompress(raw))
        except Exception as error:  # each library raises its own kind
            reason = str(error) or type(error).__name__
            raise DataError(f"{self.path} cannot be unpacked: {reason}.") from error

    def line_blocks(self) -> Iterator[bytes]:
        """Yields blocks of whole lines with their line feeds, which the file's last one may lack.

        A chunk from `start` to `stop` has the lines that begin in it, so that adjacent chunks
        have each line once. A byte order mark is left out.

        Raises:
            DataError: As `blocks`.
        """
        at_the_top = self._start == 0
        for number, block in enumerate(self._whole_lines()):
            yield block.removeprefix(_BOM) if at_the_top and number == 0 else block

    def _whole_lines(self) -> Iterator[bytes]:
        skipping = self._start > 0
        # The line that begins before `start` is another chunk's, unless it ends right there.
        self._start -= skipping
        position = self._start  # of the byte that follows those yielded
        begun: list[bytes] = []  # the line that has not ended yet
        for block in self.blocks():
            if skipping:
                end = block.find(b"\n") + 1
                position += end or len(block)
                if end == 0:
                    continue
                block, skipping = block[end:], False
            if self._stop is not None and position >= self._stop:
                return
            end = block.rfind(b"\n") + 1
            if end == 0:
                begun.append(block)
                continue
            whole = b"".join([*begun, block[:end]])
            begun = [block[end:]]
            yield self._up_to_stop(whole, position)
            position += len(whole)
        last = b"".join(begun)
        if last and (self._stop is None or position < self._stop):
            yield last

    def _up_to_stop(self, whole: bytes, position: int) -> bytes:
        """The lines of a block, which starts at `position`, that begin before `stop`."""
        if self._stop is None or position + len(whole) <= self._stop:
            return whole
        return whole[: whole.find(b"\n", self._stop - position - 1) + 1]
