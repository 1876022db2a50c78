"""Small token files, and the sidecars that say who made them."""

from pathlib import Path

import numpy as np

from llm.data.formats.megatron import TokenFileWriter
from llm.data.formats.sidecar import Sidecar, write_sidecar


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    """A `.bin` and `.idx` with these documents, of one sequence each."""
    with TokenFileWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document), ends_document=True)
    return prefix


def write_flat(path: Path, tokens: list[int]) -> Path:
    """A nanoGPT file: nothing but uint16 ids."""
    np.array(tokens, dtype="<u2").tofile(path)
    return path


def describe(prefix: Path, *, fingerprint: str, largest_token: int, text_bytes: int = 0) -> None:
    """A sidecar with these facts."""
    sidecar = Sidecar(
        tokenizer="some-tokenizer",
        tokenizer_fingerprint=fingerprint,
        vocab_size=largest_token + 1,
        eos_token_id=0,
        append_eos=True,
        dtype="uint16",
        documents=1,
        tokens=1,
        text_bytes=text_bytes,
        empty_documents=0,
        skipped_documents=0,
        largest_token=largest_token,
        sources=[],
        plan="0",
        checksums={},
    )
    write_sidecar(prefix, sidecar)


def random_documents(num_documents: int, *, seed: int, first_id: int = 1) -> list[list[int]]:
    """Documents of 5 to 40 ids from `first_id` up to 99 more, each ended by a 0."""
    draw = np.random.default_rng(seed)
    return [
        [*(first_id + draw.integers(100, size=draw.integers(5, 41))).tolist(), 0]
        for _ in range(num_documents)
    ]
