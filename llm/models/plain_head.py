"""Whether a model's logits are its output head applied to its hidden states, and nothing else."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from llm.models.blocks import find_blocks
from llm.models.masking import run_model

logger = logging.getLogger("llm.models")


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are its output head applied to its last hidden states.

    Some families scale or cap their logits; the configuration does not say so in one way, so
    the model is asked: two short sequences, in evaluation mode, compared bit for bit. Without
    weights, by what it computes: nothing beyond its trunk and its head.

    Args:
        model: A causal language model, on the meta device or with weights; its mode is restored.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or model.base_model is model:
        return False
    if head.weight.is_meta:
        return _computes_head_last(model)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.randint(vocab_size, (2, 8), generator=generator).to(model.device)
    training = model.training
    model.eval()
    try:
        logits = run_model(model, input_ids, None, None).logits
        hidden = hidden_states(model, input_ids, None, None)
    finally:
        model.train(training)
    return torch.equal(head(hidden).float(), logits.float())


def _computes_head_last(model: PreTrainedModel) -> bool:
    """Whether a model on the meta device does to its hidden states what its head does, no more.

    Its blocks, which make no difference to that, are left out: some cannot run without weights.
    """
    input_ids = torch.zeros((2, 8), dtype=torch.long, device=model.device)
    blocks = find_blocks(model)
    taken_out, blocks._modules = blocks._modules, {}
    try:
        with _Operations() as whole:
            run_model(model, input_ids, None, None)
        with _Operations() as parts:
            model.get_output_embeddings()(hidden_states(model, input_ids, None, None))
    except Exception:  # anybody's code, which may do anything without blocks
        logger.info(f"The loss of {type(model).__name__} is computed from the full logits.")
        return False
    finally:
        blocks._modules = taken_out
    same: bool = whole.names == parts.names
    return same


class _Operations(TorchDispatchMode):
    """Lists what is computed inside, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None
) -> Tensor:
    """[batch, length, width]: what the output head is applied to; arguments as for `run_model`."""
    hidden: Tensor = run_model(model.base_model, input_ids, positions, documents)[0]
    return hidden
