"""Where documents begin within a window, for models that shall not look across."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile
from llm.data.options import DataOptions
from llm.errors import ConfigError, DataError

_DOCUMENTS_LOOKED_AT = 100
_TOKENS_LOOKED_AT = 1 << 20

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DocumentEnds:
    """How to keep the documents of a window apart.

    A document ends with an end-of-text token, which belongs to it. The first one of a window is
    what the window has of it.

    Attributes:
        eos_token_id: The token that ends a document.
        positions: Whether positions start again with each document.
        attention: Whether attention stops at the start of a document.
    """

    eos_token_id: int
    positions: bool
    attention: bool

    def split(self, input_ids: NDArray[Any]) -> tuple[Int64s | None, Int64s | None]:
        """Positions and document numbers of windows.

        Args:
            input_ids: [num_windows, block_size].

        Returns:
            Position of each token in its document, and the number of that document in its
            window, counted from 0; both [num_windows, block_size], None where not wanted.
        """
        begins = np.zeros(input_ids.shape, dtype=bool)
        begins[:, 1:] = input_ids[:, :-1] == self.eos_token_id
        positions = documents = None
        if self.positions:
            places = np.arange(input_ids.shape[1], dtype=np.int64)
            positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        if self.attention:
            documents = np.cumsum(begins, axis=1, dtype=np.int64)
        return positions, documents


def document_ends(options: DataOptions, *, eos_token_id: int | None) -> DocumentEnds | None:
    """Return how to keep the documents of a window apart, or None where they need not be.

    Args:
        options: Whether positions or attention begin anew with each document.
        eos_token_id: The token of the tokenizer that ends a text.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if not (options.reset_position_ids or options.reset_attention_mask):
        return None
    if eos_token_id is None:
        raise ConfigError(
            "--reset_position_ids and --reset_attention_mask need an end-of-text token between "
            "documents, and the tokenizer has none; use one that has."
        )
    return DocumentEnds(
        eos_token_id,
        positions=options.reset_position_ids,
        attention=options.reset_attention_mask,
    )


def check_document_ends(file: TokenFile | FlatTokenFile, eos_token_id: int) -> None:
    """Refuse token files in which no document ends with the end-of-text token.

    Args:
        file: The token file.
        eos_token_id: The token that should end documents.

    Raises:
        DataError: None of the first documents ends with it; where the document ends are
            not known, none of the first million tokens is it.
    """
    number = min(_DOCUMENTS_LOOKED_AT, file.num_documents)
    if number:
        ends = np.array([file.document_start(document) for document in range(1, number + 1)])
        tokens = file.tokens[ends[ends > 0] - 1]
        fault = f"none of its first {number} documents ends with the id {eos_token_id}"
    else:
        tokens = file.tokens[:_TOKENS_LOOKED_AT]
        fault = f"the id {eos_token_id} is not among its first {tokens.size:,} tokens"
    if not (tokens == eos_token_id).any():
        raise DataError(
            "--reset_position_ids and --reset_attention_mask need documents that end with the "
            f"tokenizer's end-of-text token, and those of {file.prefix} do not: {fault}. Prepare "
            "it anew with --append_eod, or leave the two options out."
        )
