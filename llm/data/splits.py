"""Splits of token files by `--split`, or of a percentage of rows."""

import itertools
import logging

import numpy as np
from numpy.typing import NDArray

from llm.data.corpus import TokenStream
from llm.data.formats.flat import AnyTokenFile, FlatTokenFile
from llm.data.formats.megatron import TokenFile
from llm.errors import DataError

logger = logging.getLogger("llm.data")


def split_documents(
    file: AnyTokenFile,
    split: tuple[float, float, float],
    *,
    text: str,
    vocab_size: int | None,
) -> tuple[TokenStream | None, TokenStream | None]:
    """Split a token file by its documents, as Megatron-LM does; the third split is not used.

    Bounds are the cumulative fractions times the number of documents, rounded to the nearest,
    halves to the even. A file that does not know its documents is split by tokens.

    Args:
        file: The token file.
        split: The fractions, with the sum 1.
        text: The fractions as the user wrote them, for messages.
        vocab_size: As for `TokenStream`.

    Returns:
        (training, validation); None if the split asks for none.

    Raises:
        DataError: A split that is asked for gets no document.
    """
    num_units, unit_name = file.num_documents, "documents"
    if isinstance(file, FlatTokenFile):
        num_units, unit_name = file.num_tokens, "tokens"
        logger.info(
            f"{file.prefix} does not say where documents end: --split {text} cuts its tokens"
        )
    bounds = [round(share * float(num_units)) for share in itertools.accumulate(split, initial=0.0)]
    streams: list[TokenStream | None] = []
    for split_index, split_name in enumerate(("training", "validation")):
        first_unit, end_unit = bounds[split_index], bounds[split_index + 1]
        if split[split_index] == 0:
            streams.append(None)
        elif first_unit < end_unit:
            streams.append(_open_unit_range(file, first_unit, end_unit, vocab_size))
        else:
            raise DataError(
                f"--split {text} leaves no {unit_name} for {split_name} of {file.prefix}, which "
                f"has {num_units:,} {unit_name}; change the split, or give more text."
            )
    training, validation = streams
    return training, validation


def _open_unit_range(
    file: AnyTokenFile, first_unit: int, end_unit: int, vocab_size: int | None
) -> TokenStream:
    """Open consecutive documents of a file, or consecutive tokens of a flat file.

    Args:
        file: The token file.
        first_unit: The first document or token, counted from 0.
        end_unit: The document or token after the last one.
        vocab_size: As for `TokenStream`.
    """
    if isinstance(file, FlatTokenFile):
        return TokenStream(file, start=first_unit, stop=end_unit, vocab_size=vocab_size)
    return TokenStream(
        file,
        start=file.document_start(first_unit),
        stop=file.document_start(end_unit),
        num_documents=end_unit - first_unit,
        vocab_size=vocab_size,
    )


def split_rows(
    file: TokenFile, row_bytes: NDArray[np.uint32], percentage: float, *, vocab_size: int | None
) -> tuple[TokenStream, TokenStream]:
    """Split the first `percentage` of the rows off for validation.

    Rows are rounded as in `train[:5%]` of the `datasets` library (its rounding 'closest').

    Args:
        file: The token file.
        row_bytes: UTF-8 bytes of the text of each sequence.
        percentage: Above 0, to 100.
        vocab_size: As for `TokenStream`.

    Returns:
        (training, validation).

    Raises:
        DataError: One of the two would be empty.
    """
    num_rows = file.num_sequences
    split_row = round(percentage * num_rows / 100)
    split_token = file.sequence_end(split_row)
    if split_token == 0 or split_token == file.num_tokens:
        empty_split = "validation" if split_token == 0 else "training"
        raise DataError(
            f"--validation_split_percentage {percentage:g} of {num_rows:,} rows of text leaves "
            f"none for {empty_split}; change the percentage, or give a --validation_file."
        )
    # A document that is cut in two counts in both splits.
    num_validation_documents = int(np.searchsorted(file.documents[:-1], split_row, side="left"))
    num_ended_documents = int(np.searchsorted(file.documents[1:], split_row, side="right"))
    validation = TokenStream(
        file,
        stop=split_token,
        num_documents=num_validation_documents,
        # Sum in int64: a large corpus has more bytes than uint32 can count.
        num_bytes=int(row_bytes[:split_row].sum(dtype=np.int64)),
        vocab_size=vocab_size,
    )
    training = TokenStream(
        file,
        start=split_token,
        num_documents=file.num_documents - num_ended_documents,
        num_bytes=int(row_bytes[split_row:].sum(dtype=np.int64)),
        vocab_size=vocab_size,
    )
    return training, validation
