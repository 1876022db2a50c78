"""Text that a run is trained on, as token files that the cache keeps."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.assembly import assemble
from llm.data.parts import read_array
from llm.data.sources import Source, check_unchanged
from llm.data.token_cache import is_marked, launch_mark, open_or_build
from llm.data.token_file import TokenFile, token_dtype
from llm.data.tokenize_parts import Encoding, Totals, tokenize_parts
from llm.data.workers import bounded_workers
from llm.errors import ConfigError, DataError
from llm.files import sync, write_whole
from llm.text_tokenizer import TextTokenizer

_REPORT_SECONDS = 1.0
_FORMAT = 3  # of the cache; counts up when the same text shall give other files

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
            `bytes` (of the text in UTF-8) and `largest_token`.
    """

    train: TokenFile | None
    validation: TokenFile | None
    row_bytes: NDArray[np.uint32] | None
    info: dict[str, Any]


def prepare(
    *,
    train: Source | None,
    validation: Source | None,
    tokenizer: TextTokenizer,
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
        tokenizer: What gives the ids. The names of special tokens in the text are text.
        append_eos: Whether each document ends with the end-of-text token.
        vocab_size: Of the model; larger ids are refused.
        num_workers: Cores to tokenise on; None takes all.
        cache_dir: The folder that keeps the token files.
        overwrite_cache: Write them anew, once a launch.
        launch: Equal on all ranks of a launch; None for a single process.
        progress: Told (rows, tokens, bytes of text) so far, over both texts, about once a second.

    Raises:
        ConfigError: `append_eos` with a tokenizer that has no such token.
        DataError: A text is missing, broken, empty or changes meanwhile, or the cache cannot be
            written.
    """
    sources = {"train": train, "validation": validation}
    facts = {
        "format": _FORMAT,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "append_eos": append_eos,
        "dtype": token_dtype(vocab_size).name,
    }

    def accept(found: PreparedData) -> bool:
        return not overwrite_cache or is_marked(found.info["written"], launch)

    def build(folder: Path) -> None:
        info: dict[str, Any] = {**facts, "written": launch_mark(launch)}
        encoding = Encoding(
            tokenizer=tokenizer,
            end_token=end_token(tokenizer, append_eos),
            dtype=token_dtype(max(vocab_size, tokenizer.size)),
        )
        threads = bounded_workers(num_workers)
        for split, source in sources.items():
            info[split] = None
            if source is not None and (split == "train" or source.exists()):
                info[split] = _write_split(
                    source,
                    folder / split,
                    encoding=encoding,
                    vocab_size=vocab_size,
                    threads=threads,
                    progress=progress,
                )
        check_unchanged(source for source in sources.values() if source is not None)
        write_whole(folder / "info.json", json.dumps(info, indent=1))

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


def end_token(tokenizer: TextTokenizer, append_eos: bool) -> int | None:
    """The token that shall end each document; None where none shall.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if append_eos and tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end-of-text token to put between documents; pass "
            "--no_append_eos, or use a tokenizer that has one."
        )
    return tokenizer.eos_token_id if append_eos else None


def _check_vocabulary(largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise DataError(
            f"The tokenizer gives the id {largest}, beyond the model's vocabulary of "
            f"{vocab_size}; --tokenizer_name and the model do not belong together."
        )


def _write_split(
    source: Source,
    prefix: Path,
    *,
    encoding: Encoding,
    vocab_size: int,
    threads: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Writes one text as one token file, and the bytes of its rows beside it."""
    size = "" if source.num_bytes is None else f" ({source.num_bytes / 1e6:,.1f} MB)"
    log.info(f"tokenising {source.name}{size}")
    folder = prefix.with_name(f"{prefix.name}.parts")
    folder.mkdir()

    told = time.monotonic()

    def report(totals: Totals) -> None:
        nonlocal told
        if progress is not None and time.monotonic() - told >= _REPORT_SECONDS:
            told = time.monotonic()
            progress(totals.texts, totals.tokens, totals.text_bytes)

    stems, parts = tokenize_parts(
        [source], folder, encoding=encoding, workers=threads, report=report, fork=False
    )
    (facts,) = parts
    if facts.texts == 0:
        reason = f": {facts.empty} rows, all of them empty" if facts.empty else ""
        raise DataError(f"{source.name} holds no text{reason}.")
    _check_vocabulary(facts.largest_token, vocab_size)
    assemble(stems, parts, prefix, dtype=encoding.dtype)
    with open(_row_bytes(prefix), "wb") as file:
        np.save(file, read_array(stems[0], ".bytes", "<u4"))
        sync(file)
    shutil.rmtree(folder)
    dropped = f"; {facts.empty:,} empty rows dropped" if facts.empty else ""
    log.info(f"tokenised {facts.texts:,} rows into {facts.tokens:,} tokens{dropped}")
    return {
        "source": source.name,
        "rows": facts.texts,
        "empty_rows": facts.empty,
        "documents": facts.documents,
        "tokens": facts.tokens,
        "bytes": facts.text_bytes,
        "largest_token": facts.largest_token,
    }
