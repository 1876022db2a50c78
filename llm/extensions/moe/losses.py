"""The losses of routers, and the scores that they make of their logits."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

PROBABILITIES = "probabilities"
"""The score of routers that give probabilities in place of logits, as Gemma 4's does."""

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),  # DeepSeek-V4
    PROBABILITIES: lambda logits: logits.clamp(min=1e-9),
}
"""How routers make scores of their logits."""

_EQUAL_WEIGHTS = 1.001  # largest ratio of weights that count as equal
_SOFTMAX_WITH_BIAS = ("ernie4_5_moe",)


def compute_balancing_loss(probabilities: Tensor, shares: Tensor) -> Tensor:
    """Return the auxiliary loss of a layer for each sequence, summed over its tokens, [sequences].

    The loss of a token is E sum_e f_e p_e (Fedus et al. 2021, arXiv:2101.03961, equation 4): 1 for
    each token if the shares f are equal, and E/K if all tokens choose the same K experts.

    Args:
        probabilities: Normalized scores of routers, [sequences, tokens, experts].
        shares: Share of each expert in the load, [sequences or 1, experts]; no gradient.
    """
    return shares.shape[-1] * (shares * probabilities.sum(1)).sum(-1)


def compute_sequence_shares(chosen_experts: Tensor, num_experts: int) -> Tensor:
    """Return the share of each expert in the load of each sequence, [sequences, experts].

    Args:
        chosen_experts: The chosen experts, [sequences, choices of all tokens], int64.
        num_experts: Number of experts.
    """
    counts = torch.zeros(len(chosen_experts), num_experts, device=chosen_experts.device)
    counts.scatter_add_(1, chosen_experts, torch.ones_like(chosen_experts, dtype=counts.dtype))
    return counts / chosen_experts.shape[1]


def compute_router_z_loss(logits: Tensor) -> Tensor:
    """Return the z-loss of a layer for each sequence, summed over its tokens, [sequences].

    The source is Zoph et al. 2022, arXiv:2202.08906.

    Args:
        logits: [sequences, tokens, experts].
    """
    return logits.logsumexp(dim=-1).square().sum(-1)


@torch.no_grad()
def compute_score_errors(logits: Tensor, chosen_experts: Tensor, weights: Tensor) -> Tensor:
    """Return how far the weights of a router are from those that each of `SCORES` would give.

    Only ratios of weights are compared, because many routers scale or normalize them: between the
    experts of a token, or between tokens if a token has one expert.

    Args:
        logits: [tokens, experts].
        chosen_experts: The chosen experts, [tokens, K].
        weights: Their weights, [tokens, K].

    Returns:
        The sums of absolute errors, in the order of `SCORES`; zeros if all weights are equal, as
        normalized weights of one expert for each token are.
    """
    compared_dim = -1 if weights.shape[-1] > 1 else 0
    weights = weights.float()
    actual_shares = weights / weights.sum(compared_dim, keepdim=True)
    errors = []
    for compute_scores in SCORES.values():
        scores = compute_scores(logits).gather(-1, chosen_experts)
        expected_shares = scores / scores.sum(compared_dim, keepdim=True)
        errors.append((expected_shares - actual_shares).abs().sum())
    return torch.stack(errors) * (weights.amax() > _EQUAL_WEIGHTS * weights.amin())


def find_score(errors: Sequence[float]) -> str | None:
    """Return the name of a router's score function; None if no error is much smaller than others.

    All errors are equal if all logits are zero, as in the first step of some families, or all
    weights are equal.

    Args:
        errors: The result of `compute_score_errors`, perhaps summed over batches.
    """
    ranking = sorted(zip(errors, SCORES, strict=True))
    (smallest, name), (second_smallest, _) = ranking[:2]
    return name if smallest < second_smallest / 4 else None


def assume_score(config: PreTrainedConfig, *, has_bias: bool) -> str:
    """Return the score function of a router that its weights do not show.

    Args:
        config: The text configuration of the model: some name the function.
        has_bias: Whether a bias chooses experts, which is usual with sigmoid scores (DeepSeek-V3).
    """
    name = getattr(config, "scoring_func", None)
    if name in SCORES:
        return str(name)
    is_sigmoid = has_bias and config.model_type not in _SOFTMAX_WITH_BIAS
    return "sigmoid" if is_sigmoid else "softmax"
