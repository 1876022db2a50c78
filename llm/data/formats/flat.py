"""Flat token files: nanoGPT's `.bin`, uint16 ids one after the other, without header or index."""

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llm.data.formats.paths import map_file
from llm.errors import DataError

_LLM_C_MAGIC = (20240520).to_bytes(4, "little")


class FlatTokenFile:
    """A `.bin` of uint16 ids, memory-mapped; opening takes the same time for any size.

    It does not say where documents begin.

    Attributes:
        prefix: The path without `.bin`.
        tokens: All token ids, uint16 [num_tokens].

    Args:
        path: The file, with its `.bin`.

    Raises:
        DataError: It is missing, is cut within an id, or begins with llm.c's header.
    """

    num_documents = 0
    """Not known."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.prefix = Path(str(path).removesuffix(".bin"))
        data = map_file(self.path)
        if data.size % 2:
            raise DataError(
                f"The token file {self.path} is {data.size} bytes long, which cuts a uint16 in "
                "two; it is damaged or of another kind."
            )
        if data[:4].tobytes() == _LLM_C_MAGIC:
            raise DataError(
                f"The token file {self.path} begins with the header of llm.c, not with ids; cut "
                "its first 1,024 bytes off to read the rest as a flat file of uint16 ids."
            )
        self.tokens: NDArray[Any] = data.view("<u2")

    @property
    def num_tokens(self) -> int:
        """All token ids."""
        return int(self.tokens.size)

    def document_start(self, number: int) -> int:
        """The end of the tokens for number 0, the number of documents that are known.

        Raises:
            DataError: For any other number.
        """
        if number != 0:
            raise DataError(
                f"The flat token file {self.path} does not say where its documents begin; use a "
                "pair of .bin and .idx for that."
            )
        return self.num_tokens
