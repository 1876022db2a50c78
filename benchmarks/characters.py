"""The small GPT-Neo on characters of `benchmarks.mup` and `benchmarks.decentralized_loss`."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoConfig

from llm.models.build import build_model
from llm.models.loss import LanguageModelLoss
from llm.models.options import ModelOptions

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
_EVALUATION_BATCHES = 20


class Text:
    """A text as characters; its last tenth is for validation.

    Args:
        path: The file.
        batch_size: Samples of a step.
        block_size: Characters of a sample.
    """

    def __init__(self, path: Path, *, batch_size: int, block_size: int) -> None:
        text = path.read_text(encoding="utf-8")
        self.vocab = sorted(set(text))
        number = {character: i for i, character in enumerate(self.vocab)}
        ids = torch.tensor([number[character] for character in text])
        cut = int(0.9 * len(ids))
        self.parts = {"train": ids[:cut], "validation": ids[cut:]}
        self.shape = (batch_size, block_size)

    def batch(self, part: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random windows and the next characters, each [batch_size, block_size]."""
        ids, (batch_size, block_size) = self.parts[part], self.shape
        starts = torch.randint(len(ids) - block_size - 1, (batch_size, 1), generator=generator)
        windows = ids[starts + torch.arange(block_size + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def make_model(
    *,
    width: int,
    layers: int,
    block_size: int,
    vocab_size: int,
    seed: int,
) -> Any:
    """Build the GPT-Neo of the comparisons; the seed determines its initial weights."""
    config = GPTNeoConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=layers,
        num_heads=4,
        attention_types=[[["global"], layers]],
        max_position_embeddings=block_size,
        **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
    )
    return build_model(
        ModelOptions(),
        config,
        weights_from=None,
        seed=seed,
        device=torch.device("cpu"),
        vocab_size=vocab_size,
    )


@torch.no_grad()
def validation_loss(loss: LanguageModelLoss, text: Text) -> float:
    """Return the nats a character over the same windows each time."""
    generator = torch.Generator().manual_seed(0)
    total = sum(
        float(loss(*text.batch("validation", generator))[1]) for _ in range(_EVALUATION_BATCHES)
    )
    return total / (_EVALUATION_BATCHES * text.shape[0] * text.shape[1])
