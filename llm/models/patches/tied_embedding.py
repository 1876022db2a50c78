"""A tied embedding that accumulates the gradients of head and lookup in one tensor.

Autograd allocates a gradient of the vocabulary's size for the head and another one, almost all
zeros, for the lookup, and adds them. Here the lookup adds its few rows to the gradient of the head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class TiedEmbedding(nn.Embedding):
    """An embedding that adds its gradient to the head's gradient, which the loss stores here.

    Attributes:
        lookups: Number of lookups with a gradient since `start_forward`.
        head_gradient: [rows, width], the gradient of the head until the lookup takes it.
    """

    lookups: int
    head_gradient: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., width] for ids of shape [...]."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input)
        self.lookups += 1
        embedded: Tensor = _Lookup.apply(self.weight, input, self)  # type: ignore[no-untyped-call]
        return embedded

    def start_forward(self) -> None:
        """Reset the number of lookups before a forward pass.

        Raises:
            RuntimeError: The head's gradient of an earlier pass has not reached the embedding.
        """
        if self.head_gradient is not None:
            raise RuntimeError("The gradient of the output head never reached the embedding.")
        self.lookups = 0


class _Lookup(torch.autograd.Function):
    """A lookup with a backward pass that adds its rows to the gradient of the head."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, embedding: TiedEmbedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.embedding, ctx.shape, ctx.dtype = embedding, weight.shape, weight.dtype
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (ids,), (gradient,) = ctx.saved_tensors, grad_outputs
        embedding = ctx.embedding
        weight_gradient, embedding.head_gradient = embedding.head_gradient, None
        if weight_gradient is None:
            weight_gradient = torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device)
        row_gradients = gradient.flatten(0, -2).to(weight_gradient.dtype)
        ids = ids.flatten()
        # On a GPU it adds the rows of a frequent token in parallel, in any order (unless you
        # request deterministic kernels); index_put_ adds them serially.
        return weight_gradient.index_add_(0, ids, row_gradients), None, None


def tie_gradients(model: PreTrainedModel) -> None:
    """Accumulate the gradients of head and lookup in one tensor, if the head is the embedding.

    The embedding's class changes in place: parameters, names and hooks stay. An embedding that does
    more than a lookup is not changed.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain_lookup = type(embedding) is nn.Embedding and embedding.max_norm is None
    if is_plain_lookup and type(head) is nn.Linear and head.weight is embedding.weight:
        embedding.__class__ = TiedEmbedding
        embedding.lookups, embedding.head_gradient = 0, None
