"""Context parallelism: every sample's sequence is sharded over ranks.

A sequence is cut into twice as many chunks as there are ranks. Each rank holds one chunk from the
front and its mirror image from the back, so that causal attention costs every rank the same. All
layers but attention work on each token alone; for attention the keys and values of all ranks are
all-gathered, as Llama 3 was trained (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).

The models of transformers call an attention function and a mask function by the name of a kernel.
`divide_attention` registers a kernel that all-gathers keys and values. This is exact if the tokens
of a model interact in that function only, which `check_context_parallel` tests on the model itself.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import causal_mask_function

from llm.data.loader import MicroBatch
from llm.errors import ConfigError
from llm.models.attention import (
    documents_of_forward,
    evaluation_mode,
    kernel_dtype,
    make_additive_mask,
    max_difference,
    random_tokens,
    run_model,
)
from llm.parallel.dims import ParallelDims
from llm.runtime import torch_names
from llm.runtime.float32 import full_float32

KERNEL = "context_parallel"
"""The registered name of the functions."""

_EXPLICIT_MASK_DEVICES = ("cpu",)
"""Devices without a kernel for queries at the end of the keys. There all layers share one explicit
mask; otherwise each layer would keep a separate one."""

_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments of some models' attention that PyTorch's kernels do not have."""

_CHECKED_TOKENS_PER_CHUNK = 2
"""Tokens of each chunk that `check_context_parallel` uses."""

_MAX_RELATIVE_ERROR = 1e-4
"""Rounding error allowed, as a fraction of the error of attention within each shard only."""


class SequenceShard:
    """The chunks of each sequence that a rank holds; every rank must make one.

    Args:
        dims: How many ranks each kind of parallelism has.
        rank: Rank of this process.

    Attributes:
        num_chunks: Number of chunks, of equal length, that a sequence is cut into.
        chunks: The indices of the two chunks that this rank holds.
    """

    def __init__(self, dims: ParallelDims, rank: int) -> None:
        shard_index = dims.coordinates(rank)["context"]
        self.num_chunks = 2 * dims.context
        self.chunks = shard_index, self.num_chunks - 1 - shard_index
        self._group, _ = dist.new_subgroups_by_enumeration(dims.list_rank_groups("context"))

    def local_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return this rank's shard of a micro-batch, with each token's position in its sample."""
        input_ids, labels, positions, documents, sources = micro_batch
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            positions = positions.expand_as(input_ids)
        return MicroBatch(
            self.local_chunks(input_ids),
            self.local_chunks(labels),
            self.local_chunks(positions),
            None if documents is None else self.local_chunks(documents),
            sources,
        )

    def local_chunks(self, tensor: Tensor) -> Tensor:
        """Return this rank's two chunks of a tensor [samples, tokens]."""
        chunks = tensor.chunk(self.num_chunks, dim=1)
        return torch.cat([chunks[chunk_index] for chunk_index in self.chunks], dim=1)

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """All-gather the shards of a sequence; differentiable.

        Args:
            shard: Of the same shape on all ranks of a sequence; each of them must call it.
            dim: The dimension of the tokens.

        Returns:
            The tokens of all ranks along `dim`, in the order of the sequence. Its gradient is
            summed over the ranks (reduce-scatter).
        """
        sequence: Tensor = _AllGatherSequence.apply(shard, dim, self._group)  # type: ignore[no-untyped-call]
        return sequence


class _AllGatherSequence(torch.autograd.Function):
    """All-gathers the chunks of a sequence; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        num_ranks = group.size()
        tokens_first = shard.movedim(dim, 0).contiguous()
        gathered = tokens_first.new_empty(num_ranks * len(tokens_first), *tokens_first.shape[1:])
        torch_names.all_gather_single(gathered, tokens_first, group=group)
        first_half, second_half = gathered.unflatten(0, (num_ranks, 2, -1)).unbind(1)
        return torch.cat([first_half, second_half.flip(0)]).flatten(0, 1).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        num_ranks = ctx.group.size()
        chunks = grad_outputs[0].movedim(ctx.dim, 0).unflatten(0, (2 * num_ranks, -1))
        first_half, second_half = chunks[:num_ranks], chunks[num_ranks:].flip(0)
        shards = torch.stack([first_half, second_half], dim=1).flatten(0, 2)
        shard = shards.new_empty(len(shards) // num_ranks, *shards.shape[1:])
        torch_names.reduce_scatter_single(shard, shards, group=ctx.group)
        return shard.movedim(0, ctx.dim), None, None


class _ShardedAttention:
    """Attention of this rank's queries to the keys and values of all ranks, for transformers."""

    def __init__(self, shard: SequenceShard) -> None:
        self._shard = shard

    def make_mask(
        self,
        *,
        q_length: int,
        mask_function: Callable[..., Tensor],
        allow_is_causal_skip: bool = True,
        device: torch.device,
        dtype: torch.dtype,
        **unused: Any,
    ) -> Tensor | None:
        """Return the additive mask of this rank's queries, or None if causal chunks suffice."""
        shard = self._shard
        documents = documents_of_forward()
        is_plain_causal = mask_function is causal_mask_function and allow_is_causal_skip
        if is_plain_causal and documents is None and device.type not in _EXPLICIT_MASK_DEVICES:
            return None
        key_positions = torch.arange(q_length // 2 * shard.num_chunks, device=device)
        chunks = key_positions.chunk(shard.num_chunks)
        query_positions = torch.cat([chunks[chunk_index] for chunk_index in shard.chunks])
        is_visible = _evaluate_mask(mask_function, query_positions.unsqueeze(0), key_positions)
        if documents is not None:
            key_documents = shard.gather(documents, 1)[:, None, None]
            is_visible = is_visible & (documents[:, None, :, None] == key_documents)
        return make_additive_mask(is_visible, dtype)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Gather keys and values, and attend with each of this rank's two chunks."""
        shard = self._shard
        # Cast before the all-gather: autocast would cast in the kernel, after sending twice the
        # bytes.
        dtype = kernel_dtype(query.dtype, query.device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        # One all-gather for both.
        keys_and_values = shard.gather(torch.cat([key, value], dim=-1), 2)
        key, value = keys_and_values.split([key.shape[-1], value.shape[-1]], dim=-1)
        # Without a mask, half-precision kernels share key-value heads.
        enable_gqa = attention_mask is None and dtype != torch.float32
        if not enable_gqa:
            key, value = _repeat_shared_heads(query, key), _repeat_shared_heads(query, value)
        chunk_length = query.shape[2] // 2
        chunk_outputs = []
        for local_index, chunk_index in enumerate(shard.chunks):
            query_rows = slice(local_index * chunk_length, (local_index + 1) * chunk_length)
            key_end = (chunk_index + 1) * chunk_length  # no token of the chunk attends beyond it
            if attention_mask is None:
                bias: Tensor = causal_lower_right(chunk_length, key_end)
            else:
                bias = attention_mask[..., query_rows, :key_end]
            chunk_output = _scaled_dot_product(
                query[..., query_rows, :],
                key[..., :key_end, :],
                value[..., :key_end, :],
                bias,
                enable_gqa=enable_gqa,
                **kwargs,
            )
            chunk_outputs.append(chunk_output)
        return torch.cat(chunk_outputs, dim=1), None


def divide_attention(model: PreTrainedModel, shard: SequenceShard) -> None:
    """Let a model's attention reach the keys and values that other ranks hold.

    Afterwards the model takes this rank's shard of each sequence, with its positions.

    Args:
        model: A causal language model that `check_context_parallel` accepts. All ranks that share a
            sequence must call its forward together.
        shard: This rank's chunks.
    """
    # transformers would index this rank's documents by positions in the whole sequence.
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    kernel = _ShardedAttention(shard)
    _use_kernel(model, kernel.attend, kernel.make_mask)


@torch.no_grad()
@full_float32()
def check_context_parallel(model: PreTrainedModel, *, num_ranks: int, block_size: int) -> None:
    """Refuse a model that mixes tokens outside attention or depends on a shard's length.

    The test runs the model, in evaluation mode, on the last tokens of each chunk. It compares the
    logits of the whole sequence with the logits of a batch that has the ranks' shards as rows.

    Args:
        model: A causal language model with weights; its mode is restored.
        num_ranks: Number of ranks over which a sequence will be sharded.
        block_size: Tokens of a sample, a multiple of twice the ranks.

    Raises:
        ConfigError: Its logits would differ from the whole sequence's.
    """
    chunks = torch.arange(block_size, device=model.device).view(2 * num_ranks, -1)
    positions = chunks[:, -_CHECKED_TOKENS_PER_CHUNK:].flatten()
    sequence = torch.arange(len(positions), device=model.device)
    # Each rank's tokens are a row: a chunk from the front, and its mirror image from the back.
    first_half, second_half = sequence.view(2, num_ranks, -1).unbind()
    shards = torch.cat([first_half, second_half.flip(0)], dim=1)
    input_ids = random_tokens(model, len(sequence))

    kernel = model.config._attn_implementation
    try:
        with evaluation_mode(model):
            is_exact = _are_shards_exact(model, input_ids, positions, shards)
        is_divisible = is_exact and not model._is_stateful
    except (TypeError, ValueError, IndexError, RuntimeError):
        is_divisible = False  # it takes no positions, or its attention has another interface
    finally:
        model.set_attn_implementation(kernel)
    if not is_divisible:
        raise ConfigError(
            f"--context_parallel_size {num_ranks} cannot divide samples of {block_size} tokens of "
            f"{model.config.model_type}: its tokens meet elsewhere than in ordinary attention, or "
            "take no positions from outside; leave it out, or choose another architecture."
        )


def _are_shards_exact(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, shards: Tensor
) -> bool:
    """Return whether ranks that share keys and values compute the logits of the whole sequence.

    Args:
        model: The model; its attention changes.
        input_ids: The tokens of the sequence, [tokens].
        positions: Their positions in a sample, [tokens].
        shards: Indices of each rank's tokens in the sequence, [ranks, tokens of a rank].
    """

    def compute_logits(token_indices: Tensor) -> Tensor:
        """Return the logits of some tokens, [rows, tokens] to [rows, tokens, vocabulary]."""
        row_ids, row_positions = input_ids[token_indices], positions[token_indices]
        logits: Tensor = run_model(model, row_ids, row_positions, None).logits
        return logits.float()

    sequence = torch.arange(len(input_ids), device=input_ids.device)
    # Before the whole sequence: some rotary embeddings remember the longest they have seen.
    last_shard_logits = compute_logits(shards[-1:])
    full_logits = compute_logits(sequence.unsqueeze(0))[0, shards]
    shard_logits = compute_logits(shards)
    _simulate_ranks(model, shards)
    parallel_logits = compute_logits(shards)
    max_error = max(
        max_difference(parallel_logits, full_logits),
        max_difference(last_shard_logits, shard_logits[-1:]),
    )
    effect_of_other_shards = max_difference(shard_logits, full_logits)
    return max_error <= _MAX_RELATIVE_ERROR * effect_of_other_shards


def _simulate_ranks(model: PreTrainedModel, shards: Tensor) -> None:
    """Let each row of a batch attend to all rows, as if they were the shards of one sequence."""
    sequence_order = shards.flatten().argsort()

    def gather_rows(rows: Tensor) -> Tensor:
        sequence = rows.transpose(0, 1).flatten(1, 2)[:, sequence_order]
        return sequence.expand(len(shards), *sequence.shape)

    def make_mask(*, mask_function: Callable[..., Tensor], **unused: Any) -> Tensor:
        key_positions = torch.arange(shards.numel(), device=shards.device)
        causal = key_positions <= shards[:, None, :, None]  # regardless of the model's mask
        return _evaluate_mask(mask_function, shards, key_positions) & causal

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        key, value = (_repeat_shared_heads(query, gather_rows(tensor)) for tensor in (key, value))
        return _scaled_dot_product(query, key, value, attention_mask, **kwargs), None

    _use_kernel(model, attend, make_mask)


def _use_kernel(
    model: PreTrainedModel, attend: Callable[..., Any], mask: Callable[..., Tensor | None]
) -> None:
    """Register an attention function and a mask function, and let a model call them."""
    AttentionInterface.register(KERNEL, attend)
    AttentionMaskInterface.register(KERNEL, mask)
    model.set_attn_implementation(KERNEL)


def _evaluate_mask(mask_function: Callable[..., Tensor], queries: Tensor, keys: Tensor) -> Tensor:
    """Return a mask [rows, 1, queries, keys], from positions [rows, queries] and [keys]."""
    row_indices = torch.arange(len(queries), device=queries.device)[:, None, None, None]
    head_index = row_indices.new_zeros(1, 1, 1, 1)
    mask: Tensor = mask_function(
        row_indices, head_index, queries[:, None, :, None], keys[None, None, None, :]
    )
    return mask


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    enable_gqa: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Compute attention, [batch, heads, tokens, width] to [batch, tokens, heads, width]."""
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(f"Attention with {name} is not computed over parts of a sequence.")
    outputs = F.scaled_dot_product_attention(
        query, key, value, bias, dropout, scale=scaling, enable_gqa=enable_gqa
    )
    return outputs.transpose(1, 2).contiguous()


def _repeat_shared_heads(query: Tensor, tensor: Tensor) -> Tensor:
    """Repeat key or value heads that several query heads share."""
    repeated: Tensor = repeat_kv(tensor, query.shape[1] // tensor.shape[1])
    return repeated
