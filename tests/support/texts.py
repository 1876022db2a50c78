"""Texts and token files without a library: sources, a tokenizer of bytes, and their preparation."""

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import zstandard

from llm.data.formats.megatron import TokenFile
from llm.errors import DataError
from llm.prepare.encoder import Encoding
from llm.prepare.output_files import Output
from llm.prepare.prepare_files import prepare_files
from llm.prepare.shares import Share
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import Source
from llm.prepare.text_tokenizer import TextTokenizer
from tests.support.token_files import TokenFileWriter
from tests.support.tokenizers import tiny_tokenizer

UINT16 = np.dtype("<u2")
THREE = ["wiki.bin", "wiki.idx", "wiki.json"]
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


class ReadSource(ListSource):
    """Notes that it is read; the fixture `fresh_reads` clears the list."""

    reads: ClassVar[list[str]] = []

    def batches(self, faults: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        self.reads.append(self.name)
        yield from super().batches(faults)


class FailingSource(ListSource):
    """Is broken behind its texts."""

    def batches(self, faults: BadRecordPolicy | None = None) -> Iterator[list[str]]:
        yield from super().batches(faults)
        raise DataError("line 9 is broken")


def prepare(
    prefix: Path,
    sources: list[Any],
    *,
    workers: int = 1,
    encoding: dict[str, Any] | None = None,
    share: Share = Share(),  # noqa: B008
    **output: Any,
) -> None:
    """Prepares one output, or a rank's share of it, with the tokenizer of bytes."""
    jobs = [(sources, Output(prefix=prefix, **output))]
    prepare_all(jobs, workers=workers, share=share, **(encoding or {}))


def prepare_all(
    jobs: list[tuple[list[Any], Output]],
    *,
    workers: int = 1,
    share: Share = Share(),  # noqa: B008
    **encoding: Any,
) -> None:
    """Prepares several outputs with the tokenizer of bytes."""
    settings = {"tokenizer": byte_tokenizer(), "end_token": 0, "dtype": UINT16, **encoding}
    prepare_files(
        jobs, encoding=Encoding(**settings), workers=workers, log_seconds=10.0, share=share
    )


def ids(text: str) -> list[int]:
    """What the tokenizer of bytes gives."""
    return [byte + 1 for byte in text.encode()]


def names(folder: str | Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def tokens(prefix: Path) -> list[int]:
    """All ids of a pair of token files."""
    return TokenFile(prefix).tokens.tolist()


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def json_lines(texts: Sequence[str]) -> str:
    """The texts as JSON Lines, with a second field."""
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)


def pair(prefix: str | Path) -> list[bytes]:
    """The bytes of a `.bin` and its `.idx`."""
    return [Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx")]


def expected_pair(folder: Path, texts: Sequence[str]) -> list[bytes]:
    """What one writer makes of the ids of transformers, document by document."""
    folder.mkdir(exist_ok=True)
    tokenizer = tiny_tokenizer()
    with TokenFileWriter(folder / "expected", UINT16) as writer:
        for text in filter(None, texts):
            found = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            writer.add(np.array([*found, 0]), ends_document=True)
    return pair(folder / "expected")


def error_on_a_full_disk(num_bytes: int, function: Callable[..., object], *args: object) -> str:
    """The error of a call in which files are limited to `num_bytes`; for a process of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        function(*args)
    except DataError as error:
        return str(error)
    return f"no error in process {os.getpid()}"
