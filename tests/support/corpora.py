"""Texts and tokenizers without a library, for tests of what happens around them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from llm.data.tokenizing import PreparedData, prepare


class ByteTokenizer:
    """Ids 1 to 256 are bytes, 0 ends a text; looks like a slow tokenizer of transformers."""

    is_fast = False
    eos_token_id = 0

    def encode(self, text: str, **_: object) -> list[int]:
        return [byte + 1 for byte in text.encode()]


class ListSource:
    """Rows from memory."""

    num_bytes: int | None = None

    def __init__(self, rows: list[tuple[str, bool]], *, name: str = "list") -> None:
        self.name = name
        self._rows = rows

    def identity(self) -> dict[str, str]:
        return {"list": self.name}

    def exists(self) -> bool:
        return True

    def rows(self) -> Iterator[tuple[str, bool]]:
        yield from self._rows


class WatchedSource(ListSource):
    """Appends a line to `reads` whenever its rows are read, and takes its time."""

    def __init__(self, rows: list[tuple[str, bool]], reads: Path, seconds: float) -> None:
        super().__init__(rows, name="watched")
        self._reads = reads
        self._seconds = seconds

    def rows(self) -> Iterator[tuple[str, bool]]:
        with open(self._reads, "a") as file:
            file.write("read\n")
        for row in self._rows:
            yield row
            time.sleep(self._seconds / len(self._rows))


def prepare_bytes(cache_dir: Path, **changes: object) -> PreparedData:
    """Calls `prepare` with the byte tokenizer and small defaults."""
    settings: dict[str, object] = {
        "train": ListSource([("ab", True), ("c", True)]),
        "validation": None,
        "tokenizer": ByteTokenizer(),
        "tokenizer_fingerprint": "bytes",
        "append_eos": True,
        "vocab_size": 257,
        "num_workers": None,
        "cache_dir": cache_dir,
        "overwrite_cache": False,
        "launch": None,
        "progress": None,
    }
    return prepare(**{**settings, **changes})  # type: ignore[arg-type]


def prepare_watched(cache_dir: Path, reads: Path, seconds: float, launch: str | None) -> None:
    """What a process of its own does in the tests of the lock."""
    rows = [("some text", True)] * 20
    prepare_bytes(cache_dir, train=WatchedSource(rows, reads, seconds), launch=launch)


def prepare_on_a_full_disk(cache_dir: Path, num_bytes: int) -> str:
    """The error of a preparation in which no file may grow beyond `num_bytes`."""
    import resource

    from llm.errors import DataError

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        prepare_bytes(cache_dir, train=ListSource([("x" * 1000, True)] * 100))
    except DataError as error:
        return str(error)
    return f"no error in process {os.getpid()}"
