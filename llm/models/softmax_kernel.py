"""The softmax of the loss as one Triton kernel, which replaces logits by their gradient.

A row is read twice and written once, in half precision. The kernel that Inductor generates for
`cross_entropy` takes 1.8 times as long on an H200.

With a program per row, the rows that are in work at a time do not fit in the second-level cache of
a GPU, so both readings come from memory. `choose_softmax` starts fewer programs, which compute many
rows each, if that lets the second reading come from the cache.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm.models.cross_entropy import Softmax
from llm.runtime.labels import IGNORED

_BLOCK_COLUMNS, _NUM_WARPS = 2048, 8
"""Columns in a block, and warps of a program per row: the fastest of five pairs on an H200."""
_CACHED_BLOCK_COLUMNS, _CACHED_NUM_WARPS = 4096, 16
"""The same for programs that compute many rows."""
_CACHED_PROGRAMS = 2
"""Most programs that compute many rows on a multiprocessor: its registers hold two of 16 warps."""
_CACHE_FRACTION = 0.6
"""Part of the second-level cache that the rows in work may take."""


def choose_softmax(device: torch.device, num_columns: int) -> Softmax:
    """Return `softmax_in_place` with as many programs as suit the second-level cache of a GPU.

    Args:
        device: The GPU.
        num_columns: Columns of the logits, in half precision.
    """
    properties = torch.cuda.get_device_properties(device)
    num_multiprocessors = properties.multi_processor_count
    num_cached_rows = _CACHE_FRACTION * properties.L2_cache_size // (2 * num_columns)
    num_programs = min(_CACHED_PROGRAMS, int(num_cached_rows) // num_multiprocessors)
    if not num_programs:
        return softmax_in_place
    return partial(softmax_in_place, num_programs=num_programs * num_multiprocessors)


def softmax_in_place(
    logits: Tensor,
    labels: Tensor,
    num_vocab_columns: int,
    needs_gradient: bool,
    z_loss: float,
    num_programs: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the losses of a chunk and the gradient of its logits; overwrites the logits.

    Args:
        logits: [rows, columns], contiguous, on a device with Triton.
        labels: [rows], int64; -100 for no loss. The gradient of such rows is zero.
        num_vocab_columns: Number of columns that are tokens; the others are padding.
        needs_gradient: Whether to compute the gradient.
        z_loss: Coefficient of the z-loss.
        num_programs: Number of programs, which compute the rows in turn; by default one per row.

    Returns:
        The losses, fp32 [rows]; the squared log-sum-exp of the logits, fp32 [rows], 0 without a
        label, or None without z-loss; and the logits, which hold the gradient, or None.
    """
    num_rows, num_columns = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    squared_log_sums = torch.empty_like(losses)
    is_cached = num_programs is not None and num_programs < num_rows
    num_launched = min(num_rows, num_programs or num_rows)
    _softmax_rows[(num_launched,)](
        *(logits, labels, losses, squared_log_sums, z_loss, num_rows, num_launched),
        num_columns=num_columns,
        num_vocab_columns=num_vocab_columns,
        ignored=IGNORED,
        needs_gradient=needs_gradient,
        block=_CACHED_BLOCK_COLUMNS if is_cached else _BLOCK_COLUMNS,
        is_cached=is_cached,
        num_warps=_CACHED_NUM_WARPS if is_cached else _NUM_WARPS,
    )
    return losses, squared_log_sums if z_loss else None, logits if needs_gradient else None


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_rows(  # type: ignore[no-untyped-def]
    logits,
    labels,
    losses,
    squared_log_sums,
    z_loss,
    num_rows,
    num_programs,
    num_columns: tl.constexpr,
    num_vocab_columns: tl.constexpr,
    ignored: tl.constexpr,
    needs_gradient: tl.constexpr,
    block: tl.constexpr,
    is_cached: tl.constexpr,
):
    """Compute the losses and the gradients of every `num_programs`-th row of logits."""
    # The first reading asks the cache to hold the row until the second one.
    first_policy: tl.constexpr = "evict_last" if is_cached else ""
    last_policy: tl.constexpr = "evict_first" if is_cached else ""
    # Padding can be read, and a number of columns that 8 divides allows loads of 16 bytes.
    num_loaded: tl.constexpr = num_columns if is_cached else num_vocab_columns
    block_offsets = tl.arange(0, block)
    for row in range(tl.program_id(0), num_rows, num_programs):
        row_logits = logits + (tl.zeros([], tl.int64) + row) * num_columns
        label = tl.load(labels + row)
        is_vocab_label = (label >= 0) & (label < num_vocab_columns)
        # Read before the row is overwritten.
        label_logit = tl.load(row_logits + label, mask=is_vocab_label, other=0.0).to(tl.float32)
        # For each offset in a block: the largest logit so far, and the sum of exponentials relative
        # to it.
        running_max = tl.full([block], float("-inf"), tl.float32)
        running_sum = tl.zeros([block], tl.float32)
        for block_start in range(0, num_vocab_columns, block):
            column = block_start + block_offsets
            block_logits = tl.load(
                row_logits + column,
                mask=column < num_loaded,
                other=float("-inf"),
                eviction_policy=first_policy,
            ).to(tl.float32)
            block_logits = tl.where(column < num_vocab_columns, block_logits, float("-inf"))
            new_max = tl.maximum(running_max, block_logits)
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            running_sum = running_sum * tl.exp(running_max - finite_max) + tl.exp(
                block_logits - finite_max
            )
            running_max = new_max
        row_max = tl.max(running_max, 0)
        log_sum = row_max + tl.log(tl.sum(running_sum * tl.exp(running_max - row_max), 0))
        tl.store(losses + row, tl.where(is_vocab_label, log_sum - label_logit, 0.0))
        tl.store(squared_log_sums + row, tl.where(label == ignored, 0.0, log_sum * log_sum))
        if needs_gradient:
            gradient_scale = tl.where(label == ignored, 0.0, 1.0 + 2.0 * z_loss * log_sum)
            for block_start in range(0, num_columns, block):
                column = block_start + block_offsets
                block_logits = tl.load(
                    row_logits + column,
                    mask=column < num_loaded,
                    other=float("-inf"),
                    eviction_policy=last_policy,
                ).to(tl.float32)
                block_logits = tl.where(column < num_vocab_columns, block_logits, float("-inf"))
                gradient = tl.exp(block_logits - log_sum) * gradient_scale
                gradient = tl.where(is_vocab_label & (column == label), gradient - 1.0, gradient)
                tl.store(
                    row_logits + column,
                    gradient,
                    mask=column < num_columns,
                    eviction_policy=last_policy,
                )
