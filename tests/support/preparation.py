"""Preparing token files in tests: by the program, and by its functions with texts from memory."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llm.data.formats.megatron import TokenFile
from llm.errors import DataError
from llm.prepare.encoder import Encoding
from llm.prepare.output_files import Output
from llm.prepare.prepare_files import prepare_files
from llm.prepare.shares import Share
from llm.prepare.text.blocks import BadRecordPolicy
from tests.support.corpora import ListSource, byte_tokenizer
from tests.support.token_files import TokenFileWriter
from tests.support.tokenizers import tiny_tokenizer

UINT16 = np.dtype("<u2")
THREE = ["wiki.bin", "wiki.idx", "wiki.json"]


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
