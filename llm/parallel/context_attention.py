"""Attention of a part of a sequence's tokens to all tokens that lie before them.

transformers' models call an attention function and a mask function by the name of a kernel. Ours
gathers the keys and values of the parts that other ranks hold. That is right for a model in which
tokens meet in that function only, which `check_divisible` asks the model itself.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import causal_mask_function

from llm.errors import ConfigError
from llm.models.masking import documents_of_forward, run_model

KERNEL = "context_parallel"
"""Under this name the functions are registered."""

_MASKED_DEVICES = ("cpu",)
"""Without a kernel for queries that are the last of the keys: they are given one mask, shared by
all layers, where each layer would keep one of its own."""

_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
"""What some models ask of their attention besides, and PyTorch's kernels do not have."""

_TOKENS = 2
"""Of each chunk, for the check."""

_NEGLIGIBLE = 1e-4
"""Rounding, as a share of what the parts' not seeing one another would do."""


class SequencePart(Protocol):
    """The chunks of each sequence that a rank holds.

    Attributes:
        num_chunks: Into how many chunks of one length a sequence is cut.
        chunks: The numbers of those that this rank holds, in the order of its tokens.
    """

    num_chunks: int
    chunks: tuple[int, int]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole sequence out of the ranks' parts, with the tokens along `dim`."""


def divide_attention(model: PreTrainedModel, part: SequencePart) -> None:
    """From now on the model is given a part of each sequence, with the tokens' positions.

    Args:
        model: A causal language model that `check_divisible` lets pass. All ranks that hold parts
            of a sequence must call its forward together.
        part: What this rank holds.
    """

    def mask(
        *,
        q_length: int,
        mask_function: Callable[..., Tensor],
        allow_is_causal_skip: bool = True,
        device: torch.device,
        dtype: torch.dtype,
        **unused: Any,
    ) -> Tensor | None:
        documents = documents_of_forward()
        plain = mask_function is causal_mask_function and allow_is_causal_skip
        if plain and documents is None and device.type not in _MASKED_DEVICES:
            return None
        places = torch.arange(q_length // 2 * part.num_chunks, device=device)
        chunks = places.chunk(part.num_chunks)
        own = torch.cat([chunks[number] for number in part.chunks])
        seen = _visible(mask_function, own.unsqueeze(0), places)
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == part.gather(documents, 1)[:, None, None])
        # To be added: of a mask of booleans, each layer would keep a copy in this form.
        bias = torch.zeros(seen.shape, dtype=_kernel_dtype(dtype, device), device=device)
        return bias.masked_fill_(~seen, -torch.inf)

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # Autocast would do it in the kernel, after twice as many bytes were sent.
        dtype = _kernel_dtype(query.dtype, query.device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        both = part.gather(torch.cat([key, value], dim=-1), 2)
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        key, value = _for_all_heads(query, key), _for_all_heads(query, value)
        length = query.shape[2] // 2
        attended = []
        for number, chunk in enumerate(part.chunks):
            own = slice(number * length, (number + 1) * length)
            # What lies behind a chunk is hidden from all of it.
            end = (chunk + 1) * length
            if attention_mask is None:
                bias: Tensor = causal_lower_right(length, end)
            else:
                bias = attention_mask[..., own, :end]
            own_query, own_key = query[..., own, :], key[..., :end, :]
            attended.append(_attend(own_query, own_key, value[..., :end, :], bias, **kwargs))
        return torch.cat(attended, dim=1), None

    # transformers would index this rank's part of the documents by places in the whole sequence.
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    _use(model, attend, mask)


@torch.no_grad()
def check_divisible(model: PreTrainedModel, *, ranks: int, block_size: int) -> None:
    """Refuse a model whose tokens meet elsewhere than in attention, or depend on a part's length.

    The model is asked by what it does, in evaluation mode, with the last tokens of each chunk:
    the parts that so many ranks would hold of one sequence are the rows of a batch here.

    Args:
        model: A causal language model with weights; its mode is restored.
        ranks: Among how many ranks a sequence shall be divided.
        block_size: Tokens of a sample, a multiple of twice the ranks.

    Raises:
        ConfigError: Its logits would not be those of the whole sequence.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ConfigError(
            "--context_parallel_size would balance a mixture's experts over parts of samples: turn "
            "output_router_logits off, or leave the samples whole."
        )
    ends = torch.arange(block_size, device=model.device).view(2 * ranks, -1)[:, -_TOKENS:]
    positions, places = ends.flatten(), torch.arange(ends.numel(), device=model.device)
    front, back = places.view(2, ranks, -1).unbind()
    parts = torch.cat([front, back.flip(0)], dim=1)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.randint(vocab_size, places.shape, generator=generator).to(model.device)

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = run_model(model, input_ids[tokens], positions[tokens], None).logits
        return found.float()

    training, kernel = model.training, model.config._attn_implementation
    model.eval()
    try:
        # First, since some rotary embeddings remember the last position that there was.
        alone = logits(parts[-1:])
        whole = logits(places.unsqueeze(0))[0, parts]
        apart = logits(parts)
        _pretend(model, parts)
        divided = logits(parts)
        error = max(_distance(divided, whole), _distance(alone, apart[-1:]))
        divisible = not model._is_stateful and error <= _NEGLIGIBLE * _distance(apart, whole)
    except (TypeError, ValueError, IndexError, RuntimeError):
        divisible = False  # it takes no positions, or its attention is something else
    finally:
        model.set_attn_implementation(kernel)
        model.train(training)
    if not divisible:
        raise ConfigError(
            f"--context_parallel_size {ranks} cannot divide samples of {block_size} tokens of "
            f"{model.config.model_type}: its tokens meet elsewhere than in ordinary attention, or "
            "take no positions from outside; leave it out, or choose another architecture."
        )


def _pretend(model: PreTrainedModel, parts: Tensor) -> None:
    """Let the rows of a batch be the parts of one sequence that ranks would hold."""
    order = parts.flatten().argsort()

    def gathered(rows: Tensor) -> Tensor:
        whole = rows.transpose(0, 1).flatten(1, 2)[:, order]
        return whole.expand(len(parts), *whole.shape)

    def mask(*, mask_function: Callable[..., Tensor], **unused: Any) -> Tensor:
        places = torch.arange(parts.numel(), device=parts.device)
        earlier = places <= parts[:, None, :, None]  # nobody is shown what comes later
        return _visible(mask_function, parts, places) & earlier

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        key, value = (_for_all_heads(query, gathered(tensor)) for tensor in (key, value))
        return _attend(query, key, value, attention_mask, **kwargs), None

    _use(model, attend, mask)


def _use(
    model: PreTrainedModel, attend: Callable[..., Any], mask: Callable[..., Tensor | None]
) -> None:
    AttentionInterface.register(KERNEL, attend)
    AttentionMaskInterface.register(KERNEL, mask)
    model.set_attn_implementation(KERNEL)


def _visible(mask_function: Callable[..., Tensor], own: Tensor, places: Tensor) -> Tensor:
    """[rows, 1, tokens, places]: which places tokens at places `own` [rows, tokens] see."""
    row = torch.arange(len(own), device=own.device)[:, None, None, None]
    head = row.new_zeros(1, 1, 1, 1)
    seen: Tensor = mask_function(row, head, own[:, None, :, None], places[None, None, None, :])
    return seen


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """From [batch, heads, tokens, width] to [batch, tokens, heads, width], as transformers does."""
    for name in _NOT_COMPUTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"Attention with {name} is not computed over parts of a sequence.")
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling
    )
    return attended.transpose(1, 2).contiguous()


def _for_all_heads(query: Tensor, tensor: Tensor) -> Tensor:
    """Keys or values that several heads share, once for each of them."""
    repeated: Tensor = repeat_kv(tensor, query.shape[1] // tensor.shape[1])
    return repeated


def _kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What attention computes in, given what the model computes in outside of autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
