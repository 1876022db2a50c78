"""Batch, learning rate, weight decay and warm-up of a training from its parameters and tokens.

The rule is for AdamW, and for decays to 0 at the end of the training. It has three parts:

- Bergsma et al. 2025 (Power Lines, arXiv:2505.13738, figure 1) find that the best batch grows with
  the tokens D as D^0.383, whatever the size of the model, and that the best time scale of AdamW,
  B / (learning rate * weight decay * D), is 1.084 (D / N)^-0.527 of the training.
- Li et al. 2025 (Step Law, arXiv:2503.04715) find the best learning rate 1.79 N^-0.713 D^0.307 at
  a batch of 0.58 D^0.571 tokens, where N leaves out embeddings. A smaller batch has a lower rate by
  the square root (Malladi et al. 2022, arXiv:2205.10287), a larger batch the same.
- nanochat (scripts/base_train.py and dev/LOG.md of 2026-02-05, at commit 92d63d4) starts the same
  power of D from its own optimum, which is for Muon: 2^19 tokens for its model of 12 layers, which
  has 110M parameters and 12 times as many tokens.

Step Law is the rule for the rate because it needs no tuning, and no change of the model. muP needs
a rate that was tuned at its base width, and does not say how the rate depends on the tokens.
"""

import math

_BATCH_EXPONENT = 0.383
_ADAMW_BATCH_TOKENS = 0.0306 * 2048
"""Batch of Power Lines for one token: its batches are in sequences of 2,048 tokens."""
_MUON_BATCH_TOKENS, _MUON_TOKENS = 2**19, 12 * 110_100_480
"""nanochat's reference: the batch and the tokens of its 12 layers (matrices and output head)."""

_MAX_LEARNING_RATE = 0.01
"""For tiny models, Step Law continues to higher rates, which have not been tried here."""

_MAX_WARMUP_TOKENS = 375_000_000
"""Warm-up of GPT-3 (Brown et al. 2020, arXiv:2005.14165)."""


def optimal_batch_tokens(num_tokens: float, *, for_muon: bool = False) -> float:
    """Return the compute-optimal global batch size, in tokens.

    Args:
        num_tokens: Tokens of the training.
        for_muon: Whether Muon or NorMuon trains the matrices.
    """
    if for_muon:
        return _MUON_BATCH_TOKENS * float((num_tokens / _MUON_TOKENS) ** _BATCH_EXPONENT)
    return _ADAMW_BATCH_TOKENS * float(num_tokens**_BATCH_EXPONENT)


def round_batch_size(num_samples: float) -> int:
    """Return a number of samples that many ranks and micro-batches divide.

    It is the nearest of 4, 5, 6 or 7 times a power of two: 224, 256, 320, 384. It does not depend
    on the number of ranks, so another number of ranks continues the same training.
    """
    if num_samples < 8:
        return max(1, round(num_samples))
    unit = 1 << (math.floor(math.log2(num_samples)) - 2)
    return unit * round(num_samples / unit)


def optimal_learning_rate(*, num_parameters: int, num_tokens: float, batch_tokens: int) -> float:
    """Return AdamW's peak learning rate by Step Law, with three digits; 0.01 at most.

    Args:
        num_parameters: Parameters outside embeddings and output head.
        num_tokens: Tokens of the training.
        batch_tokens: Tokens of a step.
    """
    peak_rate = 1.79 * num_parameters**-0.713 * num_tokens**0.307
    best_batch_tokens = 0.58 * num_tokens**0.571
    peak_rate *= math.sqrt(min(1.0, batch_tokens / best_batch_tokens))
    return _round_to_three_digits(min(peak_rate, _MAX_LEARNING_RATE))


def optimal_weight_decay(
    *, num_parameters: int, num_tokens: float, batch_tokens: int, learning_rate: float
) -> float:
    """Return AdamW's weight decay by the time scale of Power Lines, with three digits.

    Args:
        num_parameters: All parameters.
        num_tokens: Tokens of the training.
        batch_tokens: Tokens of a step.
        learning_rate: Peak learning rate.
    """
    time_scale = 1.084 * (num_tokens / num_parameters) ** -0.527
    return _round_to_three_digits(batch_tokens / (learning_rate * num_tokens * time_scale))


def warmup_tokens(num_tokens: float) -> int:
    """Return the tokens of the warm-up: a tenth of the training, but no more than GPT-3's."""
    return round(min(num_tokens / 10, _MAX_WARMUP_TOKENS))


def _round_to_three_digits(number: float) -> float:
    """Return a number rounded to three significant digits."""
    return float(f"{number:.3g}")
