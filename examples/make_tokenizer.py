"""Train `examples/tokenizer`, the quick start's tokenizer, on the quick start's text.

Run `python examples/make_tokenizer.py [FOLDER]` from any folder. The same text always gives the
same files, which a test checks.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EXAMPLES = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(text_file: Path, *, vocab_size: int = 2048) -> Tokenizer:
    """Train a byte-level BPE tokenizer, as GPT-2 has, on a UTF-8 text file.

    All 256 bytes are in the vocabulary, so any text can be encoded, and decoding returns it
    unchanged. The end-of-text token has id 0.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text_file)], trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, model_max_length: int = 128) -> None:
    """Save a tokenizer as a Hugging Face folder, which `AutoTokenizer` and the trainer load."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=model_max_length,
    )
    wrapped.save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES / "tokenizer"
    save_tokenizer(train_tokenizer(EXAMPLES / "data" / "shakespeare.txt"), target)
