"""The largest attention logit of each layer, in a forward pass of a micro-batch."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llm.data.loader import MicroBatch
from llm.models.attention import documents_of_forward
from llm.parallel.base import AcceleratedStrategy

if TYPE_CHECKING:
    from llm.parallel.context import SequenceShard

_MAX_LOGITS = 1 << 26
"""Maximum logits that are computed at once; they take 256 MiB in float32."""

Observe = Callable[[nn.Module, Tensor, Tensor, float | None], None]
"""Takes an attention module, its queries [samples, heads, tokens, width], its keys, which may have
fewer heads, and the factor on their products; None for the default."""


@torch.no_grad()
def measure_attention_logits(
    strategy: AcceleratedStrategy,
    micro_batch: MicroBatch,
    *,
    layers: Mapping[nn.Module, int],
    num_layers: int,
) -> Tensor:
    """Return the largest attention logit of each layer on this rank, [layers], float32.

    A forward pass in evaluation mode, without compiled code, computes it exactly, for some queries
    at a time. A logit is the scaled product of a query and a key that it may attend to: the same
    token, or an earlier one, of the same document. Sliding windows, biases by position and caps are
    ignored.

    Args:
        strategy: The model; every rank must call this.
        micro_batch: This rank's micro-batch.
        layers: Layer of each attention module on this rank.
        num_layers: Number of layers of the whole model.

    Returns:
        Minus infinity for layers on other ranks, and layers without transformers' interface.
    """
    logits = torch.full((num_layers,), -math.inf, device=strategy.device)

    def record_largest_logit(
        module: nn.Module, query: Tensor, key: Tensor, scaling: float | None
    ) -> None:
        if module not in layers:
            return
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer_logit = logits[layers[module]]
        for products in _iterate_visible_products(query, key, strategy.sequence):
            torch.maximum(layer_logit, products.amax() * scale, out=layer_logit)

    with torch.compiler.set_stance("force_eager"), _observe_attention(record_largest_logit):
        strategy.evaluate(micro_batch)
    return logits


def _iterate_visible_products(
    query: Tensor, key: Tensor, sequence: "SequenceShard | None"
) -> Iterator[Tensor]:
    """Yield the products of some queries at a time with all keys, [samples, heads, queries, keys].

    Keys that a query may not attend to, later ones and those of other documents, have minus
    infinity.

    Args:
        query: Queries of this rank, [samples, heads, tokens, width].
        key: Keys of this rank.
        sequence: This rank's shard of each sample; None if it has whole samples.
    """
    documents = key_documents = documents_of_forward()
    if sequence is not None:  # this rank has two chunks of each sample
        key = sequence.gather(key.contiguous(), 2)
        key_documents = None if documents is None else sequence.gather(documents, 1)
    query_positions = key_positions = torch.arange(key.shape[2], device=key.device)
    if sequence is not None:
        query_positions = sequence.local_chunks(key_positions.unsqueeze(0)).squeeze(0)
    num_rows = max(1, _MAX_LOGITS // (query.shape[:2].numel() * key.shape[2]))
    for first_row in range(0, query.shape[2], num_rows):
        rows = slice(first_row, first_row + num_rows)
        is_visible = query_positions[rows].unsqueeze(1) >= key_positions
        if documents is not None and key_documents is not None:
            is_same = documents[:, rows].unsqueeze(2) == key_documents.unsqueeze(1)
            is_visible = is_visible & is_same.unsqueeze(1)
        yield _multiply_heads(query[:, :, rows], key).masked_fill(~is_visible, -math.inf)


def _multiply_heads(query: Tensor, key: Tensor) -> Tensor:
    """Return all products of queries and keys, [samples, heads, queries, keys], float32."""
    with torch.autocast(query.device.type, enabled=False):
        groups: Tensor = query.float().unflatten(1, (key.shape[1], -1))
        products: Tensor = groups @ key.float().mT.unsqueeze(2)
    return products.flatten(1, 2)


@contextlib.contextmanager
def _observe_attention(observe: Observe) -> Iterator[None]:
    """Show the queries and keys of each attention module to a function, inside the context."""
    get_interface = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_observed_interface(*names: Any, **options: Any) -> Callable[..., Any]:
        attention = get_interface(*names, **options)

        def attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            observe(module, query, key, kwargs.get("scaling"))
            return attention(module, query, key, *args, **kwargs)

        return attend

    # An attribute of this object hides the method, and can be removed again.
    vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] = get_observed_interface
    try:
        yield
    finally:
        del vars(ALL_ATTENTION_FUNCTIONS)["get_interface"]
