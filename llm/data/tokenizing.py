"""From rows of text to a pair of token files, which the cache keeps."""

import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llm.data.sources import Row, Source
from llm.data.token_cache import is_marked, launch_mark, open_or_build
from llm.data.token_file import TokenFile, TokenFileWriter, token_dtype
from llm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = 2  # of the cache; counts up when the same text shall give other files
_BATCH_CHARACTERS = 1 << 20
_BATCH_ROWS = 1 << 14
_PROGRESS_SECONDS = 1.0

Encode = Callable[[list[str]], list[list[int]]]
Progress = Callable[[int, int, int], None]

log = logging.getLogger("llm.data")


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The token files of one corpus.

    Attributes:
        train: None where only a validation text was given.
        validation: None where there is no such text.
        row_bytes: UTF-8 bytes of each sequence of `train`.
        info: `tokenizer_fingerprint`, `append_eos`, `dtype`, `written`, and under `train` and
            `validation` None or `source`, `rows`, `empty_rows` (dropped), `documents`, `tokens`,
            `bytes` (of the text in UTF-8) and
            `largest_token`.
    """

    train: TokenFile | None
    validation: TokenFile | None
    row_bytes: NDArray[np.uint32] | None
    info: dict[str, Any]


def prepare(
    *,
    train: Source | None,
    validation: Source | None,
    tokenizer: "PreTrainedTokenizerBase",
    tokenizer_fingerprint: str,
    append_eos: bool,
    vocab_size: int,
    num_workers: int | None,
    cache_dir: Path,
    overwrite_cache: bool,
    launch: str | None,
    progress: Progress | None,
) -> PreparedData:
    """Opens the token files of two texts, writing them first if the cache does not hold them.

    Any number of processes may call this at once: one of them writes, the others wait.

    Args:
        train: The text to train on; or None.
        validation: The text to evaluate on; or None. It may turn out not to exist.
        tokenizer: From transformers. It adds no special tokens, and those that are spelled out in
            the text are encoded as text.
        tokenizer_fingerprint: Equal for tokenizers that give equal ids.
        append_eos: Whether each document ends with the end-of-text token.
        vocab_size: Of the model; larger ids are refused.
        num_workers: Cores to tokenise on; None takes all.
        cache_dir: The folder that keeps the token files.
        overwrite_cache: Write them anew, once a launch.
        launch: Equal on all ranks of a launch; None for a single process.
        progress: Told (rows, tokens, bytes of text) so far, over both texts, about once a second.

    Raises:
        ConfigError: `append_eos` with a tokenizer that has no such token.
        DataError: A text is missing, broken or empty, or the cache cannot be written.
    """
    sources = {"train": train, "validation": validation}
    facts = {
        "format": _FORMAT,
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "append_eos": append_eos,
        "dtype": token_dtype(vocab_size).name,
    }

    def accept(found: PreparedData) -> bool:
        return not overwrite_cache or is_marked(found.info["written"], launch)

    def build(folder: Path) -> None:
        info: dict[str, Any] = {**facts, "written": launch_mark(launch)}
        total = _Total(progress)
        with _plain_text_encoder(tokenizer, num_workers) as encode:
            for split, source in sources.items():
                present = source is not None and (split == "train" or source.exists())
                writer = _SplitWriter(
                    encode=encode,
                    eos_token_id=_eos_token_id(tokenizer) if append_eos else None,
                    vocab_size=vocab_size,
                    total=total,
                )
                info[split] = writer.write(source, folder / split) if source and present else None
        with open(folder / "info.json", "w", encoding="utf-8") as file:
            json.dump(info, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    prepared = open_or_build(
        cache_dir / _key(facts, sources),
        open_folder=_open_folder,
        accept=accept,
        build=build,
        launch=launch,
    )
    for split in sources:
        if prepared.info[split] is not None:
            _check_vocabulary(prepared.info[split]["largest_token"], vocab_size)
    return prepared


def _key(facts: dict[str, Any], sources: dict[str, Source | None]) -> str:
    identities = {split: source and source.identity() for split, source in sources.items()}
    text = json.dumps({**facts, **identities}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _open_folder(folder: Path) -> PreparedData | None:
    try:
        info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
        files = {
            split: None if info[split] is None else TokenFile(folder / split)
            for split in ("train", "validation")
        }
        row_bytes = None
        if files["train"] is not None:
            row_bytes = np.load(_row_bytes(folder / "train"), mmap_mode="r")
    except FileNotFoundError:
        return None
    except (DataError, ValueError, KeyError, OSError) as error:
        log.warning(f"the cached tokens in {folder} cannot be used: {error}")
        return None
    return PreparedData(files["train"], files["validation"], row_bytes, info)


def _row_bytes(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.row_bytes.npy")


def _eos_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end-of-text token to put between documents; pass "
            "--no_append_eos, or use a tokenizer that has one."
        )
    return int(tokenizer.eos_token_id)


def _check_vocabulary(largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise DataError(
            f"The tokenizer gives the id {largest}, beyond the model's vocabulary of "
            f"{vocab_size}; --tokenizer_name and the model do not belong together."
        )


@contextmanager
def _plain_text_encoder(
    tokenizer: "PreTrainedTokenizerBase", num_workers: int | None
) -> Iterator[Encode]:
    """Yields a function from texts to ids: no special tokens, nothing padded or cut."""
    if not tokenizer.is_fast:
        log.warning("the tokenizer is a slow one, in Python: it runs on one core")
        yield lambda texts: [
            tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
            for text in texts
        ]
        return
    if num_workers is not None:  # read by the Rust library when it starts its threads
        os.environ["RAYON_NUM_THREADS"] = str(num_workers)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_workers > 1 else "false"
    backend = tokenizer.backend_tokenizer
    special, truncation, padding = (
        backend.encode_special_tokens,
        backend.truncation,
        backend.padding,
    )
    backend.encode_special_tokens = True  # the name means: as the characters that they are
    backend.no_truncation()
    backend.no_padding()
    try:
        yield lambda texts: [
            encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)
        ]
    finally:
        backend.encode_special_tokens = special
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


class _Total:
    """What has been done so far, told about once a second."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._told = time.monotonic()
        self._rows = self._tokens = self._bytes = 0

    def add(self, rows: int, tokens: int, num_bytes: int) -> None:
        self._rows += rows
        self._tokens += tokens
        self._bytes += num_bytes
        now = time.monotonic()
        if self._progress is not None and now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._progress(self._rows, self._tokens, self._bytes)


class _SplitWriter:
    """Writes one text as one token file."""

    def __init__(
        self, *, encode: Encode, eos_token_id: int | None, vocab_size: int, total: _Total
    ) -> None:
        self._encode = encode
        self._end = [] if eos_token_id is None else [eos_token_id]
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._total = total
        self._rows = self._empty_rows = self._bytes = self._largest = 0
        self._row_bytes = array("I")

    def write(self, source: Source, prefix: Path) -> dict[str, Any]:
        size = "" if source.num_bytes is None else f" ({source.num_bytes / 1e6:,.1f} MB)"
        log.info(f"tokenising {source.name}{size}")
        with TokenFileWriter(prefix, self._dtype) as writer:
            for batch in _batches(source.rows()):
                self._add(batch, writer)
        if self._rows == 0:
            raise DataError(
                f"{source.name} holds no text: {self._empty_rows} rows, all of them empty."
            )
        with open(_row_bytes(prefix), "wb") as file:
            np.save(file, np.frombuffer(self._row_bytes, dtype=np.uint32))
            file.flush()
            os.fsync(file.fileno())
        tokens = TokenFile(prefix)
        dropped = f"; {self._empty_rows:,} empty rows dropped" if self._empty_rows else ""
        log.info(f"tokenised {self._rows:,} rows into {tokens.num_tokens:,} tokens{dropped}")
        return {
            "source": source.name,
            "rows": self._rows,
            "empty_rows": self._empty_rows,
            "documents": tokens.num_documents,
            "tokens": tokens.num_tokens,
            "bytes": self._bytes,
            "largest_token": self._largest,
        }

    def _add(self, batch: list[Row], writer: TokenFileWriter) -> None:
        rows, num_tokens, num_bytes = self._rows, 0, self._bytes
        encoded = self._encode([text for text, _ in batch])
        for (text, ends_document), ids in zip(batch, encoded, strict=True):
            size = len(text) if text.isascii() else len(text.encode())
            if ids:
                self._rows += 1
                self._bytes += size
            else:
                self._empty_rows += 1
            # An empty row may end a document that earlier ones have begun; a document that is
            # empty as a whole is dropped, its end-of-text token with it.
            if ends_document and (ids or writer.in_document):
                ids = ids + self._end
            if ids:
                self._largest = max(self._largest, max(ids))
                _check_vocabulary(self._largest, self._vocab_size)
                writer.add(np.array(ids, dtype=self._dtype), ends_document=ends_document)
                self._row_bytes.append(size)
                num_tokens += len(ids)
            elif ends_document and writer.in_document:
                writer.end_document()
        self._total.add(self._rows - rows, num_tokens, self._bytes - num_bytes)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Groups of rows that together are about as large as the threads like them."""
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row[0])
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ROWS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
