"""Models that start divided, and how much memory that takes."""

from pathlib import Path

import torch
from transformers import LlamaConfig

CHANGES = {
    "no_bias": True,
    "pad_vocab_to_multiple_of": 129,  # 387 rows, which four ranks cannot divide evenly
    "tied_gradients": True,
    "fused_gelu": True,
}


def large_config() -> LlamaConfig:
    """Of 200 MB, beside which what else a process takes does not count."""
    return LlamaConfig(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
    )


def make_sgd(model):
    return torch.optim.SGD(model.parameters())


def memory(line: str) -> int:
    """Bytes of this process by the name that Linux gives them."""
    found = next(x for x in Path("/proc/self/status").read_text().splitlines() if line in x)
    return 1024 * int(found.split()[1])
