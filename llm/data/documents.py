"""Find the documents that a sample's tokens belong to, by binary search in the index."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm.data.corpus import TokenStream
from llm.data.formats.flat import FlatTokenFile
from llm.errors import DataError


class Passage(NamedTuple):
    """A piece of a sample within one document.

    Attributes:
        document: Number of the document in its token file; None if the file has no documents.
        offset: Position of the first token in the document, or in a file without documents.
        length: Tokens of the whole document, or of a file without documents.
        tokens: The tokens.
    """

    document: int | None
    offset: int
    length: int
    tokens: NDArray[Any]


def passages(stream: TokenStream, start: int, length: int) -> Iterator[Passage]:
    """Yield the passages of a sample.

    Args:
        stream: The sample's source.
        start: Position of its first token in the stream.
        length: Its tokens.

    Raises:
        DataError: The index is damaged.
    """
    file = stream.file
    origin = stream.first_byte // stream.tokens.itemsize
    while length > 0:
        start %= stream.num_tokens  # the stream is a ring
        stop = min(start + length, stream.num_tokens)
        length -= stop - start
        if isinstance(file, FlatTokenFile):
            tokens = np.asarray(stream.tokens[start:stop])
            yield Passage(None, origin + start, file.num_tokens, tokens)
            start = stop
            continue
        # Documents without tokens begin at the same place; the search finds the last of them.
        documents = range(file.num_documents)
        number = bisect_right(documents, origin + start, key=file.document_start) - 1
        while start < stop:
            begin, end = file.document_start(number), file.document_start(number + 1)
            if not begin <= origin + start <= end:
                raise DataError(
                    f"The token file {file.prefix}.idx has documents out of order near number "
                    f"{number:,}; it is damaged."
                )
            until = min(stop, end - origin)
            if until > start:
                tokens = np.asarray(stream.tokens[start:until])
                yield Passage(number, origin + start - begin, end - begin, tokens)
            start, number = until, number + 1
