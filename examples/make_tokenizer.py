"""Makes `examples/tokenizer`, the quick start's tokenizer, from the quick start's text.

Run it from anywhere: `python examples/make_tokenizer.py [FOLDER]`. The same text always gives
the same files, which a test checks.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EXAMPLES = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(text_file: Path, *, vocab_size: int = 2048) -> Tokenizer:
    """Trains a byte-level BPE, GPT-2's kind of tokenizer, on one UTF-8 text file.

    Every one of the 256 bytes is in the vocabulary, so any text can be encoded and decoding
    gives it back unchanged. The end-of-text token has id 0.
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
    """Saves a tokenizer as a Hugging Face folder, as `AutoTokenizer` and the trainer read it."""
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
