"""Attention within documents on accelerators, without a dense mask per layer.

transformers passes PyTorch's attention a boolean mask of all pairs of tokens. On a GPU each layer
turns it into an additive mask and keeps this for the backward pass. FlexAttention (Dong et al.
2024, arXiv:2412.05496) takes a mask of token blocks instead and skips the blocks of other
documents. If it does not work, all layers share one additive mask.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llm.errors import one_line
from llm.models.compilation import compile_for_fixed_shapes
from llm.models.masking import documents_of_forward, keeps_documents_apart, run_model
from llm.models.sizes import find_blocks

_Kind = Literal["blocks", "dense"]

_KINDS: dict[_Kind, str] = {
    "blocks": "a mask of blocks of tokens (FlexAttention)",
    "dense": "one mask of all pairs of tokens",
}

logger = logging.getLogger("llm.models")


def use_document_attention(model: PreTrainedModel, *, flex: bool) -> None:
    """Let the layers of a model share one mask that keeps documents apart.

    If a model cannot be trained this way, its attention does not change.

    Args:
        model: A causal language model with weights, on an accelerator; its weights, its mode, and
            its forward without documents do not change.
        flex: Whether to try FlexAttention first.
    """
    if model.config.get_text_config()._attn_implementation != "sdpa":
        return
    for kind, words in _KINDS.items():
        if kind == "blocks" and not flex:
            continue
        kernel = f"document_attention_{kind}"
        AttentionMaskInterface.register(kernel, functools.partial(_mask, kind))
        AttentionInterface.register(kernel, _attend)
        model.set_attn_implementation(kernel)
        try:
            _try_training(model)
            if keeps_documents_apart(model):
                logger.info(f"Documents are kept apart by {words}.")
                return
        except Exception as error:  # a model's code, or a compiler, may raise anything
            logger.info(f"Documents are not kept apart by {words}: {one_line(error)}.")
    model.set_attn_implementation("sdpa")


@torch.enable_grad()
def _try_training(model: PreTrainedModel) -> None:
    """Run a forward and a backward pass of a window of two documents, in the model's mode."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=model.device)
    logits = run_model(model, torch.zeros_like(documents), None, documents).logits
    parameters = find_blocks(model)[0].parameters()
    torch.autograd.grad(logits.sum(), next(p for p in parameters if p.requires_grad))


def _mask(
    kind: _Kind,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    **kwargs: Any,
) -> BlockMask | Tensor | None:
    """Return the mask of a forward pass; transformers requests it once and passes it to all layers.

    It takes the arguments of transformers' `sdpa_mask`.
    """
    if documents_of_forward() is not None and kind == "blocks":
        lengths = batch_size, None, q_length, kv_length
        blocks: BlockMask = _compiled(create_block_mask)(mask_function, *lengths, device=device)
        return blocks
    visible: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        device=device,
        **kwargs,
    )
    if documents_of_forward() is None or visible is None:
        return visible
    bias = torch.zeros(visible.shape, dtype=kernel_dtype(dtype, device), device=device)
    return bias.masked_fill_(~visible, -torch.inf)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, [batch, heads, tokens, width] to [batch, tokens, heads, width]."""
    if not isinstance(attention_mask, BlockMask):
        dense: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return dense
    if dropout > 0:
        raise ValueError("FlexAttention has no dropout.")
    # Norms may give queries and keys another dtype than values, but the kernel needs one dtype.
    dtype = kernel_dtype(query.dtype, query.device)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    heads = query.shape[1]
    grouped = heads & (heads - 1) == 0  # enable_gqa needs a power of two of heads
    if not grouped:
        key, value = (repeat_kv(tensor, heads // tensor.shape[1]) for tensor in (key, value))
    attended = _compiled(flex_attention)(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2).contiguous(), None


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function, or the function itself inside a compiled model."""
    return function if torch.compiler.is_compiling() else compile_for_fixed_shapes(function)


def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the attention's computations, inside or outside of autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype
