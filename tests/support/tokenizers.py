"""A small tokenizer made from scratch, so that tests need no download."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = (
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on. "
    "What the fox thinks of that, the brown dog will not say. "
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with about 300 tokens, of which `<|endoftext|>` (id 0) ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT * 10], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def tokenizer_with_two_templates() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with two chat templates, of which the second is a file in a folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    return tokenizer


def save_tiny_tokenizer(folder: Path) -> Path:
    """Writes the tokenizer as a Hugging Face folder, and returns the folder."""
    tiny_tokenizer().save_pretrained(folder)
    return folder
