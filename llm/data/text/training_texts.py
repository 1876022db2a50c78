"""The texts that a tokenizer is trained on: drawn, cut to lines, counted and sampled."""

import logging
import random
import time
from collections.abc import Iterator, Sequence

from llm.data.text.sources import Source
from llm.errors import DataError

_LONGEST_LINE = 1000
"""Letters, of 4 bytes at most; SentencePiece passes over lines of more than 4192 bytes."""
_SAMPLED_TEXTS, _SAMPLED_LETTERS = 200, 5000
_SECONDS_BETWEEN_REPORTS = 30.0

log = logging.getLogger("llm.data")


class TrainingTexts:
    """The texts to train on, counted and sampled as they pass.

    Args:
        sources: Where they come from.
        lines: Yield the lines of documents, none longer than SentencePiece takes.
        max_sentences: How many to draw evenly from all; None takes all.
        seed: Decides the draw.

    Attributes:
        num_documents: Documents read so far.
        num_bytes: Their bytes in UTF-8.
        sample: Pieces of some of them, drawn evenly.
        failure: What was raised while a text was read.
    """

    def __init__(
        self, sources: Sequence[Source], *, lines: bool, max_sentences: int | None, seed: int
    ) -> None:
        self.num_documents = 0
        self.num_bytes = 0
        self.sample: list[str] = []
        self.failure: BaseException | None = None
        self._sources = sources
        self._lines = lines
        self._max_sentences = max_sentences
        self._seed = seed

    def __iter__(self) -> Iterator[str]:
        """Yields the texts; one pass only.

        Raises:
            DataError: A source cannot be read, or there is no text at all.
        """
        try:
            texts = _lines_of(self._read()) if self._lines else self._read()
            if self._max_sentences is None:
                yield from texts
                return
            drawn: list[str] = []
            generator = random.Random(self._seed)
            for number, text in enumerate(texts, 1):
                _keep(drawn, text, number, size=self._max_sentences, generator=generator)
            yield from drawn
        except (Exception, KeyboardInterrupt) as error:
            self.failure = error
            raise

    def _read(self) -> Iterator[str]:
        generator = random.Random(self._seed)
        number = 0
        last_report = time.monotonic()
        for source in self._sources:
            before = number
            # Lines of one document are not torn apart, unless some of them are drawn.
            joined = source.one_document and self._max_sentences is None
            for batch in source.batches():
                for text in filter(None, ["".join(batch)] if joined else batch):
                    self.num_documents += not source.one_document
                    self.num_bytes += len(text.encode())
                    for begin in range(0, len(text), _SAMPLED_LETTERS):
                        number += 1
                        piece = text[begin : begin + _SAMPLED_LETTERS]
                        _keep(self.sample, piece, number, size=_SAMPLED_TEXTS, generator=generator)
                    yield text
                if time.monotonic() - last_report > _SECONDS_BETWEEN_REPORTS:
                    last_report = time.monotonic()
                    log.info(f"read {self.num_bytes / 1e6:,.0f} MB of text")
            self.num_documents += source.one_document and number > before
        if not number:
            names = ", ".join(source.name for source in self._sources)
            raise DataError(f"There is no text in {names}; give --input that has some.")


def _keep(kept: list[str], text: str, number: int, *, size: int, generator: random.Random) -> None:
    """Keep the `number`-th text in a list of `size`, where each has had the same chance so far."""
    if len(kept) < size:
        kept.append(text)
    elif (place := generator.randrange(number)) < size:
        kept[place] = text


def _lines_of(texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            line = line.rstrip("\r")
            begin = 0
            while len(line) - begin > _LONGEST_LINE:
                end = line.rfind(" ", begin + 1, begin + _LONGEST_LINE)
                end = end if end > 0 else begin + _LONGEST_LINE
                yield line[begin:end]
                begin = end
            if begin < len(line):
                yield line[begin:]
