"""Training a tokenizer with one of two libraries: `tokenizers` and `sentencepiece`."""

import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llm.errors import ConfigError
from llm.sentencepiece_model import import_sentencepiece, model_proto

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256

log = logging.getLogger("llm.data")


def train_huggingface(
    texts: Iterable[str],
    *,
    model_type: str,
    vocab_size: int,
    split_digits: bool,
    normalization: str,
    num_threads: int,
) -> "Tokenizer":
    """Train on bytes in GPT-2's manner; `<|endoftext|>` is token 0.

    Args:
        texts: Documents.
        model_type: `bpe` or `unigram`.
        vocab_size: Tokens, with the bytes and `<|endoftext|>`; fewer if the texts give no more.
        split_digits: Whether every digit is a token of its own.
        normalization: `identity`, `nfc` or `nfkc`.
        num_threads: Threads to count words with, if the library was not used before.
    """
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": [END_OF_TEXT],
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "show_progress": False,
    }
    trainer: Any
    if model_type == "bpe":
        tokenizer = Tokenizer(models.BPE())
        # What stands in the text once is no token.
        trainer = trainers.BpeTrainer(min_frequency=2, **common)
    else:
        log.warning(
            "The tokenizers library trains a slightly different unigram model each time; "
            "--library sentencepiece trains the same one."
        )
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**common)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = by_bytes
    if split_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    if normalization != "identity":
        tokenizer.normalizer = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}[normalization]()
    tokenizer.decoder = decoders.ByteLevel()
    passed = _Passed(texts)
    try:
        tokenizer.train_from_iterator(iter(passed), trainer)
    except Exception:
        passed.raise_failure()
        raise
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        log.warning(f"The text fills only {size:,} of the {vocab_size:,} tokens of --vocab_size.")
    return tokenizer


def train_sentencepiece(
    lines: Iterable[str],
    *,
    model_type: str,
    vocab_size: int,
    byte_fallback: bool,
    split_digits: bool,
    normalization: str,
    character_coverage: float,
    special_ids: Mapping[str, int],
    num_threads: int,
) -> bytes:
    """Train a SentencePiece model.

    Args:
        lines: Lines of at most 4192 bytes.
        model_type: `bpe` or `unigram`.
        vocab_size: Tokens, with all special ones.
        byte_fallback: Whether bytes stand for letters outside of the vocabulary.
        split_digits: Whether every digit is a token of its own.
        normalization: SentencePiece's rule; all but `identity` join spaces, too.
        character_coverage: Share of the letters in the text that become tokens.
        special_ids: `pad_id`, `unk_id`, `bos_id` and `eos_id`; -1 for none.
        num_threads: Threads of the training; a unigram model's last digits depend on it.

    Returns:
        The model file.

    Raises:
        ConfigError: The package is missing, or the options do not fit the text.
    """
    sentencepiece = import_sentencepiece()
    if not byte_fallback:
        log.warning(
            "Letters outside of the vocabulary become <unk>, and so do line breaks where "
            "--normalization is identity; --byte_fallback keeps them."
        )
    model = io.BytesIO()
    passed = _Passed(lines)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(passed),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=byte_fallback,
            split_digits=split_digits,
            normalization_rule_name=normalization,
            remove_extra_whitespaces=normalization != "identity",
            character_coverage=character_coverage,
            num_threads=num_threads,
            minloglevel=2,
            **special_ids,
        )
    except Exception as error:
        passed.raise_failure()
        raise _explained(error, vocab_size) from error
    proto = model_proto(model.getvalue())
    # The only trace of the number of threads in a model of the type bpe.
    proto.trainer_spec.ClearField("num_threads")
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


class _Passed:
    """Texts on their way through a library, which hides what was wrong with them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self._failure: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._texts
        except BaseException as error:
            self._failure = error
            raise

    def raise_failure(self) -> None:
        """Raise what was raised while a text was read, if anything."""
        if self._failure is not None:
            raise self._failure


def _explained(error: Exception, vocab_size: int) -> ConfigError:
    """What SentencePiece says about options that do not fit the text."""
    message = str(error)
    if high := re.search(r"size too high \(\d+\).*<= (\d+)", message):
        return ConfigError(
            f"--vocab_size {vocab_size} is more than this text can fill: set it to {high[1]} or "
            "less, or give more text."
        )
    if low := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"--vocab_size {vocab_size} is too small: the letters of this text and the special "
            f"tokens are {low[1]}; set it above that, or lower --character_coverage."
        )
    reason = (message.partition("] ")[2] or message).strip().rstrip(".")
    return ConfigError(f"SentencePiece cannot train with these options: {reason}.")
