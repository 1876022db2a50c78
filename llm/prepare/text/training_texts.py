"""Texts for training a tokenizer: drawn, cut into lines, counted and sampled."""

import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

from llm.errors import DataError
from llm.prepare.text.sources import Source

_LONGEST_LINE = 1000
"""Letters of at most 4 bytes each; SentencePiece ignores lines of more than 4192 bytes."""
_NUM_SAMPLES, _SAMPLE_LETTERS = 200, 5000
_LOG_SECONDS = 30.0

logger = logging.getLogger("llm.data")


@dataclass
class TrainingTexts:
    """Training texts, counted and sampled while a library iterates over them.

    Attributes:
        sources: Where the texts come from.
        lines: Whether to yield lines, cut to SentencePiece's limit, instead of documents, cut in
            words of more than 1000 letters.
        max_sentences: Number of texts to draw evenly from all; None takes all.
        seed: Seed of the draw.
        num_documents: Documents read so far.
        num_bytes: Their bytes in UTF-8.
        sample: Pieces of some of them, drawn evenly.
        error: The exception while a text was read.
    """

    sources: Sequence[Source]
    _: KW_ONLY
    lines: bool
    max_sentences: int | None
    seed: int
    num_documents: int = 0
    num_bytes: int = 0
    sample: list[str] = field(default_factory=list)
    error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the texts; one pass only.

        Raises:
            DataError: A source cannot be read, or has no text at all.
        """
        try:
            texts: Iterable[str] = self._read_texts()
            texts = _short_lines(texts) if self.lines else texts
            if self.max_sentences is not None:
                texts = _draw_sample(texts, self.max_sentences, self.seed)
            yield from texts if self.lines else _cut_long_words(texts)
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
            raise

    def _read_texts(self) -> Iterator[str]:
        generator = random.Random(self.seed)
        number = 0
        logged = time.monotonic()
        for source in self.sources:
            number_before_source = number
            # Lines of one document stay together, unless some of them are drawn.
            joined = source.one_document and self.max_sentences is None
            for batch in source.batches():
                for text in filter(None, ["".join(batch)] if joined else batch):
                    self.num_documents += not source.one_document
                    self.num_bytes += len(text.encode())
                    for begin in range(0, len(text), _SAMPLE_LETTERS):
                        number += 1
                        piece = text[begin : begin + _SAMPLE_LETTERS]
                        _offer_text(
                            self.sample, piece, number, size=_NUM_SAMPLES, generator=generator
                        )
                    yield text
                if time.monotonic() - logged > _LOG_SECONDS:
                    logged = time.monotonic()
                    logger.info(f"read {self.num_bytes / 1e6:,.0f} MB of text")
            self.num_documents += source.one_document and number > number_before_source
        if not number:
            names = ", ".join(source.name for source in self.sources)
            raise DataError(f"No text was found in {names}; give an --input with text.")


def _draw_sample(texts: Iterable[str], size: int, seed: int) -> list[str]:
    """Return `size` texts, drawn evenly; all if there are fewer."""
    drawn: list[str] = []
    generator = random.Random(seed)
    for number, text in enumerate(texts, 1):
        _offer_text(drawn, text, number, size=size, generator=generator)
    return drawn


def _offer_text(
    drawn: list[str], text: str, number: int, *, size: int, generator: random.Random
) -> None:
    """Offer the `number`-th text to a list of `size` texts drawn evenly so far (reservoir)."""
    if len(drawn) < size:
        drawn.append(text)
    elif (place := generator.randrange(number)) < size:
        drawn[place] = text


def _short_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines of at most 1000 letters; longer ones are cut, at spaces if possible."""
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


def _cut_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts without words of 2000 letters or more, such as pictures in base64.

    The time of a trainer grows with the square of the length of a word: 3 MB take hours. A text is
    cut at the end of each block of 1000 letters that has no space, or nothing else.
    """
    for text in texts:
        begin = 0
        for start in range(0, len(text), _LONGEST_LINE):
            block = text[start : start + _LONGEST_LINE]
            if (" " not in block and "\n" not in block) or block.isspace():
                yield text[begin : start + _LONGEST_LINE]
                begin = start + _LONGEST_LINE
        if begin < len(text):
            yield text[begin:]
