"""Texts and tokenizers without a library, for tests of what happens around them."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from llm.errors import DataError
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import Source
from llm.prepare.text_tokenizer import TextTokenizer

PACK = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
"""How a file with such a suffix is compressed."""


def texts_of(source: Source, faults: BadRecordPolicy | None = None) -> list[str]:
    """All texts of a source, out of their batches."""
    return [text for batch in source.batches(faults) for text in batch]


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file, text as UTF-8 and without touching its line ends."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def byte_tokenizer(
    *, shift: int = 1, eos_token_id: int | None = 0, fingerprint: str = "bytes"
) -> TextTokenizer:
    """Ids 1 to 256 are bytes, 0 ends a text; one in Python."""
    return TextTokenizer(
        name="bytes",
        backend=None,
        encode_slow=lambda text: [byte + shift for byte in text.encode()],
        eos_token_id=eos_token_id,
        bos_token_id=None,
        size=256 + shift,
        fingerprint=fingerprint,
    )


class ListSource:
    """Texts from memory, each of them a document unless they are one together."""

    num_bytes: int | None = None
    consumed = 0

    def __init__(self, texts: list[str], *, name: str = "list", one_document: bool = False) -> None:
        self.name = name
        self.one_document = one_document
        self.files: dict[Path, dict[str, int]] = {}
        self._texts = texts

    def identity(self) -> dict[str, str]:
        return {"list": self.name}

    def exists(self) -> bool:
        return True

    def split(self, num_bytes: int) -> list["ListSource"]:
        return [self]

    def batches(self, faults: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        for text in self._texts:
            yield [text]


def error_on_a_full_disk(num_bytes: int, function: Callable[..., object], *args: object) -> str:
    """The error of a call in which files are limited to `num_bytes`; for a process of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        function(*args)
    except DataError as error:
        return str(error)
    return f"no error in process {os.getpid()}"
