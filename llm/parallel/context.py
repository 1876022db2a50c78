"""Context parallelism: every sample's sequence is sharded over ranks.

A sequence is cut into twice as many chunks as there are ranks. Each rank holds one chunk from the
front and its mirror image from the back, so that causal attention costs every rank the same. All
layers but attention work on each token alone; for attention the keys and values of all ranks are
all-gathered, as Llama 3 was trained (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).

The models of transformers call an attention function and a mask function by the name of a kernel.
`divide_attention` registers a kernel that all-gathers keys and values. This is exact if the tokens
of a model interact in that function only, which `check_divisible` tests on the model itself.
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
    additive_mask,
    distance,
    documents_of_forward,
    evaluating,
    kernel_dtype,
    random_tokens,
    run_model,
)
from llm.parallel.dims import ParallelDims
from llm.runtime import torch_names
from llm.runtime.float32 import full_float32

KERNEL = "context_parallel"
"""The registered name of the functions."""

_MASKED_DEVICES = ("cpu",)
"""Devices without a kernel for queries at the end of the keys. There all layers share one explicit
mask; otherwise each layer would keep a separate one."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of some models' attention that PyTorch's kernels do not have."""

_CHECKED_TOKENS = 2
"""Tokens of each chunk that `check_divisible` uses."""

_TOLERANCE = 1e-4
"""Rounding error allowed, as a fraction of the error of attention within each shard only."""


class SequenceShard:
    """The chunks of each sequence that a rank holds; every rank must make one.

    Args:
        dims: How many ranks each kind of parallelism has.
        rank: Rank of this process.

    Attributes:
        num_chunks: Number of chunks, of equal length, that a sequence is cut into.
        chunks: The numbers of the two chunks that this rank holds.
    """

    def __init__(self, dims: ParallelDims, rank: int) -> None:
        at = dims.coordinates(rank)["context"]
        self.num_chunks = 2 * dims.context
        self.chunks = at, self.num_chunks - 1 - at
        self._group, _ = dist.new_subgroups_by_enumeration(dims.groups("context"))

    def of(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return this rank's shard of a micro-batch, with each token's position in its sample."""
        input_ids, labels, positions, documents, sources = micro_batch
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            positions = positions.expand_as(input_ids)
        return MicroBatch(
            self._local_chunks(input_ids),
            self._local_chunks(labels),
            self._local_chunks(positions),
            None if documents is None else self._local_chunks(documents),
            sources,
        )

    def _local_chunks(self, tensor: Tensor) -> Tensor:
        chunks = tensor.chunk(self.num_chunks, dim=1)
        return torch.cat([chunks[number] for number in self.chunks], dim=1)

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """All-gather the shards of a sequence; differentiable.

        Args:
            shard: Of the same shape on all ranks of a sequence; each of them must call it.
            dim: The dimension of the tokens.

        Returns:
            The tokens of all ranks along `dim`, in the order of the sequence. Its gradient is
            summed over the ranks (reduce-scatter).
        """
        sequence: Tensor = _Gather.apply(shard, dim, self._group)  # type: ignore[no-untyped-call]
        return sequence


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ranks = group.size()
        tokens_first = shard.movedim(dim, 0).contiguous()
        gathered = tokens_first.new_empty(ranks * len(tokens_first), *tokens_first.shape[1:])
        torch_names.all_gather_single(gathered, tokens_first, group=group)
        first_half, second_half = gathered.unflatten(0, (ranks, 2, -1)).unbind(1)
        return torch.cat([first_half, second_half.flip(0)]).flatten(0, 1).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        ranks = ctx.group.size()
        chunks = grad_outputs[0].movedim(ctx.dim, 0).unflatten(0, (2 * ranks, -1))
        by_rank = torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], dim=1).flatten(0, 2)
        shard = by_rank.new_empty(len(by_rank) // ranks, *by_rank.shape[1:])
        torch_names.reduce_scatter_single(shard, by_rank, group=ctx.group)
        return shard.movedim(0, ctx.dim), None, None


class _ShardedAttention:
    """Attention of this rank's queries to the keys and values of all ranks, for transformers."""

    def __init__(self, shard: SequenceShard) -> None:
        self._shard = shard

    def mask(
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
        plain = mask_function is causal_mask_function and allow_is_causal_skip
        if plain and documents is None and device.type not in _MASKED_DEVICES:
            return None
        keys = torch.arange(q_length // 2 * shard.num_chunks, device=device)
        chunks = keys.chunk(shard.num_chunks)
        queries = torch.cat([chunks[number] for number in shard.chunks])
        visible = _evaluate_mask(mask_function, queries.unsqueeze(0), keys)
        if documents is not None:
            of_keys = shard.gather(documents, 1)[:, None, None]
            visible = visible & (documents[:, None, :, None] == of_keys)
        return additive_mask(visible, dtype)

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
            key, value = _for_all_heads(query, key), _for_all_heads(query, value)
        length = query.shape[2] // 2
        attended = []
        for number, chunk in enumerate(shard.chunks):
            rows = slice(number * length, (number + 1) * length)
            end = (chunk + 1) * length  # no token of the chunk attends beyond it
            if attention_mask is None:
                bias: Tensor = causal_lower_right(length, end)
            else:
                bias = attention_mask[..., rows, :end]
            tensors = query[..., rows, :], key[..., :end, :], value[..., :end, :]
            attended.append(_scaled_dot_product(*tensors, bias, enable_gqa=enable_gqa, **kwargs))
        return torch.cat(attended, dim=1), None


def divide_attention(model: PreTrainedModel, shard: SequenceShard) -> None:
    """Let a model's attention reach the keys and values that other ranks hold.

    From then on the model is given this rank's shard of each sequence, with its positions.

    Args:
        model: A causal language model that `check_divisible` accepts. All ranks that share a
            sequence must call its forward together.
        shard: This rank's chunks.
    """
    # transformers would index this rank's documents by positions in the whole sequence.
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    kernel = _ShardedAttention(shard)
    _use_kernel(model, kernel.attend, kernel.mask)


@torch.no_grad()
@full_float32()
def check_divisible(model: PreTrainedModel, *, ranks: int, block_size: int) -> None:
    """Refuse a model that mixes tokens outside attention or depends on a shard's length.

    The test runs the model, in evaluation mode, on the last tokens of each chunk. It compares the
    logits of the whole sequence with the logits of a batch that has the ranks' shards as rows.

    Args:
        model: A causal language model with weights; its mode is restored.
        ranks: Number of ranks over which a sequence will be sharded.
        block_size: Tokens of a sample, a multiple of twice the ranks.

    Raises:
        ConfigError: Its logits would differ from the whole sequence's.
    """
    ends = torch.arange(block_size, device=model.device)
    ends = ends.view(2 * ranks, -1)[:, -_CHECKED_TOKENS:]
    positions, tokens = ends.flatten(), torch.arange(ends.numel(), device=model.device)
    first_half, second_half = tokens.view(2, ranks, -1).unbind()
    shards = torch.cat([first_half, second_half.flip(0)], dim=1)
    input_ids = random_tokens(model, len(tokens))

    def logits(of: Tensor) -> Tensor:
        outputs: Tensor = run_model(model, input_ids[of], positions[of], None).logits
        return outputs.float()

    kernel = model.config._attn_implementation
    try:
        with evaluating(model):
            # Before the whole sequence: some rotary embeddings remember the longest they have seen.
            last_shard_logits = logits(shards[-1:])
            full_logits = logits(tokens.unsqueeze(0))[0, shards]
            shard_logits = logits(shards)
            _simulate_ranks(model, shards)
            parallel_logits = logits(shards)
        error = max(
            distance(parallel_logits, full_logits), distance(last_shard_logits, shard_logits[-1:])
        )
        divisible = not model._is_stateful and error <= _TOLERANCE * distance(
            shard_logits, full_logits
        )
    except (TypeError, ValueError, IndexError, RuntimeError):
        divisible = False  # it takes no positions, or its attention has another interface
    finally:
        model.set_attn_implementation(kernel)
    if not divisible:
        raise ConfigError(
            f"--context_parallel_size {ranks} cannot divide samples of {block_size} tokens of "
            f"{model.config.model_type}: its tokens meet elsewhere than in ordinary attention, or "
            "take no positions from outside; leave it out, or choose another architecture."
        )


def _simulate_ranks(model: PreTrainedModel, shards: Tensor) -> None:
    """Let each row of a batch attend to all rows, as if they were the shards of one sequence."""
    order = shards.flatten().argsort()

    def gather_rows(rows: Tensor) -> Tensor:
        sequence = rows.transpose(0, 1).flatten(1, 2)[:, order]
        return sequence.expand(len(shards), *sequence.shape)

    def mask(*, mask_function: Callable[..., Tensor], **unused: Any) -> Tensor:
        keys = torch.arange(shards.numel(), device=shards.device)
        earlier = keys <= shards[:, None, :, None]  # regardless of the model's mask
        return _evaluate_mask(mask_function, shards, keys) & earlier

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        key, value = (_for_all_heads(query, gather_rows(tensor)) for tensor in (key, value))
        return _scaled_dot_product(query, key, value, attention_mask, **kwargs), None

    _use_kernel(model, attend, mask)


def _use_kernel(
    model: PreTrainedModel, attend: Callable[..., Any], mask: Callable[..., Tensor | None]
) -> None:
    AttentionInterface.register(KERNEL, attend)
    AttentionMaskInterface.register(KERNEL, mask)
    model.set_attn_implementation(KERNEL)


def _evaluate_mask(mask_function: Callable[..., Tensor], queries: Tensor, keys: Tensor) -> Tensor:
    """Return a mask [rows, 1, queries, keys], from positions [rows, queries] and [keys]."""
    row = torch.arange(len(queries), device=queries.device)[:, None, None, None]
    head = row.new_zeros(1, 1, 1, 1)
    mask: Tensor = mask_function(row, head, queries[:, None, :, None], keys[None, None, None, :])
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
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"Attention with {name} is not computed over parts of a sequence.")
    attended = F.scaled_dot_product_attention(
        query, key, value, bias, dropout, scale=scaling, enable_gqa=enable_gqa
    )
    return attended.transpose(1, 2).contiguous()


def _for_all_heads(query: Tensor, tensor: Tensor) -> Tensor:
    """Repeat key or value heads that several query heads share."""
    repeated: Tensor = repeat_kv(tensor, query.shape[1] // tensor.shape[1])
    return repeated
