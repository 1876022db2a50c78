"""Splits of a corpus as flat streams of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llm.data.flat_file import FlatTokenFile
from llm.data.token_file import TokenFile
from llm.errors import DataError

_DIGEST_TOKENS = 1 << 16


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
            largest = int(windows.max())
            if smallest < 0 or largest >= self._vocab_size:
                beyond = smallest if smallest < 0 else largest
                error = DataError(
                    f"{self.prefix}.bin holds the token id {beyond}, and the vocabulary of "
                    f"tokenizer and model has {self._vocab_size:,} tokens; train with the "
                    "tokenizer that made the file."
                )
                error.found_here = True  # other ranks read other windows
                raise error
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
