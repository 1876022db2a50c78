"""Texts and tokenizers without a library, for tests of what happens around them."""

import bz2
import gzip
import lzma
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from llm.data.cache import TokenCache
from llm.data.preparation.encoder import Encoding
from llm.data.preparation.output_files import Output
from llm.data.preparation.prepare_files import prepare_files
from llm.data.text.blocks import BadRecordPolicy
from llm.data.text.sources import Source
from llm.data.text_identity import recipe, recipe_digest
from llm.errors import DataError
from llm.tokenizers.fast import TextTokenizer

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


class WatchedSource(ListSource):
    """Appends a line to `reads` whenever its texts are read, and takes its time."""

    def __init__(self, texts: list[str], reads: Path, seconds: float) -> None:
        super().__init__(texts, name="watched")
        self._reads = reads
        self._seconds = seconds

    def batches(self, faults: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        with open(self._reads, "a") as file:
            file.write("read\n")
        for text in self._texts:
            yield [text]
            time.sleep(self._seconds / len(self._texts))


def cache_bytes(cache_dir: Path, source: Source | None = None, **changes: Any) -> Path | None:
    """The token files that a cache has of a text, by the tokenizer of bytes; `ab` and `c` if None.

    Args:
        cache_dir: The folder of the cache.
        source: The text.
        changes: To the settings of the cache, the encoding, or `optional`.
    """
    settings = {"tokenizer": byte_tokenizer(), "end_token": 0, "dtype": np.dtype("<u2")}
    encoding = Encoding(**{name: changes.pop(name, value) for name, value in settings.items()})
    text = source or ListSource(["ab", "c"])
    workers, optional = changes.pop("workers", 1), changes.pop("optional", False)

    def prepare(folder: Path) -> None:
        """What the process of a run does, in this one."""
        if optional and not text.exists():
            (folder / "absent").touch()
            return
        output = Output(
            prefix=folder / "tokens", overwrite=True, row_bytes=True, option="--data_cache_dir"
        )
        prepare_files([([text], output)], encoding=encoding, workers=workers)

    key = recipe_digest(
        recipe(
            [text.identity()],
            tokenizer_fingerprint=encoding.tokenizer.fingerprint,
            end_token=encoding.end_token,
            dtype=encoding.dtype.name,
        )
    )
    cache = TokenCache(**{"folder": cache_dir, "overwrite": False, **changes})
    return cache.token_files(key, prepare)


def cache_watched(cache_dir: Path, reads: Path, seconds: float) -> None:
    """What a process of its own does in the tests of the lock."""
    texts = ["some text"] * 20
    cache_bytes(cache_dir, WatchedSource(texts, reads, seconds))


def error_on_a_full_disk(num_bytes: int, function: Callable[..., object], *args: object) -> str:
    """The error of a call in which files are limited to `num_bytes`; for a process of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        function(*args)
    except DataError as error:
        return str(error)
    return f"no error in process {os.getpid()}"


def cache_much(cache_dir: Path) -> None:
    """A preparation that writes files of up to 200 kB."""
    cache_bytes(cache_dir, ListSource(["x" * 1000] * 100))
