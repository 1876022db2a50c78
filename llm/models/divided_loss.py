"""The chunked loss where each rank holds some of the output head's rows.

No rank ever has the logits of the whole vocabulary: of each chunk of tokens the ranks exchange the
largest logit, the sum of the exponentials and nothing else. See Shoeybi et al. 2019,
arXiv:1909.08053, section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORED = -100


@torch.compiler.disable  # type: ignore[untyped-decorator]
def divided_loss(
    hidden: Tensor,
    weight: DTensor,
    bias: DTensor | None,
    labels: Tensor,
    *,
    vocab_size: int,
    rows: int,
) -> Tensor:
    """Sum of cross-entropies of `hidden @ weight.T + bias`, the same on all ranks.

    Args:
        hidden: [tokens, width], the same on all ranks.
        weight: [columns, width], divided by its rows over one axis of ranks.
        bias: [columns], divided in the same way, or None.
        labels: [tokens], int64; -100 for no loss.
        vocab_size: Columns that exist; the others are padding.
        rows: Tokens of a chunk.
    """
    mesh = weight.device_mesh
    first = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    loss_sum: Tensor = _DividedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight.to_local(),
        None if bias is None else bias.to_local(),
        labels,
        first,
        vocab_size,
        rows,
        mesh.get_group(),
        torch.is_grad_enabled(),
    )
    return loss_sum


class _DividedCrossEntropy(torch.autograd.Function):
    """Its gradients are made on the way, as those of the undivided loss are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        first: int,
        vocab_size: int,
        rows: int,
        group: dist.ProcessGroup,
        grad_enabled: bool,
    ) -> Tensor:
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        grad_bias = None
        if bias is not None and wanted[2]:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        device_type, dtype = hidden.device.type, weight.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            matrix = weight.to(dtype)
            offset = None if bias is None else bias.to(dtype)
            for start in range(0, len(labels), rows):
                part = slice(start, start + rows)
                chunk = hidden[part].to(dtype)
                logits = F.linear(chunk, matrix, offset).float()
                logits[:, max(0, vocab_size - first) :] = -torch.inf
                log_total = _log_sum_exp(logits, group)
                # The label's logit, where this rank has that column.
                targets = labels[part] - first
                mine = (targets >= 0) & (targets < len(weight)) & (labels[part] != IGNORED)
                targets = targets.clamp(0, len(weight) - 1).unsqueeze(1)
                found = logits.gather(1, targets).squeeze(1)
                losses[part] = torch.where(mine, found, 0)
                dist.all_reduce(losses[part], group=group)
                counted = labels[part] != IGNORED
                losses[part] = (log_total - losses[part]) * counted
                if not any(wanted):
                    continue
                # d loss / d logits = softmax - one-hot.
                grad_logits = logits.sub_(log_total.unsqueeze(1)).exp_()
                grad_logits.scatter_add_(1, targets, -mine.float().unsqueeze(1))
                grad_logits = (grad_logits * counted.unsqueeze(1)).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ matrix
                if grad_weight is not None:
                    grad_weight += grad_logits.t() @ chunk
                if grad_bias is not None:
                    grad_bias += grad_logits.float().sum(dim=0)
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        hidden, weight, bias = (
            None if saved is None else saved.mul_(scale).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, weight, bias, None, None, None, None, None, None


def _log_sum_exp(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[rows]: over the columns of all ranks."""
    largest = logits.amax(dim=1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (logits - largest.unsqueeze(1)).exp().sum(dim=1)
    dist.all_reduce(total, group=group)
    return largest + total.log()
