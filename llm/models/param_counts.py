"""How many parameters a model has, by kind."""

from torch import nn
from transformers import PreTrainedModel


def parameter_counts(model: PreTrainedModel) -> dict[str, int]:
    """Parameters by kind, tied ones once.

    Returns:
        "total" = "embedding" (tokens, positions, untied output head) + "other", and
        "total" = "trainable" + "frozen".
    """
    head = model.get_output_embeddings()
    owners = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    embedding = {parameter for module in owners for parameter in module.parameters()}
    total = sum(parameter.numel() for parameter in model.parameters())
    embedded = sum(parameter.numel() for parameter in embedding)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "total": total,
        "embedding": embedded,
        "other": total - embedded,
        "trainable": trainable,
        "frozen": total - trainable,
    }
