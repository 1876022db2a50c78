"""Cross-entropy of the output head's logits, one chunk of tokens at a time.

The gradients of a chunk are computed together with its logits, so nothing is kept for the backward
pass or computed twice. Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009) and Liger Kernel
(Hsu et al. 2024, arXiv:2410.10989) fuse the head and the cross-entropy in this way.

If the rows of the head are sharded over ranks, no rank has the logits of the whole vocabulary. The
ranks then all-reduce each token's largest logit and sum of exponentials (Shoeybi et al. 2019,
arXiv:1909.08053, section 3).

The z-loss keeps the logits from drifting: it is the square of each token's log-sum-exp of logits,
times a small coefficient (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from llm.models.patches.tied_embedding import TiedEmbedding
from llm.models.weight_casts import copy_once
from llm.runtime.labels import IGNORED

Softmax = Callable[[Tensor, Tensor, int, bool, float], tuple[Tensor, Tensor | None, Tensor | None]]
"""Computes on the logits of a chunk, and may overwrite them; as `softmax_in_place`."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    vocab_size: int,
    rows: int,
    align: int = 1,
    tied: TiedEmbedding | None = None,
    buffer: Tensor | None = None,
    softmax: Softmax | None = None,
    token_losses: Tensor | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of the cross-entropies and of the z-losses of `hidden @ weight.T + bias`.

    Args:
        hidden: [tokens, width]; equal on all ranks of a sharded head.
        weight: [columns, width], one column of logits per token of the vocabulary. A DTensor is
            sharded by rows over one mesh axis, and all ranks of the axis return the same sum.
        bias: [columns], sharded like the weight, or None.
        labels: [tokens], int64; -100 for no loss.
        vocab_size: Number of columns that are tokens; the others are padding.
        rows: Tokens of a chunk.
        align: The columns of the matrix products become a multiple of this number: if needed, the
            weight is copied into a larger matrix. Gradients have the weight's shape.
        tied: The input embedding, if it has the same weight; receives the gradient of the weight.
        buffer: [rows, columns], memory for the logits of a chunk; cannot be combined with `align`.
        softmax: Computes on the logits of a chunk, such as `softmax_in_place`; by default, and with
            a sharded head, torch's operations do.
        token_losses: Fp32 [tokens]; receives the terms of the sum.
        z_loss: Coefficient of the z-loss.

    Returns:
        Two fp32 scalars; the second is None without z-loss. The first has the gradient of their
        sum, and the second has none, so the logits need no second backward pass.
    """
    shard, full_weight = None, weight
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        first = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
        shard, tied, buffer = _Shard(mesh.get_group(), first), None, None
        weight, bias = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias
    matrix = copy_once(full_weight, lambda: _product_matrix(weight, align))
    if softmax is None or shard is not None:
        softmax = partial(_softmax_losses, shard)
    # Inside the function, gradients are disabled.
    grad_enabled = torch.is_grad_enabled()
    sums: tuple[Tensor, Tensor | None] = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        *(hidden, weight, bias, labels, vocab_size, rows, matrix),
        *(shard, tied, buffer, softmax, grad_enabled, token_losses, z_loss),
    )
    return sums


@dataclass(frozen=True)
class _Shard:
    """The output head's rows on this rank.

    Attributes:
        group: The ranks that share the rows.
        first: Index of this rank's first row.
    """

    group: dist.ProcessGroup
    first: int


@dataclass(frozen=True)
class _Gradients:
    """Sums over chunks in fp32, because in bf16 each addition would round; None if not wanted.

    Attributes:
        hidden: [tokens, width].
        weight: [columns, width], like the matrix.
        bias: [columns].
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def begin(cls, hidden: Tensor, matrix: Tensor, wanted: Sequence[bool]) -> "_Gradients":
        """Return the sums over no chunks, of the gradients that are wanted."""
        fp32 = torch.float32
        return cls(
            torch.empty_like(hidden, dtype=fp32) if wanted[0] else None,
            torch.zeros_like(matrix, dtype=fp32) if wanted[1] else None,
            matrix.new_zeros(len(matrix), dtype=fp32) if wanted[2] else None,
        )

    def add(
        self, span: slice, chunk: Tensor, grad_logits: Tensor, labels: Tensor, matrix: Tensor
    ) -> None:
        """Add the gradients of a chunk.

        Args:
            span: The tokens of the chunk.
            chunk: [rows, width], their hidden states, in the precision of the products.
            grad_logits: [rows, columns], the gradient by their logits.
            labels: [rows]; tokens without a label have no gradient.
            matrix: [columns, width], the weight in the precision of the products.
        """
        keep = (labels != IGNORED).to(matrix.dtype).unsqueeze(1)
        if self.hidden is not None:
            self.hidden[span] = (grad_logits @ matrix) * keep
        if self.weight is not None:
            _add_product(self.weight, grad_logits, chunk * keep)
        if self.bias is not None:
            self.bias.add_((grad_logits.float() * keep.float()).sum(dim=0))

    def of_columns(self, columns: int) -> list[Tensor | None]:
        """Return the gradients of weight and bias without the rows of padding."""
        gradients = self.weight, self.bias
        return [g if g is None or len(g) == columns else g[:columns] for g in gradients]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies; the forward pass also computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocab_size: int,
        rows: int,
        matrix: Tensor,
        shard: _Shard | None,
        tied: TiedEmbedding | None,
        buffer: Tensor | None,
        softmax: Softmax,
        grad_enabled: bool,
        token_losses: Tensor | None,
        z_loss: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums; takes the arguments of `chunked_cross_entropy`."""
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        losses = token_losses
        if losses is None:
            losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        squares = torch.empty_like(losses) if z_loss else None
        first = 0 if shard is None else shard.first
        columns = len(weight)
        width, dtype = len(matrix), matrix.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            offsets = None if bias is None else _pad_rows(bias, width, dtype)
            gradients = _Gradients.begin(hidden, matrix, wanted)
            for start in range(0, len(labels), rows):
                span = slice(start, start + rows)
                chunk = hidden[span].to(dtype)
                logits = _chunk_logits(chunk, matrix, offsets, buffer)
                own_columns = min(columns, max(0, vocab_size - first))
                losses[span], of_chunk, grad_logits = softmax(
                    logits, labels[span], own_columns, any(wanted), z_loss
                )
                if squares is not None and of_chunk is not None:
                    squares[span] = of_chunk
                if grad_logits is not None:
                    gradients.add(span, chunk, grad_logits, labels[span], matrix)
        if shard is not None:
            # Each rank has the losses of labels in its rows, and the gradient through its rows.
            dist.all_reduce(losses, group=shard.group)
            if gradients.hidden is not None:
                dist.all_reduce(gradients.hidden, group=shard.group)
        ctx.save_for_backward(gradients.hidden, *gradients.of_columns(columns))
        ctx.tied = tied
        ctx.dtype = hidden.dtype
        if squares is None:
            return losses.sum(), None
        z_sum = z_loss * squares.sum()  # equal on all ranks of a sharded head
        ctx.mark_non_differentiable(z_sum)
        return losses.sum(), z_sum

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale, _ = grad_outputs
        hidden, weight, bias = (
            None if saved is None else saved.mul_(scale) for saved in ctx.saved_tensors
        )
        if hidden is not None:
            hidden = hidden.to(ctx.dtype)
        # Autograd casts the gradients of weight and bias to their `grad_dtype`, float32 by default.
        if ctx.tied is not None:
            # The lookup's backward pass adds its rows and returns the sum.
            ctx.tied.head_gradient, weight = weight, None
        return hidden, weight, bias, *[None] * 11


@torch.no_grad()
def _product_matrix(weight: Tensor, align: int) -> Tensor:
    """Return the weight in the products' precision, its rows padded to a multiple of `align`."""
    device_type = weight.device.type
    autocasts = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocasts else weight.dtype
    return _pad_rows(weight.detach(), -(-len(weight) // align) * align, dtype)


def _pad_rows(tensor: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype, with the first dimension padded with zeros to a size."""
    if len(tensor) == size:
        return tensor.to(dtype)
    padded = tensor.new_zeros((size, *tensor.shape[1:]), dtype=dtype)
    padded[: len(tensor)] = tensor
    return padded


def _chunk_logits(
    chunk: Tensor, matrix: Tensor, bias: Tensor | None, buffer: Tensor | None
) -> Tensor:
    """Return [rows, columns] in the matrix' dtype."""
    if buffer is None:
        return F.linear(chunk, matrix, bias)
    logits = torch.mm(chunk, matrix.t(), out=buffer[: len(chunk)])
    if bias is not None:
        logits += bias
    return logits


def _softmax_losses(
    shard: _Shard | None,
    logits: Tensor,
    labels: Tensor,
    own_columns: int,
    with_gradient: bool,
    z_loss: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the losses of a chunk and their gradient by the logits; may overwrite the logits.

    Args:
        shard: The part, if the head is sharded.
        logits: [rows, columns], in the precision of the products.
        labels: [rows], int64; -100 for no loss. The gradient of such rows is the plain softmax.
        own_columns: Columns of this rank's part of the vocabulary; the others are padding.
        with_gradient: Whether to compute the gradient.
        z_loss: Coefficient of the z-loss.

    Returns:
        The losses, fp32 [rows], 0 for labels in other ranks' columns; the squared log-sum-exp over
        all ranks' logits, fp32 [rows], 0 without a label, or None without z-loss; and the gradient,
        [rows, columns] in the precision of the logits, or None.
    """
    logits[:, own_columns:] = -torch.inf  # probability 0
    targets = labels if shard is None else labels - shard.first
    # The rank with the label's column adds its loss.
    has_target = (labels != IGNORED) & (targets >= 0) & (targets < own_columns)
    targets = targets.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    at_target = logits.gather(1, targets) if z_loss else None  # before it is overwritten
    log_probs, log_sums = _log_softmax(logits, shard)
    log_targets = log_probs.gather(1, targets)
    losses = torch.where(has_target, -log_targets.squeeze(1), 0.0)
    squares = None
    if at_target is not None:
        if log_sums is None:
            log_sums = at_target.float() - log_targets
        squares = torch.where(labels != IGNORED, log_sums.squeeze(1).square(), 0.0)
    if not with_gradient:
        return losses, squares, None
    probs = log_probs.exp_()
    if log_sums is not None and z_loss:
        # In fp32: half precision cannot represent 1 + 2 z_loss log_sums.
        probs *= 1.0 + 2.0 * z_loss * log_sums
    # Softmax minus one-hot. Rows without a label are zeroed in the products, which are narrower.
    probs.scatter_add_(1, targets, -has_target.float().unsqueeze(1))
    return losses, squares, probs.to(logits.dtype)


def _log_softmax(logits: Tensor, shard: _Shard | None) -> tuple[Tensor, Tensor | None]:
    """Return the softmax over all ranks' columns, fp32 [rows, columns]; overwrites fp32 logits.

    Returns:
        Also the log-sum-exp, [rows, 1], of a sharded head; else None.
    """
    if shard is not None:
        logits = logits.float()
        # Log-sum-exp: subtract the largest logit of all ranks, or exp would overflow.
        largest = logits.amax(dim=1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
        total = (logits - largest).exp_().sum(dim=1, keepdim=True)
        dist.all_reduce(total, group=shard.group)
        log_sums = largest + total.log()
        return logits.sub_(log_sums), log_sums
    if logits.dtype == torch.float32:
        # In place is safe: the kernels read a row before they write it.
        return torch.log_softmax(logits, dim=-1, out=logits), None
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32), None


def _add_product(total: Tensor, grad_logits: Tensor, chunk: Tensor) -> None:
    """Add grad_logits.T @ chunk to the fp32 total [columns, width], accumulating in fp32.

    The row of a frequent token sums over many tokens, before any loss scale: fp16 would overflow.
    """
    if total.dtype == grad_logits.dtype:
        total.addmm_(grad_logits.t(), chunk)
    elif total.device.type == "cuda":
        torch.addmm(total, grad_logits.t(), chunk, out_dtype=torch.float32, out=total)
    elif grad_logits.dtype == torch.float16:
        total.addmm_(grad_logits.t().float(), chunk.float())
    else:
        total += grad_logits.t() @ chunk
