"""Small token files, and the sidecars that say who made them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.megatron import write_index
from llm.data.formats.parts import part_prefix
from llm.data.formats.sidecar import Sidecar, write_sidecar


class TokenFileWriter:
    """Write `PREFIX.bin` and `PREFIX.idx` by one sequence after the other, as Megatron's builder.

    The `.idx` is written when the block of a `with` statement is left without an error.

    Args:
        prefix: The path of both files without their suffix.
        dtype: Of the token ids on disk.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._lengths: list[int] = []
        self._documents = [0]

    def __enter__(self) -> "TokenFileWriter":
        self._bin = open(f"{self._prefix}.bin", "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bin.close()
        if kind is None:
            if len(self._lengths) > self._documents[-1]:
                self.end_document()
            with open(f"{self._prefix}.idx", "wb") as idx:
                write_index(
                    idx,
                    self._dtype,
                    num_sequences=len(self._lengths),
                    num_documents=len(self._documents) - 1,
                    lengths=lambda: iter([np.array(self._lengths, "<i4")]),
                    documents=[np.array(self._documents)],
                )

    def add(self, tokens: NDArray[Any], *, ends_document: bool) -> None:
        """Append one sequence."""
        self._bin.write(tokens.astype(self._dtype).tobytes())
        self._lengths.append(tokens.size)
        if ends_document:
            self.end_document()

    def end_document(self) -> None:
        """Close the document that the sequences added so far belong to."""
        self._documents.append(len(self._lengths))


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    """A `.bin` and `.idx` with these documents, of one sequence each."""
    with TokenFileWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document), ends_document=True)
    return prefix


def write_sequences(prefix: Path, documents: list[list[list[int]]], dtype: str = "<u2") -> Path:
    """A `.bin` and `.idx` with documents of any number of sequences."""
    with TokenFileWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            for sequence in document:
                writer.add(np.array(sequence, dtype=np.int64), ends_document=False)
            writer.end_document()
    return prefix


def write_parts(
    prefix: Path, documents: list[list[int]], counts: Sequence[int], dtype: str = "<u2"
) -> Path:
    """Numbered parts of so many documents each, in the same order."""
    first = 0
    for number, count in enumerate(counts):
        part = part_prefix(prefix, number, len(counts))
        write_pair(part, documents[first : first + count], dtype)
        first += count
    return prefix


def write_flat(path: Path, tokens: list[int]) -> Path:
    """A nanoGPT file: nothing but uint16 ids."""
    np.array(tokens, dtype="<u2").tofile(path)
    return path


def describe(
    prefix: Path,
    *,
    fingerprint: str,
    largest_token: int,
    text_bytes: int = 0,
    checksums: dict[str, list[str]] | None = None,
    **changes: Any,
) -> None:
    """A sidecar with these facts."""
    values: dict[str, Any] = {
        "tokenizer": "some-tokenizer",
        "tokenizer_fingerprint": fingerprint,
        "vocab_size": largest_token + 1,
        "eos_token_id": 0,
        "append_eos": True,
        "dtype": "uint16",
        "documents": 1,
        "tokens": 1,
        "text_bytes": text_bytes,
        "empty_documents": 0,
        "skipped_documents": 0,
        "largest_token": largest_token,
        "sources": [],
        "plan": "0",
        "checksums": checksums or {},
    }
    write_sidecar(prefix, Sidecar(**values | changes))


def random_documents(num_documents: int, *, seed: int, first_id: int = 1) -> list[list[int]]:
    """Documents of 5 to 40 ids from `first_id` up to 99 more, each ended by a 0."""
    draw = np.random.default_rng(seed)
    return [
        [*(first_id + draw.integers(100, size=draw.integers(5, 41))).tolist(), 0]
        for _ in range(num_documents)
    ]
