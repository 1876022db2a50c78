"""Floating-point operations of a token, for tokens per second turned into utilisation."""

import torch
from transformers import PreTrainedModel


def flops_per_token(model: PreTrainedModel, *, block_size: int) -> float:
    """Operations that forward and backward do for one token.

    Six for each weight of a matrix product (PaLM, Chowdhery et al. 2022, appendix B): looked-up
    embeddings do not count, the output head does. Attention adds the two products
    with keys and values, counted in full, as if they were not causal. A mixture of experts
    counts only the experts that a token visits.

    Args:
        model: The model; a tied output head counts once.
        block_size: Tokens of a sample.
    """
    config = model.config.get_text_config()
    weights = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            continue
        share = _share_of_experts(module, config)
        own = module.parameters(recurse=False)
        weights += share * sum(parameter.numel() for parameter in own if parameter.ndim >= 2)
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    attention = 12.0 * int(config.num_hidden_layers) * heads * int(width) * block_size
    return 6.0 * weights + attention


def _share_of_experts(module: torch.nn.Module, config: object) -> float:
    """Share of a module's weights that one token meets: less than 1 for fused experts."""
    experts = getattr(module, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    is_stack = any(p.ndim == 3 for p in module.parameters(recurse=False))
    return float(chosen) / float(experts) if experts and chosen and is_stack else 1.0
