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

from llm.models.float8_head import Float8Weight
from llm.models.patches.tied_embedding import TiedEmbedding
from llm.models.weight_casts import copy_once
from llm.runtime.labels import IGNORED

Softmax = Callable[[Tensor, Tensor, int, bool, float], tuple[Tensor, Tensor | None, Tensor | None]]
"""Computes the losses of a chunk and their gradient, and may overwrite the logits.

Arguments and results are the same as in `softmax_in_place`.
"""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    vocab_size: int,
    chunk_rows: int,
    column_multiple: int = 1,
    tied_embedding: TiedEmbedding | None = None,
    logits_buffer: Tensor | None = None,
    softmax: Softmax | None = None,
    token_losses: Tensor | None = None,
    z_loss: float = 0.0,
    is_float8: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of the cross-entropies and of the z-losses of `hidden @ weight.T + bias`.

    Args:
        hidden: [tokens, width]; equal on all ranks of a sharded head.
        weight: [columns, width], one column of logits per token of the vocabulary. A DTensor is
            sharded by rows over one mesh axis, and all ranks of the axis return the same sum.
        bias: [columns], sharded like the weight, or None.
        labels: [tokens], int64; -100 for no loss.
        vocab_size: Number of columns that are tokens; the others are padding.
        chunk_rows: Tokens per chunk.
        column_multiple: The matrix products get a multiple of this number of columns: if needed,
            the weight is copied into a larger matrix. Gradients have the weight's shape.
        tied_embedding: The input embedding, if it has the same weight; receives the gradient of the
            weight.
        logits_buffer: [chunk_rows, columns], memory for the logits of a chunk; cannot be combined
            with `column_multiple`.
        softmax: Computes the losses of a chunk and their gradient from its logits, such as
            `softmax_in_place`; by default, and with a sharded head, by torch's operations.
        token_losses: Fp32 [tokens]; receives the cross-entropy of each token.
        z_loss: Coefficient of the z-loss.
        is_float8: Whether the logits and the gradient of the hidden states are products in float8;
            not with a sharded head.

    Returns:
        Two fp32 scalars; the second is None without z-loss. A backward pass from the first computes
        the gradient of their sum; the second has no gradient. This saves a second backward pass
        through the logits.
    """
    shard, weight_parameter = None, weight
    if isinstance(weight, DTensor):
        shard, tied_embedding, logits_buffer = _HeadShard.of(weight), None, None
        weight, bias = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias
    product_weight = copy_once(
        weight_parameter, lambda: _cast_and_pad_weight(weight, column_multiple)
    )
    float8_weight = Float8Weight(product_weight) if is_float8 else None
    has_kernel = softmax is not None and shard is None
    if softmax is None or not has_kernel:
        softmax = partial(_compute_softmax_losses, shard)
    # Inside the function, gradients are disabled.
    grad_enabled = torch.is_grad_enabled()
    sums: tuple[Tensor, Tensor | None] = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        *(hidden, weight, bias, labels, vocab_size, chunk_rows, product_weight),
        *(shard, tied_embedding, logits_buffer, softmax, has_kernel, grad_enabled, token_losses),
        *(z_loss, float8_weight),
    )
    return sums


@dataclass(frozen=True)
class _HeadShard:
    """The output head's rows on this rank.

    Attributes:
        group: The ranks that share the rows.
        first_row: Index of this rank's first row.
    """

    group: dist.ProcessGroup
    first_row: int

    @classmethod
    def of(cls, weight: DTensor) -> "_HeadShard":
        """Return this rank's rows of a weight that is sharded evenly by rows."""
        mesh = weight.device_mesh
        rows_per_rank = -(-weight.shape[0] // mesh.size())
        return cls(mesh.get_group(), mesh.get_local_rank() * rows_per_rank)


@dataclass(frozen=True)
class _Gradients:
    """Gradients of the inputs, summed over chunks; None for inputs that need no gradient.

    Sums are in fp32, because in bf16 each addition would round.

    Attributes:
        hidden: [tokens, width], in the precision of the products, or in fp32 to sum over ranks.
        weight: [columns, width], with the padding of `product_weight`.
        bias: [columns], with the same padding.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def allocate(
        cls, hidden: Tensor, product_weight: Tensor, needs_grad: Sequence[bool], is_sharded: bool
    ) -> "_Gradients":
        """Return gradients before the first chunk.

        Args:
            hidden: [tokens, width].
            product_weight: [columns, width], the weight in the precision of the products.
            needs_grad: Whether hidden states, weight and bias need a gradient.
            is_sharded: Whether the gradient of the hidden states is summed over ranks.
        """
        fp32 = torch.float32
        hidden_dtype = fp32 if is_sharded else product_weight.dtype
        return cls(
            torch.empty_like(hidden, dtype=hidden_dtype) if needs_grad[0] else None,
            torch.zeros_like(product_weight, dtype=fp32) if needs_grad[1] else None,
            product_weight.new_zeros(len(product_weight), dtype=fp32) if needs_grad[2] else None,
        )

    def add(
        self,
        token_slice: slice,
        chunk_hidden: Tensor,
        grad_logits: Tensor,
        labels: Tensor | None,
        product_weight: Tensor | Float8Weight,
    ) -> None:
        """Add the gradients of a chunk.

        Args:
            token_slice: The tokens of the chunk.
            chunk_hidden: [rows, width], their hidden states, in the precision of the products.
            grad_logits: [rows, columns], the gradient of their logits.
            labels: [rows]; tokens without a label have no gradient. None if their gradient of the
                logits is zero already.
            product_weight: [columns, width], the weight in the precision of the products.
        """
        hidden_gradient = None
        if self.hidden is not None:
            hidden_gradient = self.hidden[token_slice]
            if isinstance(product_weight, Float8Weight):
                hidden_gradient.copy_(product_weight.compute_hidden_gradient(grad_logits))
            elif hidden_gradient.dtype == product_weight.dtype:
                torch.mm(grad_logits, product_weight, out=hidden_gradient)
            else:
                hidden_gradient.copy_(grad_logits @ product_weight)
        if labels is not None:
            label_mask = (labels != IGNORED).to(grad_logits.dtype).unsqueeze(1)
            chunk_hidden = chunk_hidden * label_mask
            if hidden_gradient is not None:
                hidden_gradient *= label_mask
        if self.weight is not None:
            _add_weight_gradient(self.weight, grad_logits, chunk_hidden)
        if self.bias is not None:
            bias_gradient = grad_logits.float()
            if labels is not None:
                bias_gradient *= label_mask
            self.bias.add_(bias_gradient.sum(dim=0))

    def trim_padding(self, num_columns: int) -> list[Tensor | None]:
        """Return the gradients of weight and bias without the rows of padding."""
        gradients = self.weight, self.bias
        return [g if g is None or len(g) == num_columns else g[:num_columns] for g in gradients]


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
        chunk_rows: int,
        product_weight: Tensor,
        shard: _HeadShard | None,
        tied_embedding: TiedEmbedding | None,
        logits_buffer: Tensor | None,
        softmax: Softmax,
        has_kernel: bool,
        grad_enabled: bool,
        token_losses: Tensor | None,
        z_loss: float,
        float8_weight: Float8Weight | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums; takes the arguments of `chunked_cross_entropy`."""
        needs_grad = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        if token_losses is None:
            token_losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        squared_log_sums = torch.empty_like(token_losses) if z_loss else None
        first_row = 0 if shard is None else shard.first_row
        num_columns = len(weight)
        # On the last ranks of a sharded head, some or all columns are padding.
        num_vocab_columns = min(num_columns, max(0, vocab_size - first_row))
        num_product_rows, dtype = len(product_weight), product_weight.dtype
        head_weight = float8_weight or product_weight
        with torch.autocast(hidden.device.type, enabled=False):
            product_bias = None if bias is None else _pad_rows(bias, num_product_rows, dtype)
            gradients = _Gradients.allocate(hidden, product_weight, needs_grad, shard is not None)
            for chunk_start in range(0, len(labels), chunk_rows):
                token_slice = slice(chunk_start, chunk_start + chunk_rows)
                chunk_hidden = hidden[token_slice].to(dtype)
                logits = _compute_chunk_logits(
                    chunk_hidden, head_weight, product_bias, logits_buffer
                )
                token_losses[token_slice], chunk_squares, grad_logits = softmax(
                    logits, labels[token_slice], num_vocab_columns, any(needs_grad), z_loss
                )
                if squared_log_sums is not None and chunk_squares is not None:
                    squared_log_sums[token_slice] = chunk_squares
                if grad_logits is not None:
                    # A kernel has zeroed the gradient of logits without a label.
                    mask_labels = None if has_kernel else labels[token_slice]
                    gradients.add(token_slice, chunk_hidden, grad_logits, mask_labels, head_weight)
        if shard is not None:
            # Each rank has the losses of labels in its rows, and the gradient through its rows.
            dist.all_reduce(token_losses, group=shard.group)
            if gradients.hidden is not None:
                dist.all_reduce(gradients.hidden, group=shard.group)
        ctx.save_for_backward(gradients.hidden, *gradients.trim_padding(num_columns))
        ctx.tied_embedding = tied_embedding
        ctx.dtype = hidden.dtype
        if squared_log_sums is None:
            return token_losses.sum(), None
        z_sum = z_loss * squared_log_sums.sum()  # equal on all ranks of a sharded head
        ctx.mark_non_differentiable(z_sum)
        return token_losses.sum(), z_sum

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the forward pass by the gradient of the loss."""
        scale, _ = grad_outputs
        hidden_gradient, weight_gradient, bias_gradient = (
            None if gradient is None else _scale(gradient, scale) for gradient in ctx.saved_tensors
        )
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.to(ctx.dtype)
        # Autograd casts the gradients of weight and bias to their `grad_dtype`, float32 by default.
        if ctx.tied_embedding is not None:
            # The lookup's backward pass adds its rows and returns the sum.
            ctx.tied_embedding.head_gradient, weight_gradient = weight_gradient, None
        return hidden_gradient, weight_gradient, bias_gradient, *[None] * 13


def _scale(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return the product of a gradient and an fp32 scalar, in fp32; may overwrite the gradient."""
    if gradient.dtype == scale.dtype:
        return gradient.mul_(scale)
    return gradient * scale.view(1, 1)  # a scalar would be rounded to the gradient's dtype


@torch.no_grad()
def _cast_and_pad_weight(weight: Tensor, row_multiple: int) -> Tensor:
    """Return the weight in the products' precision, padded to a multiple of `row_multiple` rows."""
    device_type = weight.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else weight.dtype
    return _pad_rows(weight.detach(), -(-len(weight) // row_multiple) * row_multiple, dtype)


def _pad_rows(tensor: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype, with the first dimension padded with zeros to `num_rows`."""
    if len(tensor) == num_rows:
        return tensor.to(dtype)
    padded = tensor.new_zeros((num_rows, *tensor.shape[1:]), dtype=dtype)
    padded[: len(tensor)] = tensor
    return padded


def _compute_chunk_logits(
    chunk_hidden: Tensor,
    product_weight: Tensor | Float8Weight,
    bias: Tensor | None,
    logits_buffer: Tensor | None,
) -> Tensor:
    """Return the logits of a chunk, [rows, columns], in the dtype of its hidden states."""
    if isinstance(product_weight, Float8Weight):
        return product_weight.compute_logits(chunk_hidden)  # such a head has no bias
    if logits_buffer is None:
        return F.linear(chunk_hidden, product_weight, bias)
    logits = torch.mm(chunk_hidden, product_weight.t(), out=logits_buffer[: len(chunk_hidden)])
    if bias is not None:
        logits += bias
    return logits


def _compute_softmax_losses(
    shard: _HeadShard | None,
    logits: Tensor,
    labels: Tensor,
    num_vocab_columns: int,
    needs_gradient: bool,
    z_loss: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the losses of a chunk and the gradient of its logits; may overwrite the logits.

    Args:
        shard: This rank's rows of the head, if the head is sharded.
        logits: [rows, columns], in the precision of the products.
        labels: [rows], int64; -100 for no loss. The gradient of such rows is the plain softmax.
        num_vocab_columns: Number of columns that are tokens on this rank; the others are padding.
        needs_gradient: Whether to compute the gradient.
        z_loss: Coefficient of the z-loss.

    Returns:
        The losses, fp32 [rows], 0 for labels in other ranks' columns; the squared log-sum-exp over
        all ranks' logits, fp32 [rows], 0 without a label, or None without z-loss; and the gradient,
        [rows, columns] in the precision of the logits, or None.
    """
    logits[:, num_vocab_columns:] = -torch.inf  # probability 0
    targets = labels if shard is None else labels - shard.first_row
    # The rank with the label's column adds its loss.
    has_target = (labels != IGNORED) & (targets >= 0) & (targets < num_vocab_columns)
    targets = targets.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    target_logits = logits.gather(1, targets) if z_loss else None  # before it is overwritten
    log_probs, log_sums = _log_softmax(logits, shard)
    target_log_probs = log_probs.gather(1, targets)
    losses = torch.where(has_target, -target_log_probs.squeeze(1), 0.0)
    squared_log_sums = None
    if target_logits is not None:
        if log_sums is None:
            log_sums = target_logits.float() - target_log_probs
        squared_log_sums = torch.where(labels != IGNORED, log_sums.squeeze(1).square(), 0.0)
    if not needs_gradient:
        return losses, squared_log_sums, None
    probs = log_probs.exp_()
    if log_sums is not None and z_loss:
        # In fp32: half precision cannot represent 1 + 2 z_loss log_sums.
        probs *= 1.0 + 2.0 * z_loss * log_sums
    # Softmax minus one-hot. Rows without a label are zeroed in the products, which are narrower.
    probs.scatter_add_(1, targets, -has_target.float().unsqueeze(1))
    return losses, squared_log_sums, probs.to(logits.dtype)


def _log_softmax(logits: Tensor, shard: _HeadShard | None) -> tuple[Tensor, Tensor | None]:
    """Compute the log-softmax over the columns of all ranks; overwrites fp32 logits.

    Returns:
        The log-softmax, fp32 [rows, columns]; and for a sharded head also the log-sum-exp,
        [rows, 1], else None.
    """
    if shard is not None:
        logits = logits.float()
        # Log-sum-exp: subtract the largest logit of all ranks, or exp would overflow.
        max_logits = logits.amax(dim=1, keepdim=True)
        dist.all_reduce(max_logits, op=dist.ReduceOp.MAX, group=shard.group)
        exp_sums = (logits - max_logits).exp_().sum(dim=1, keepdim=True)
        dist.all_reduce(exp_sums, group=shard.group)
        log_sums = max_logits + exp_sums.log()
        return logits.sub_(log_sums), log_sums
    if logits.dtype == torch.float32:
        # In place is safe: the kernels read a row before they write it.
        return torch.log_softmax(logits, dim=-1, out=logits), None
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32), None


def _add_weight_gradient(
    weight_gradient: Tensor, grad_logits: Tensor, chunk_hidden: Tensor
) -> None:
    """Add grad_logits.T @ chunk_hidden to the fp32 gradient [columns, width], in fp32.

    The row of a frequent token sums over many tokens, before any loss scale: fp16 would overflow.
    """
    if weight_gradient.dtype == grad_logits.dtype:
        weight_gradient.addmm_(grad_logits.t(), chunk_hidden)
    elif weight_gradient.device.type == "cuda":
        operands = weight_gradient, grad_logits.t(), chunk_hidden
        torch.addmm(*operands, out_dtype=torch.float32, out=weight_gradient)
    elif grad_logits.dtype == torch.float16:
        weight_gradient.addmm_(grad_logits.t().float(), chunk_hidden.float())
    else:
        weight_gradient += grad_logits.t() @ chunk_hidden
