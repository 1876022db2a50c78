"""Splits of a corpus as flat streams of tokens."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llm.data.flat_file import FlatTokenFile
from llm.data.hub import dataset_sources
from llm.data.sources import Source, file_source
from llm.data.token_file import TokenFile
from llm.data.tokenizing import PreparedData, prepare
from llm.errors import DataError
from llm.text_tokenizer import TextTokenizer

_DIGEST_TOKENS = 1 << 16

log = logging.getLogger("llm.data")


class TokenStream:
    """A contiguous range of a token file, read as a ring.

    Attributes:
        prefix: The path of the file without its suffix.
        first_byte: Where the range begins in the file's `.bin`.
        tokens: The tokens of the range [num_tokens], mapped, in the dtype of the file.
        num_tokens: Tokens of the range.
        num_documents: Documents of which it holds a part or all; 0 where that is not known.
        num_bytes: UTF-8 bytes of its text; None where it is not known.

    Args:
        token_file: The file.
        start: First token of the range.
        stop: The token after its last.
        num_documents: Documents of which it holds a part or all.
        num_bytes: UTF-8 bytes of its text.
        vocab_size: Ids from here on are refused when they are read; None where the file is known
            to hold none.
    """

    def __init__(
        self,
        token_file: TokenFile | FlatTokenFile,
        *,
        start: int,
        stop: int,
        num_documents: int,
        num_bytes: int | None,
        vocab_size: int | None = None,
    ) -> None:
        self.prefix = token_file.prefix
        self.tokens = token_file.tokens[start:stop]
        self.first_byte = start * self.tokens.itemsize
        self.num_tokens = stop - start
        self.num_documents = num_documents
        self.num_bytes = num_bytes
        self._vocab_size = vocab_size
        self._views: dict[int, NDArray[Any]] = {}

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Copies windows out of the ring.

        Args:
            starts: Positions of the windows' first tokens [num_windows], taken modulo num_tokens.
            length: Tokens of each window; may exceed num_tokens.

        Returns:
            Token ids [num_windows, length] in the dtype of the file.

        Raises:
            DataError: An id is beyond the vocabulary.
        """
        windows = self._copied(starts % self.num_tokens, length)
        if self._vocab_size is not None and windows.size:
            smallest = 0 if windows.dtype.kind == "u" else int(windows.min())
            self._check(smallest, int(windows.max()), self._vocab_size)
        return windows

    def _copied(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        windows = np.empty((starts.size, length), self.tokens.dtype)
        inside = starts + length <= self.num_tokens
        if inside.any():
            if length not in self._views:  # making one takes as long as a small batch
                self._views[length] = np.lib.stride_tricks.sliding_window_view(self.tokens, length)
            whole = self._views[length]
            if inside.all():
                return whole[starts]
            windows[inside] = whole[starts[inside]]
        around = starts[~inside, None] + np.arange(length)
        windows[~inside] = self.tokens[around % self.num_tokens]
        return windows

    def _check(self, smallest: int, largest: int, vocab_size: int) -> None:
        if smallest < 0 or largest >= vocab_size:
            error = DataError(
                f"{self.prefix}.bin holds the token id {smallest if smallest < 0 else largest}, "
                f"and the vocabulary of tokenizer and model has {vocab_size:,} tokens; train with "
                "the tokenizer that made the file."
            )
            error.found_here = True  # other ranks read other windows
            raise error


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """What one source brings to a split.

    Attributes:
        name: For logs and metrics, different from that of the split's other parts.
        weight: Its share of the split; those of all parts sum to 1.
        stream: Its tokens.
    """

    name: str
    weight: float
    stream: TokenStream


def digest_of(parts: Sequence[CorpusPart]) -> str:
    """Tells a split from what it was before: sizes, and the tokens at both ends of each part."""
    state = xxhash.xxh3_128()
    for part in parts:
        tokens = part.stream.tokens
        state.update(str(part.stream.num_tokens).encode())
        for end in (tokens[:_DIGEST_TOKENS], tokens[-_DIGEST_TOKENS:]):
            state.update(np.ascontiguousarray(end).tobytes())
    return str(state.hexdigest())


@dataclass(frozen=True, slots=True)
class Corpus:
    """The splits of one run.

    Attributes:
        train: The sources to train on; empty where there are none.
        validation: Those to evaluate on; empty where there are none.
    """

    train: tuple[CorpusPart, ...]
    validation: tuple[CorpusPart, ...]


def whole(
    token_file: TokenFile | FlatTokenFile, num_bytes: int | None, *, vocab_size: int | None = None
) -> TokenStream:
    """A token file from its first token to its last.

    Args:
        token_file: The file.
        num_bytes: UTF-8 bytes of its text, if known.
        vocab_size: Ids from here on are refused when they are read.
    """
    return TokenStream(
        token_file,
        start=0,
        stop=token_file.num_tokens,
        num_documents=token_file.num_documents,
        num_bytes=num_bytes,
        vocab_size=vocab_size,
    )


def split_by_percentage(
    token_file: TokenFile, row_bytes: NDArray[np.uint32] | None, percentage: float
) -> tuple[TokenStream, TokenStream | None]:
    """Cuts the first `percentage` of the rows off for validation.

    Rows are rounded as in `train[:5%]` of the `datasets` library (its rounding 'closest').

    Args:
        token_file: The file.
        row_bytes: UTF-8 bytes of the text of each sequence, if known.
        percentage: 0 to 100; 0 means no validation.

    Returns:
        (train, validation).

    Raises:
        DataError: One of the two would be empty.
    """
    if percentage == 0:
        return whole(token_file, _total(row_bytes)), None
    rows = token_file.num_sequences
    cut_row = round(percentage * rows / 100)
    cut = token_file.sequence_end(cut_row)
    if cut == 0 or cut == token_file.num_tokens:
        part = "validation" if cut == 0 else "training"
        raise DataError(
            f"--validation_split_percentage {percentage:g} of {rows:,} rows of text leaves none "
            f"for {part}; change the percentage, or give a --validation_file."
        )
    # The document that is cut in two counts on both sides.
    begun = int(np.searchsorted(token_file.documents[:-1], cut_row, side="left"))
    ended = int(np.searchsorted(token_file.documents[1:], cut_row, side="right"))
    cut_bytes = None if row_bytes is None else row_bytes[:cut_row]
    rest_bytes = None if row_bytes is None else row_bytes[cut_row:]
    validation = TokenStream(
        token_file, start=0, stop=cut, num_documents=begun, num_bytes=_total(cut_bytes)
    )
    train = TokenStream(
        token_file,
        start=cut,
        stop=token_file.num_tokens,
        num_documents=token_file.num_documents - ended,
        num_bytes=_total(rest_bytes),
    )
    return train, validation


def _total(row_bytes: NDArray[np.uint32] | None) -> int | None:
    return None if row_bytes is None else int(row_bytes.sum(dtype=np.int64))


def open_corpus(
    *,
    dataset_name: str | None,
    dataset_config_name: str | None,
    train_file: Path | None,
    validation_file: Path | None,
    validation_split_percentage: float,
    text_column: str | None,
    keep_linebreaks: bool,
    trust_remote_code: bool,
    tokenizer: TextTokenizer,
    vocab_size: int,
    append_eos: bool,
    preprocessing_num_workers: int | None,
    cache_dir: Path,
    overwrite_cache: bool,
    launch: str | None,
    progress: Callable[[int, int, int], None] | None,
) -> Corpus:
    """Tokenises text unless that was done before, and opens its splits.

    The names are those of the trainer's options. A validation text of its own is taken whole;
    without one, `validation_split_percentage` of the training text is cut off. A
    `validation_file` alone gives a corpus to evaluate on.

    Args:
        dataset_name: A Hub data set or a local folder; or None.
        dataset_config_name: Its configuration.
        train_file: A file to train on; or None.
        validation_file: A file to evaluate on; or None.
        validation_split_percentage: Of the rows of the training text.
        text_column: The column with the text; None takes `text`, else the only one of text.
        keep_linebreaks: Whether the lines of text files keep their line breaks.
        trust_remote_code: Handed to `datasets`.
        tokenizer: What gives the ids.
        vocab_size: Of the model; larger ids are refused.
        append_eos: Whether each document ends with the end-of-text token.
        preprocessing_num_workers: Cores to tokenise on; None takes all.
        cache_dir: The folder for token files.
        overwrite_cache: Tokenise anew, once a launch.
        launch: Equal on all ranks of a launch; None for a single process.
        progress: Told (rows, tokens, bytes) so far, about once a second.

    Raises:
        DataError: The text or the cache folder is missing, broken or too small.
        ConfigError: `append_eos` with a tokenizer that has no such token.
    """
    sources: dict[str, Source] = {}
    if dataset_name is not None:
        sources = dataset_sources(
            dataset_name,
            dataset_config_name,
            text_column=text_column,
            trust_remote_code=trust_remote_code,
        )
    for split, file in (("train", train_file), ("validation", validation_file)):
        if file is not None:
            sources[split] = _file_source(f"--{split}_file", file, text_column, keep_linebreaks)
    prepared = prepare(
        train=sources.get("train"),
        validation=sources.get("validation"),
        tokenizer=tokenizer,
        append_eos=append_eos,
        vocab_size=vocab_size,
        num_workers=preprocessing_num_workers,
        cache_dir=cache_dir,
        overwrite_cache=overwrite_cache,
        launch=launch,
        progress=progress,
    )
    return _split_text(prepared, validation_split_percentage)


def _file_source(option: str, file: Path, text_column: str | None, keep_linebreaks: bool) -> Source:
    if text_column is not None and ".txt" in file.suffixes:
        log.warning(f"--text_column {text_column} has no effect on {file}: a text has no columns")
    return file_source(
        file, text_column=text_column, keep_linebreaks=keep_linebreaks, option=option
    )


def _split_text(prepared: PreparedData, validation_split_percentage: float) -> Corpus:
    info = prepared.info
    train, validation = None, None
    if prepared.validation is not None:
        validation = whole(prepared.validation, info["validation"]["bytes"])
        if prepared.train is not None:
            train = whole(prepared.train, info["train"]["bytes"])
    else:
        assert prepared.train is not None  # prepare refuses to prepare nothing
        train, validation = split_by_percentage(
            prepared.train, prepared.row_bytes, validation_split_percentage
        )
    return Corpus(train=_alone("train", train), validation=_alone("validation", validation))


def _alone(name: str, stream: TokenStream | None) -> tuple[CorpusPart, ...]:
    return () if stream is None else (CorpusPart(name, 1.0, stream),)
