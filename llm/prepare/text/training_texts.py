"""Texts for training a tokenizer: drawn, cut into lines, counted and sampled."""

import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

from llm.errors import DataError
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import Source

_MAX_CHARACTERS = 1000
"""Length of a line. SentencePiece ignores lines above 4192 bytes; a character has up to 4 bytes."""
_NUM_SAMPLES, _SAMPLE_CHARACTERS = 200, 5000
_LOG_SECONDS = 30.0

logger = logging.getLogger("llm.data")


@dataclass
class TrainingTexts:
    """Training texts, counted and sampled while a library iterates over them.

    Attributes:
        sources: Where the texts come from.
        lines: Whether to yield lines of at most 1000 characters, for SentencePiece; otherwise
            documents, which are cut within words of more than 1000 characters.
        max_sentences: Number of texts to draw, each with equal probability; None takes all.
        seed: Seed of the draw.
        num_documents: Documents read so far.
        num_bytes: Bytes of these documents in UTF-8.
        sample: Pieces of the documents, each drawn with equal probability.
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
            texts = _split_lines(texts) if self.lines else texts
            if self.max_sentences is not None:
                texts = _draw_texts(texts, self.max_sentences, self.seed)
            yield from texts if self.lines else _cut_long_words(texts)
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
            raise

    def _read_texts(self) -> Iterator[str]:
        """Yield the texts of all sources; count and sample them, and log the progress."""
        generator = random.Random(self.seed)
        num_pieces = 0
        last_log = time.monotonic()
        for source in self.sources:
            num_earlier_pieces = num_pieces
            for batch in self._read_batches(source):
                for text in filter(None, batch):
                    self.num_documents += not source.one_document
                    self.num_bytes += len(text.encode())
                    num_pieces = self._sample_pieces(text, num_pieces, generator)
                    yield text
                if time.monotonic() - last_log > _LOG_SECONDS:
                    last_log = time.monotonic()
                    logger.info(f"read {self.num_bytes / 1e6:,.0f} MB of text")
            self.num_documents += source.one_document and num_pieces > num_earlier_pieces
        if not num_pieces:
            names = ", ".join(source.name for source in self.sources)
            raise DataError(f"No text was found in {names}; give an --input with text.")

    def _read_batches(self, source: Source) -> Iterator[list[str]]:
        """Yield the texts of a source; the lines of a batch of one document are joined.

        They stay separate if some of them are drawn.
        """
        # The programs that train tokenizers have no --on_error.
        for batch in source.batches(BadRecordPolicy(remedy="")):
            if source.one_document and self.max_sentences is None:
                yield ["".join(batch)]
            else:
                yield batch

    def _sample_pieces(self, text: str, num_pieces: int, generator: random.Random) -> int:
        """Add the pieces of a text to the sample; return the number of all pieces so far."""
        for start in range(0, len(text), _SAMPLE_CHARACTERS):
            num_pieces += 1
            piece = text[start : start + _SAMPLE_CHARACTERS]
            _update_reservoir(
                self.sample, piece, num_pieces, size=_NUM_SAMPLES, generator=generator
            )
        return num_pieces


def _draw_texts(texts: Iterable[str], size: int, seed: int) -> list[str]:
    """Return `size` texts, each drawn with equal probability; all texts if there are fewer."""
    reservoir: list[str] = []
    generator = random.Random(seed)
    for num_texts, text in enumerate(texts, 1):
        _update_reservoir(reservoir, text, num_texts, size=size, generator=generator)
    return reservoir


def _update_reservoir(
    reservoir: list[str], text: str, num_texts: int, *, size: int, generator: random.Random
) -> None:
    """Add a text to a sample of equal probabilities (algorithm R of Vitter, 1985).

    Args:
        reservoir: The sample of the texts so far, changed in place.
        text: The next text.
        num_texts: Number of texts so far, with this one.
        size: Maximum number of texts in the sample.
        generator: Draws the position.
    """
    if len(reservoir) < size:
        reservoir.append(text)
    elif (index := generator.randrange(num_texts)) < size:
        reservoir[index] = text


def _split_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines of at most 1000 characters; longer lines are cut, at spaces if possible."""
    for text in texts:
        for line in text.split("\n"):
            line = line.rstrip("\r")
            start = 0
            while len(line) - start > _MAX_CHARACTERS:
                end = line.rfind(" ", start + 1, start + _MAX_CHARACTERS)
                end = end if end > 0 else start + _MAX_CHARACTERS
                yield line[start:end]
                start = end
            if start < len(line):
                yield line[start:]


def _cut_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts with words of less than 2000 characters; images in base64 are longer words.

    The time of a trainer grows with the square of the length of a word: 3 MB take hours. A text is
    cut after each block of 1000 characters that contains no space or line break, or only blanks.
    """
    for text in texts:
        piece_start = 0
        for block_start in range(0, len(text), _MAX_CHARACTERS):
            block_end = block_start + _MAX_CHARACTERS
            block = text[block_start:block_end]
            if (" " not in block and "\n" not in block) or block.isspace():
                yield text[piece_start:block_end]
                piece_start = block_end
        if piece_start < len(text):
            yield text[piece_start:]
