"""Attention over windows of several documents: its masks, its kernels, and a check of the model.

transformers detects several documents in one row by jumps in the position ids. `run_model` passes
the documents instead: this needs no synchronization with the device, and keeps positions and
attention independent. On an accelerator, all layers share one mask: of blocks (FlexAttention), or
of all pairs of tokens.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llm.errors import ConfigError, one_line
from llm.models.compilation import compile_for_fixed_shapes
from llm.models.sizes import find_blocks
from llm.runtime.float32 import full_float32

_DOCUMENT_LENGTH = 4
"""Tokens of a document in the check. Every model has enough positions for two documents."""
_MAX_RELATIVE_ERROR = 1e-3
"""Largest rounding error, relative to the effect of one document on the next without a mask."""

_MaskKind = Literal["blocks", "dense"]

_MASK_DESCRIPTIONS: dict[_MaskKind, str] = {
    "blocks": "a mask of blocks of tokens (FlexAttention)",
    "dense": "one mask of all pairs of tokens",
}

logger = logging.getLogger("llm.models")


class _ForwardPass:
    """The documents of the current forward pass, as `run_model` received them."""

    documents: Tensor | None = None


_forward_pass = _ForwardPass()


def disable_packing_detection() -> None:
    """Let transformers take the documents of a window from `run_model`.

    By default, without an attention mask, it searches for jumps in the position ids and reads the
    result from the device. This costs a synchronization per micro-batch and, under torch.compile, a
    mask instead of the causal kernel.
    """
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: _forward_pass.documents


def run_model(
    model: torch.nn.Module,
    input_ids: Tensor,
    positions: Tensor | None,
    documents: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Run a model's forward pass on windows without padding, so without an attention mask.

    Args:
        model: A causal language model, or its trunk.
        input_ids: [batch, length], int64.
        positions: [batch, length], int64; None: the model's default.
        documents: [batch, length], int64: index of each token's document; tokens do not attend to
            other documents. None: every token attends to all earlier ones.
        **kwargs: Further arguments of the forward pass.

    Returns:
        The outputs of the model.
    """
    if positions is not None:
        kwargs["position_ids"] = positions
    config = getattr(model, "config", None)
    if config is not None and getattr(config.get_text_config(), "output_router_logits", False):
        kwargs["output_router_logits"] = False  # the model would add a loss of each micro-batch
    _forward_pass.documents = documents  # without documents, SDPA uses its causal kernel
    try:
        return model(input_ids=input_ids, use_cache=False, **kwargs)
    finally:
        _forward_pass.documents = None


def documents_of_forward() -> Tensor | None:
    """Return the documents that `run_model` received for the current forward pass."""
    return _forward_pass.documents


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def random_tokens(model: PreTrainedModel, *shape: int) -> Tensor:
    """Return token ids on the model's device, always the same."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(vocab_size, shape, generator=generator).to(model.device)


@torch.no_grad()
@full_float32()
def check_documents_apart(model: PreTrainedModel, *, positions: bool, attention: bool) -> None:
    """Refuse a model that cannot keep the documents of a window apart.

    The check compares logits of windows with two documents, in evaluation mode.

    Args:
        model: A causal language model with weights; its mode is restored.
        positions: Whether positions start again with each document.
        attention: Whether attention stays within each document.

    Raises:
        ConfigError: The model or its attention kernel ignores one of the two.
    """
    kernel = str(getattr(model.config.get_text_config(), "_attn_implementation", None))
    model_description = f"{model.config.model_type} with the attention kernel {kernel}"
    if "flash" in kernel:
        raise ConfigError(
            "--reset_position_ids and --reset_attention_mask do not work with "
            f"--attention_implementation {kernel}; choose sdpa or eager."
        )
    with evaluation_mode(model):
        if attention and not keeps_documents_apart(model):
            raise ConfigError(
                f"--reset_attention_mask cannot keep documents apart in {model_description}: a "
                "document would see the text of the previous one; leave it out, or choose another "
                "architecture."
            )
        if positions and not _uses_positions(model, with_attention=attention):
            raise ConfigError(
                f"--reset_position_ids has no effect on {model_description}, which ignores "
                "position ids; leave it out."
            )


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether attention never reaches another document of a window.

    It compares the logits of document C after document A with those after document B.

    Args:
        model: A causal language model with weights; its mode is restored.
    """
    document_logits = partial(_compute_document_logits, model)
    with evaluation_mode(model):
        effect_with_mask = max_difference(
            document_logits("AC", reset_attention=True), document_logits("BC", reset_attention=True)
        )
        effect_without_mask = max_difference(document_logits("AC"), document_logits("BC"))
    return effect_with_mask <= _MAX_RELATIVE_ERROR * effect_without_mask


def _compute_document_logits(
    model: PreTrainedModel,
    document_names: str,
    *,
    reset_positions: bool = False,
    reset_attention: bool = False,
) -> Tensor:
    """Return the logits of the last document of a window, [1, tokens, vocabulary].

    Args:
        model: The model.
        document_names: The documents of the window, such as "AC"; there are A, B and C.
        reset_positions: Whether positions start again with each document.
        reset_attention: Whether attention stays within each document.
    """
    documents = random_tokens(model, 3, 1, _DOCUMENT_LENGTH)
    input_ids = torch.cat([documents["ABC".index(name)] for name in document_names], dim=1)
    positions = torch.arange(input_ids.shape[1], device=model.device).unsqueeze(0)
    outputs = run_model(
        model,
        input_ids,
        positions=positions % _DOCUMENT_LENGTH if reset_positions else None,
        documents=positions // _DOCUMENT_LENGTH if reset_attention else None,
    )
    last_logits: Tensor = outputs.logits[:, -_DOCUMENT_LENGTH:].float()
    return last_logits


def _uses_positions(model: PreTrainedModel, *, with_attention: bool) -> bool:
    """Return whether the model uses the position ids.

    If attention stays within each document as well, document C must have the same logits after
    document A as alone.
    """
    document_logits = partial(_compute_document_logits, model)
    try:
        changes_logits = not torch.equal(
            document_logits("AC", reset_positions=True), document_logits("AC")
        )
    except TypeError:  # forward does not take position_ids
        return False
    if not changes_logits or not with_attention:
        return changes_logits
    single_logits = document_logits("C")
    reset_logits = document_logits("AC", reset_positions=True, reset_attention=True)
    isolation_error = max_difference(reset_logits, single_logits)
    return isolation_error <= _MAX_RELATIVE_ERROR * max_difference(
        document_logits("AC"), single_logits
    )


def max_difference(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference between the entries of two tensors."""
    return float((first - second).abs().max())


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
    for mask_kind, description in _MASK_DESCRIPTIONS.items():
        if mask_kind == "blocks" and not flex:
            continue
        model.set_attn_implementation(_register_kernel(mask_kind))
        try:
            _run_training_passes(model)
            if keeps_documents_apart(model):
                logger.info(f"Documents are kept apart by {description}.")
                return
        except Exception as error:  # a model's code, or a compiler, may raise anything
            logger.info(f"Documents are not kept apart by {description}: {one_line(error)}.")
    model.set_attn_implementation("sdpa")


@torch.enable_grad()
def _run_training_passes(model: PreTrainedModel) -> None:
    """Run a forward and a backward pass of a window of two documents, in the model's mode."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=model.device)
    input_ids = torch.zeros_like(documents)
    logits = run_model(model, input_ids, positions=None, documents=documents).logits
    parameters = find_blocks(model)[0].parameters()
    torch.autograd.grad(logits.sum(), next(p for p in parameters if p.requires_grad))


def _register_kernel(mask_kind: _MaskKind) -> str:
    """Register attention with a kind of mask in transformers, and return its name there."""
    kernel = f"document_attention_{mask_kind}"
    AttentionMaskInterface.register(kernel, partial(_make_mask, mask_kind))
    AttentionInterface.register(kernel, _compute_attention)
    return kernel


def _make_mask(
    mask_kind: _MaskKind,
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

    It takes the arguments of transformers' `sdpa_mask`. Without documents, it returns what
    `sdpa_mask` returns: None for the causal kernel.
    """
    if documents_of_forward() is not None and mask_kind == "blocks":
        block_mask: BlockMask = _compile_unless_compiling(create_block_mask)(
            mask_function, B=batch_size, H=None, Q_LEN=q_length, KV_LEN=kv_length, device=device
        )
        return block_mask
    visibility_mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        device=device,
        **kwargs,
    )
    if documents_of_forward() is None or visibility_mask is None:
        return visibility_mask
    return make_additive_mask(visibility_mask, dtype)


def make_additive_mask(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as a bias of the attention scores, which all layers can share.

    From a boolean mask, each layer would make such a mask and keep it for the backward pass.

    Args:
        is_visible: Boolean [batch, 1, queries, keys]: whether a query sees a key.
        dtype: The dtype of the queries.
    """
    device = is_visible.device
    bias = torch.zeros(is_visible.shape, dtype=kernel_dtype(dtype, device), device=device)
    return bias.masked_fill_(~is_visible, -torch.inf)


def _compute_attention(
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
        sdpa_output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return sdpa_output
    if dropout > 0:
        raise ValueError("FlexAttention has no dropout.")
    # Norms may give queries and keys another dtype than values, but the kernel needs one dtype.
    dtype = kernel_dtype(query.dtype, query.device)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    num_heads = query.shape[1]
    enable_gqa = num_heads & (num_heads - 1) == 0  # it needs a power of two of heads
    if not enable_gqa:
        key, value = (repeat_kv(tensor, num_heads // tensor.shape[1]) for tensor in (key, value))
    output = _compile_unless_compiling(flex_attention)(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=enable_gqa
    )
    return output.transpose(1, 2).contiguous(), None


def _compile_unless_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function, or the function itself inside a compiled model."""
    return function if torch.compiler.is_compiling() else compile_for_fixed_shapes(function)


def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the attention's computations, inside or outside of autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype
