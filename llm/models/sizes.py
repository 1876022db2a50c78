"""Sizes of models: parameters, FLOPs per token, and the blocks that repeat."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

EXPERTS_PER_TOKEN_NAMES = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")
"""Names of the number of chosen experts: most configurations, AriaText, Gemma 4, DBRX."""


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the transformer blocks of a model, in order.

    The blocks are the list of modules with the most parameters, or the longer list if two are
    equal.

    Raises:
        ValueError: The model has no list of modules.
    """
    module_lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    layer_lists = [m for m in module_lists if next(m.parameters(), None) is not None]
    if not layer_lists:
        raise ValueError(f"{type(model).__name__} has no list of layers.")
    return max(layer_lists, key=lambda m: (sum(p.numel() for p in m.parameters()), len(m)))


def parameter_counts(model: PreTrainedModel) -> dict[str, int]:
    """Count parameters by kind; tied parameters count once.

    Returns:
        Counts by kind: "total", "embedding" (tokens, positions, untied output head), "other",
        "trainable" and "frozen". "embedding" and "other" add up to "total", as do "trainable" and
        "frozen".
    """
    head = model.get_output_embeddings()
    embedding_modules = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    embedding_parameters = {p for module in embedding_modules for p in module.parameters()}
    num_total = sum(parameter.numel() for parameter in model.parameters())
    num_embedding = sum(parameter.numel() for parameter in embedding_parameters)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "total": num_total,
        "embedding": num_embedding,
        "other": num_total - num_embedding,
        "trainable": num_trainable,
        "frozen": num_total - num_trainable,
    }


def active_parameters(model: PreTrainedModel) -> int:
    """Count the parameters that a token uses: all but those of the experts it does not choose.

    Tied parameters count once, as in `parameter_counts`.
    """
    num_chosen = experts_per_token(model.config.get_text_config())
    num_active = parameter_counts(model)["total"]
    for module in model.modules():
        num_experts, expert_stacks = _find_expert_stacks(module)
        if num_chosen and expert_stacks:
            num_expert_params = sum(p.numel() for p in expert_stacks)
            num_active -= num_expert_params * (num_experts - num_chosen) // num_experts
    return num_active


def _find_expert_stacks(module: nn.Module) -> tuple[int, list[nn.Parameter]]:
    """Return the number of experts in a module, and the weights that stack their matrices.

    A stack is [experts, rows, columns], or [experts * rows, columns] in DBRX. The router's matrix
    is not a stack.
    """
    matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
    num_experts = getattr(module, "num_experts", None)
    if num_experts:
        return int(num_experts), [p for p in matrices if p.ndim == 3]
    num_experts = getattr(module, "moe_num_experts", None)
    return (int(num_experts), matrices) if num_experts else (0, [])


def flops_per_token(model: PreTrainedModel, *, block_size: int) -> float:
    """Return the floating-point operations per token, forward and backward.

    Each weight in a matrix product counts six (PaLM, Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B): the output head counts, embedding lookups do not. Attention adds the products with
    keys and values, counted as if they were not causal. In a mixture of experts, only the experts
    used per token count.

    Args:
        model: The model; a tied output head counts once.
        block_size: Tokens of a sample.
    """
    config = model.config.get_text_config()
    num_chosen = experts_per_token(config)
    num_used_weights = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
        num_experts, expert_stacks = _find_expert_stacks(module)
        used_fraction = num_chosen / num_experts if num_chosen and expert_stacks else 1.0
        num_used_weights += used_fraction * sum(p.numel() for p in matrices)
    num_heads = int(getattr(config, "num_attention_heads", None) or 0)
    attention_width = num_heads * head_width(config) if num_heads else 0
    attention_flops = 12.0 * int(config.num_hidden_layers) * attention_width * block_size
    return 6.0 * num_used_weights + attention_flops


def experts_per_token(config: PreTrainedConfig) -> int | None:
    """Return the number of experts that a router chooses for each token; None without experts.

    Args:
        config: The text configuration of a model.
    """
    sources = config, getattr(config, "ffn_config", None)  # DBRX
    values = [getattr(source, name, None) for source in sources for name in EXPERTS_PER_TOKEN_NAMES]
    return next((int(value) for value in values if value is not None), None)


def head_width(config: PreTrainedConfig) -> int:
    """Return the width of an attention head, from the text configuration of a model."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)
