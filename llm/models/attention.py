"""Attention over windows of several documents: its masks, its kernels, and a check of the model.

transformers detects several documents in one row by jumps in the position ids. `run_model` passes
the documents instead: this needs no synchronization with the device, and keeps positions and
attention independent. On an accelerator, all layers share one mask: of blocks (FlexAttention), or
of all pairs of tokens.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

_LENGTH = 4  # per document in the check; every model has enough positions for two
_NEGLIGIBLE = 1e-3
"""Largest rounding error, relative to the effect of one document on the next without a mask."""

_Kind = Literal["blocks", "dense"]

_KINDS: dict[_Kind, str] = {
    "blocks": "a mask of blocks of tokens (FlexAttention)",
    "dense": "one mask of all pairs of tokens",
}

logger = logging.getLogger("llm.models")


class _Answer:
    """The documents of the current forward pass."""

    documents: Tensor | None = None


_answer = _Answer()


def disable_packing_detection() -> None:
    """Let transformers take the documents of a window from `run_model`.

    By default, without an attention mask, it searches for jumps in the position ids and reads the
    result from the device. This costs a synchronization per micro-batch and, under torch.compile, a
    mask instead of the causal kernel.
    """
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: _answer.documents


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
        documents: [batch, length], int64: number of each token's document; tokens do not attend to
            other documents. None: every token attends to all earlier ones.
        **kwargs: Further arguments of the forward pass.
    """
    if positions is not None:
        kwargs["position_ids"] = positions
    config = getattr(model, "config", None)
    if config is not None and getattr(config.get_text_config(), "output_router_logits", False):
        kwargs["output_router_logits"] = False  # the model would add a loss of each micro-batch
    _answer.documents = documents  # without documents, SDPA uses its causal kernel
    try:
        return model(input_ids=input_ids, use_cache=False, **kwargs)
    finally:
        _answer.documents = None


def documents_of_forward() -> Tensor | None:
    """Return the documents that `run_model` received for the current forward pass."""
    return _answer.documents


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


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
    name = f"{model.config.model_type} with the attention kernel {kernel}"
    if "flash" in kernel:
        raise ConfigError(
            "--reset_position_ids and --reset_attention_mask do not work with "
            f"--attention_implementation {kernel}; choose sdpa or eager."
        )
    with evaluating(model):
        logits = _logits_function(model)
        if attention and not _keeps_attention_apart(logits):
            raise ConfigError(
                f"--reset_attention_mask cannot keep documents apart in {name}: a document would "
                "see the text of the previous one; leave it out, or choose another architecture."
            )
        if positions and not _uses_positions(logits, together=attention):
            raise ConfigError(
                f"--reset_position_ids has no effect on {name}, which ignores position ids; leave "
                "it out."
            )


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether attention never reaches another document of a window.

    Args:
        model: A causal language model with weights; its mode is restored.
    """
    with evaluating(model):
        return _keeps_attention_apart(_logits_function(model))


_Logits = Callable[[list[str], bool, bool], Tensor]


def _logits_function(model: PreTrainedModel) -> _Logits:
    """Return a function that computes the last document's logits.

    Its arguments: names of the documents, and whether positions and attention keep them apart.
    """
    tokens = dict(zip("ABC", random_tokens(model, 3, 1, _LENGTH), strict=True))

    def logits(names: list[str], positions: bool, attention: bool) -> Tensor:
        input_ids = torch.cat([tokens[name] for name in names], dim=1)
        indices = torch.arange(input_ids.shape[1], device=model.device).unsqueeze(0)
        outputs = run_model(
            model,
            input_ids,
            indices % _LENGTH if positions else None,
            indices // _LENGTH if attention else None,
        )
        last_logits: Tensor = outputs.logits[:, -_LENGTH:].float()
        return last_logits

    return logits


def _keeps_attention_apart(logits: _Logits) -> bool:
    """Return whether a document's logits do not depend on the previous document."""
    apart = distance(logits(["A", "C"], False, True), logits(["B", "C"], False, True))
    mixed = distance(logits(["A", "C"], False, False), logits(["B", "C"], False, False))
    return apart <= _NEGLIGIBLE * mixed


def _uses_positions(logits: _Logits, *, together: bool) -> bool:
    """Return whether the model uses the position ids.

    If attention is kept apart as well (`together`), a document must have the same logits as alone.
    """
    try:
        changed = not torch.equal(logits(["A", "C"], True, False), logits(["A", "C"], False, False))
    except TypeError:  # forward does not take position_ids
        return False
    if not changed or not together:
        return changed
    alone = logits(["C"], False, False)
    apart = distance(logits(["A", "C"], True, True), alone)
    return apart <= _NEGLIGIBLE * distance(logits(["A", "C"], False, False), alone)


def distance(first: Tensor, second: Tensor) -> float:
    """Return the largest difference between the entries of two tensors."""
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
    for kind, description in _KINDS.items():
        if kind == "blocks" and not flex:
            continue
        kernel = f"document_attention_{kind}"
        AttentionMaskInterface.register(kernel, functools.partial(_make_mask, kind))
        AttentionInterface.register(kernel, _compute_attention)
        model.set_attn_implementation(kernel)
        try:
            _try_training(model)
            if keeps_documents_apart(model):
                logger.info(f"Documents are kept apart by {description}.")
                return
        except Exception as error:  # a model's code, or a compiler, may raise anything
            logger.info(f"Documents are not kept apart by {description}: {one_line(error)}.")
    model.set_attn_implementation("sdpa")


@torch.enable_grad()
def _try_training(model: PreTrainedModel) -> None:
    """Run a forward and a backward pass of a window of two documents, in the model's mode."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=model.device)
    logits = run_model(model, torch.zeros_like(documents), None, documents).logits
    parameters = find_blocks(model)[0].parameters()
    torch.autograd.grad(logits.sum(), next(p for p in parameters if p.requires_grad))


def _make_mask(
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
        blocks: BlockMask = _compile_once(create_block_mask)(mask_function, *lengths, device=device)
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
    return additive_mask(visible, dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that layers can share; each would make and keep one from a boolean mask.

    Args:
        visible: Whether a query sees a key.
        dtype: The dtype of the queries.
    """
    device = visible.device
    bias = torch.zeros(visible.shape, dtype=kernel_dtype(dtype, device), device=device)
    return bias.masked_fill_(~visible, -torch.inf)


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
    attended = _compile_once(flex_attention)(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2).contiguous(), None


def _compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function, or the function itself inside a compiled model."""
    return function if torch.compiler.is_compiling() else compile_for_fixed_shapes(function)


def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the attention's computations, inside or outside of autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype
