"""The measured models and batches, and the inputs that programs need to train them.

Speed does not depend on the text, so the inputs are random words of an artificial vocabulary: a
tokenizer with one token for each word for programs that read text, and the same ids as a flat file.
"""

import array
import json
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT-2 and its batch.

    Attributes:
        name: Its name in tables.
        layers: Number of blocks.
        width: Width of the hidden states.
        heads: Attention heads.
        block_size: Tokens of a sample.
        batch_size: Samples of a step.
        vocab_size: Size of the vocabulary.
        steps: Optimizer steps of a run.
    """

    name: str
    layers: int
    width: int
    heads: int
    block_size: int
    batch_size: int
    vocab_size: int
    steps: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.batch_size * self.block_size

    @property
    def flops_per_token(self) -> float:
        """Return the FLOPs of a token: 6 a weight of a matrix product, and attention in full."""
        weights = 12 * self.layers * self.width**2 + self.vocab_size * self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * self.block_size

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.layers} layers, width {self.width}, context {self.block_size}, "
            f"batch {self.batch_size}, vocabulary {self.vocab_size:,}"
        )


SHAPES = {
    "A": Shape(
        name="A", layers=4, width=128, heads=4,
        block_size=64, batch_size=12, vocab_size=65, steps=250,
    ),
    "B": Shape(
        name="B", layers=6, width=384, heads=6,
        block_size=256, batch_size=4, vocab_size=50_257, steps=25,
    ),
    "C": Shape(
        name="C", layers=12, width=768, heads=12,
        block_size=1024, batch_size=1, vocab_size=50_257, steps=8,
    ),
    "toy": Shape(
        name="toy", layers=2, width=32, heads=2,
        block_size=16, batch_size=2, vocab_size=65, steps=10,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The files of a shape.

    Attributes:
        model: Folder with a configuration, a tokenizer and no weights.
        text: Random words, a few hundred a line.
        validation: A short text for programs that need one.
        tokens: The same as a nanoGPT data folder.
    """

    model: Path
    text: Path
    validation: Path
    tokens: Path


def make_inputs(shape: Shape, folder: Path) -> Inputs:
    """Write a configuration, a tokenizer, and text for all steps."""
    model = folder / "gpt2"
    write_gpt2(
        model,
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        positions=shape.block_size,
        vocab_size=shape.vocab_size,
    )
    write_tokenizer(model, shape.vocab_size)
    draw = random.Random(0)
    ids = [draw.randrange(1, shape.vocab_size) for _ in range((shape.steps + 20) * shape.tokens)]
    lines = [" ".join(f"w{i}" for i in ids[at : at + 250]) for at in range(0, len(ids), 250)]
    text = folder / "train.txt"
    text.write_text("\n".join(lines) + "\n")
    validation = folder / "validation.txt"
    few = -(-2 * shape.tokens // 250)
    validation.write_text("\n".join(lines[:few]) + "\n")
    tokens = folder / "tokens"
    tokens.mkdir()
    for name in ("train.bin", "val.bin"):
        (tokens / name).write_bytes(array.array("H", ids).tobytes())
    return Inputs(model=model, text=text, validation=validation, tokens=tokens)


def write_gpt2(
    folder: Path, *, layers: int, width: int, heads: int, positions: int, vocab_size: int
) -> None:
    """Make a folder with the configuration of a GPT-2 without dropout."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one token for each word of an artificial vocabulary."""
    vocab = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, vocab_size)}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": "<|endoftext|>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<|endoftext|>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
