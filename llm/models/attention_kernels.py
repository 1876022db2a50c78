"""The kernel that computes scaled dot-product attention: its name for the log, and its faults."""

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel

from llm.models.sizes import head_width

_KERNEL_NAMES = {
    SDPBackend.MATH: "separate operations",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.OVERRIDEABLE: "a kernel of the device's library",  # oneDNN on an Intel GPU
}
_HOPPER = 9
"""Major compute capability of H100 and H200."""
_FIRST_PREFERRED_CUDNN = 91501
"""The first version of cuDNN that PyTorch prefers on Hopper; earlier ones have known faults."""
_MAX_TOKENS = 2048
"""Tokens that PyTorch is asked about at most, which take little memory."""
_DROPOUT_NAMES = ("attn_pdrop", "attention_dropout")
"""Names that configurations have for the dropout of attention."""

logger = logging.getLogger("llm.models")


def disable_faulty_cudnn_attention(device: torch.device, *, block_size: int) -> None:
    """Turn off an attention kernel that may return gradients that are not finite.

    On Hopper, cuDNN's backward pass with a mask returned NaN where the tokens of a sample, divided
    by 128, leave 64 (pytorch/pytorch#196678). It is turned off for all samples of such a length.
    """
    if block_size % 128 == 64 and _is_hopper(device):
        torch.backends.cuda.enable_cudnn_sdp(False)
        logger.info(
            f"Attention does not use cuDNN, which may return gradients that are not finite with "
            f"--block_size {block_size}; a multiple of 128 is faster."
        )


def attention_kernel(
    model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype, block_size: int
) -> str:
    """Return the attention kernel of a model for the log.

    Layers in which tokens see only some of the earlier ones need a mask, which may have another
    kernel.

    Args:
        model: A causal language model; only its configuration is used.
        device: The device of this process.
        dtype: The dtype of queries, keys, and values.
        block_size: Tokens of a sample.
    """
    config: Any = model.config.get_text_config()
    implementation = str(config._attn_implementation)
    if implementation != "sdpa":
        return implementation
    try:
        kernel = _choose_kernel(config, device=device, dtype=dtype, block_size=block_size)
    except Exception:  # heads may differ from layer to layer, or have other names
        return implementation
    advice = _format_upgrade_advice(kernel, device)
    return f"{implementation}, computed by {_KERNEL_NAMES[kernel]}{advice}"


@torch.enable_grad()
def _choose_kernel(
    config: Any, *, device: torch.device, dtype: torch.dtype, block_size: int
) -> SDPBackend:
    """Return the kernel that PyTorch chooses for a causal layer.

    PyTorch only looks at shapes, dtype and device, so queries and keys have no values.
    """
    num_heads = config.num_attention_heads
    num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads
    shape = min(block_size, _MAX_TOKENS), head_width(config)
    query: Tensor
    key: Tensor
    query, key = (
        torch.empty(1, heads, *shape, device=device, dtype=dtype, requires_grad=True)
        for heads in (num_heads, num_key_heads)
    )
    choice = torch._fused_sdp_choice(
        query,
        key,
        key,
        dropout_p=max(float(getattr(config, name, 0.0)) for name in _DROPOUT_NAMES),
        is_causal=True,
        enable_gqa=num_key_heads != num_heads,
    )
    return SDPBackend(choice)


def _format_upgrade_advice(kernel: SDPBackend, device: torch.device) -> str:
    """Return how to get a faster kernel, after a semicolon; empty if there is no advice."""
    version = torch.backends.cudnn.version() or 0
    is_slow = kernel == SDPBackend.FLASH_ATTENTION and _is_hopper(device)
    if not is_slow or version >= _FIRST_PREFERRED_CUDNN:
        return ""
    return (
        f"; PyTorch prefers cuDNN on this GPU from 9.15.1 on, and has {version}: a newer "
        "nvidia-cudnn package makes attention faster"
    )


def _is_hopper(device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU of the Hopper generation."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER
