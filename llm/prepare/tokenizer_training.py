"""Train a tokenizer with one of two libraries: `tokenizers` and `sentencepiece`."""

import io
import logging
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llm.errors import ConfigError
from llm.tokenizers.sentencepiece_model import import_sentencepiece, parse_model_proto

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
_SENTENCEPIECE_DEFAULTS = {
    "byte_fallback": False,
    "split_digits": False,
    "character_coverage": 0.9995,
    "pad_id": -1,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
}
"""SentencePiece's defaults, passed by name so that the model file records them."""

logger = logging.getLogger("llm.data")


def train_huggingface(
    texts: Iterable[str],
    *,
    model_type: str,
    vocab_size: int,
    normalization: str,
    num_threads: int,
    split_digits: bool = False,
) -> "Tokenizer":
    """Train a byte-level tokenizer like GPT-2's; `<|endoftext|>` is token 0.

    Args:
        texts: Documents.
        model_type: `bpe` or `unigram`.
        vocab_size: Tokens, including the bytes and `<|endoftext|>`; fewer if the text is too small.
        normalization: `identity`, `nfc` or `nfkc`.
        num_threads: Threads that count words; no effect once the library has started its threads.
        split_digits: Whether every digit is a separate token.
    """
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = _make_untrained_tokenizer(
        model_type, normalization=normalization, split_digits=split_digits
    )
    trainer = _make_trainer(model_type, vocab_size)
    tokenizer.train_from_iterator(iter(texts), trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        logger.warning(
            f"The text fills only {size:,} of the {vocab_size:,} tokens of --vocab_size."
        )
    return tokenizer


def _make_untrained_tokenizer(
    model_type: str, *, normalization: str, split_digits: bool
) -> "Tokenizer":
    """Make a byte-level tokenizer without a vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE() if model_type == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    if normalization != "identity":
        tokenizer.normalizer = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}[normalization]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _make_trainer(model_type: str, vocab_size: int) -> Any:
    """Make the library's trainer of a byte-level vocabulary."""
    from tokenizers import pre_tokenizers, trainers

    trainer_options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": [END_OF_TEXT],
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "show_progress": False,
    }
    if model_type == "bpe":
        # A pair that occurs only once does not become a token.
        return trainers.BpeTrainer(min_frequency=2, **trainer_options)
    logger.warning(
        "The tokenizers library trains a slightly different unigram model each time; "
        "--library sentencepiece trains the same one."
    )
    return trainers.UnigramTrainer(**trainer_options)


def train_sentencepiece(
    lines: Iterable[str], *, vocab_size: int, normalization: str, **flags: Any
) -> bytes:
    """Train a SentencePiece model.

    Args:
        lines: Lines of at most 4192 bytes.
        vocab_size: Tokens, with all special ones.
        normalization: SentencePiece's rule; all but `identity` join spaces, too.
        flags: Other flags of SentencePiece's trainer.

    Returns:
        The model file.

    Raises:
        ConfigError: The package is missing, or the options do not fit the text.
    """
    sentencepiece = import_sentencepiece()
    if not flags.get("byte_fallback"):
        logger.warning(
            "Letters outside of the vocabulary become <unk>, and so do line breaks where "
            "--normalization is identity; --byte_fallback keeps them."
        )
    model_file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model_file,
            vocab_size=vocab_size,
            normalization_rule_name=normalization,
            remove_extra_whitespaces=normalization != "identity",
            minloglevel=2,
            **_SENTENCEPIECE_DEFAULTS | flags,
        )
    except Exception as error:
        raise _training_error(str(error), vocab_size) from error
    proto = parse_model_proto(model_file.getvalue())
    # Otherwise the file of the same bpe model would differ with the number of threads.
    proto.trainer_spec.ClearField("num_threads")
    model_bytes: bytes = proto.SerializeToString(deterministic=True)
    return model_bytes


def _training_error(message: str, vocab_size: int) -> ConfigError:
    """Return the error for a message of SentencePiece: the option, and what to do."""
    if too_high := re.search(r"size too high \(\d+\).*<= (\d+)", message):
        return ConfigError(
            f"--vocab_size {vocab_size} is more than this text can fill: set it to {too_high[1]} "
            "or less, or give more text."
        )
    if too_low := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"--vocab_size {vocab_size} is too small: the letters of this text and the special "
            f"tokens are {too_low[1]}; set it above that, or lower --character_coverage."
        )
    if invalid_id := re.search(r"insert_id\(trainer_spec_\.(\w+)\(", message):
        return ConfigError(
            f"--{invalid_id[1]} is the id of another special token, or beyond --vocab_size "
            f"{vocab_size}: give each its own id, or -1 for none."
        )
    reason = (message.partition("] ")[2] or message).strip().rstrip(".")
    return ConfigError(f"SentencePiece cannot train with these options: {reason}.")
