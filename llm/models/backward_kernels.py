"""Triton kernels for the backward pass of a block, as operations that torch.compile keeps.

Each reads and writes every tensor once, and also computes the sums over tokens that the gradients
of gains and biases need. `fused_backward` puts them in the place of PyTorch's operations.

A program adds up some rows in their order, and PyTorch then adds the sums of the programs. No
addition is atomic, so the bits do not depend on timing.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_NORM_WIDTH = 8192
"""Widest norm of `norm_backward`: a program holds a row, and sums of its width, in registers."""
MAX_GRADIENTS = 3
"""Most gradients that `norm_backward` adds up: those through query, key and value."""

_NORM_ROWS = 32
"""Rows of a program of `norm_backward`."""
_TILE_ROWS, _TILE_COLUMNS, _TILES_PER_PROGRAM = 8, 256, 16
"""Rows and columns of a tile of the other two operations, and tiles of a program."""


@torch.library.custom_op("llm::norm_backward", mutates_args=())
def norm_backward(
    gradients: Sequence[Tensor],
    inputs: Tensor,
    means: Tensor | None,
    inverse_deviations: Tensor,
    gains: Tensor,
    residual: Tensor | None,
    low_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of LayerNorm, or of RMSNorm without means.

    Args:
        gradients: One to three gradients of the output, [..., width], which are added up in fp32.
        inputs: The input, fp32 [..., width].
        means: Mean of each row, fp32 [..., 1].
        inverse_deviations: One over the standard deviation, or the root mean square, of each row,
            fp32 [..., 1].
        gains: The gains, fp32 [width].
        residual: A further gradient of the input, fp32 [..., width].
        low_dtype: Dtype of a copy of the input's gradient in half precision.

    Returns:
        The gradient of the input, fp32 [..., width]; its copy in half precision, or an empty
        tensor; and sums over all rows, fp32 [sums, width]: the gradient of the gains, for
        LayerNorm the gradient of the biases, and the sum of the copy if there is one.
    """
    width = inputs.shape[-1]
    num_rows = inputs.numel() // width
    num_programs = triton.cdiv(num_rows, _NORM_ROWS)
    rows = [gradient.reshape(num_rows, width).contiguous() for gradient in gradients]
    input_gradient = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    low_gradient = _empty_low_copy(inputs, low_dtype)
    num_sums = _num_norm_sums(means, low_dtype)
    partial_sums = inputs.new_empty((num_programs, num_sums, width))
    _norm_backward_rows[(num_programs,)](
        *(rows + rows[:1] * MAX_GRADIENTS)[:MAX_GRADIENTS],
        inputs.contiguous(),
        inverse_deviations if means is None else means.contiguous(),
        inverse_deviations.contiguous(),
        gains.contiguous(),
        input_gradient if residual is None else residual.contiguous(),
        *(input_gradient, low_gradient, partial_sums, num_rows),
        width=width,
        block=triton.next_power_of_2(width),
        rows_per_program=_NORM_ROWS,
        num_gradients=len(rows),
        has_means=means is not None,
        has_residual=residual is not None,
        has_low=low_dtype is not None,
        num_sums=num_sums,
        num_warps=min(16, max(4, triton.next_power_of_2(width) // 256)),
    )
    return input_gradient, low_gradient, partial_sums.sum(0)


@norm_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    gradients, inputs, means, inverse_deviations, gains, residual, low_dtype
):
    low_gradient = _empty_low_copy(inputs, low_dtype)
    sums = inputs.new_empty((_num_norm_sums(means, low_dtype), inputs.shape[-1]))
    return torch.empty_like(inputs, memory_format=torch.contiguous_format), low_gradient, sums


def _empty_low_copy(values: Tensor, low_dtype: torch.dtype | None) -> Tensor:
    """Return memory for a contiguous copy in half precision; empty without a dtype."""
    return values.new_empty(
        (0,) if low_dtype is None else values.shape, dtype=low_dtype or values.dtype
    )


def _num_norm_sums(means: Tensor | None, low_dtype: torch.dtype | None) -> int:
    return 1 + (means is not None) + (low_dtype is not None)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward_rows(  # type: ignore[no-untyped-def]
    first_gradient,
    second_gradient,
    third_gradient,
    inputs,
    means,
    inverse_deviations,
    gains,
    residual,
    input_gradient,
    low_gradient,
    partial_sums,
    num_rows,
    width: tl.constexpr,
    block: tl.constexpr,
    rows_per_program: tl.constexpr,
    num_gradients: tl.constexpr,
    has_means: tl.constexpr,
    has_residual: tl.constexpr,
    has_low: tl.constexpr,
    num_sums: tl.constexpr,
):
    """Compute the gradients of some rows in their order, and the sums over these rows."""
    program = tl.program_id(0)
    columns = tl.arange(0, block)
    is_column = columns < width
    gain = tl.load(gains + columns, mask=is_column, other=0.0)
    gain_sum = tl.zeros([block], tl.float32)
    bias_sum = tl.zeros([block], tl.float32)
    low_sum = tl.zeros([block], tl.float32)
    for offset in range(rows_per_program):
        row = program * rows_per_program + offset
        is_row = row < num_rows
        mask = is_column & is_row
        position = row.to(tl.int64) * width + columns
        gradient = tl.load(first_gradient + position, mask=mask, other=0.0).to(tl.float32)
        if num_gradients > 1:
            gradient += tl.load(second_gradient + position, mask=mask, other=0.0).to(tl.float32)
        if num_gradients > 2:
            gradient += tl.load(third_gradient + position, mask=mask, other=0.0).to(tl.float32)
        inverse_deviation = tl.load(inverse_deviations + row, mask=is_row, other=0.0)
        normalized = tl.load(inputs + position, mask=mask, other=0.0)
        if has_means:
            normalized -= tl.load(means + row, mask=is_row, other=0.0)
        normalized = tl.where(mask, normalized * inverse_deviation, 0.0)
        # The gradient of the normalized row, without its part along the row, which the division by
        # the deviation removes, and for LayerNorm without its mean.
        weighted = gradient * gain
        slope = tl.sum(weighted * normalized, 0) / width
        result = weighted - normalized * slope
        if has_means:
            result -= tl.sum(weighted, 0) / width
        result *= inverse_deviation
        if has_residual:
            result += tl.load(residual + position, mask=mask, other=0.0)
        tl.store(input_gradient + position, result, mask=mask)
        gain_sum += gradient * normalized
        bias_sum += gradient
        if has_low:
            low_result = result.to(low_gradient.dtype.element_ty)
            tl.store(low_gradient + position, low_result, mask=mask)
            low_sum += tl.where(mask, low_result.to(tl.float32), 0.0)
    program_sums = partial_sums + program.to(tl.int64) * (num_sums * width) + columns
    tl.store(program_sums, gain_sum, mask=is_column)
    if has_means:
        tl.store(program_sums + width, bias_sum, mask=is_column)
    if has_low:
        tl.store(program_sums + (num_sums - 1) * width, low_sum, mask=is_column)


@torch.library.custom_op("llm::gelu_backward", mutates_args=())
def gelu_backward(gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradient of the tanh form of GELU.

    Args:
        gradient: Gradient of the output, [..., width].
        inputs: The input, [..., width].

    Returns:
        The gradient of the input, [..., width] in the dtype of the input; and its sum over all
        rows, fp32 [width].
    """
    width = inputs.shape[-1]
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    partial_sums = _empty_program_sums(inputs.numel() // width, width, inputs)
    _write_and_sum_columns(
        gradient.reshape(-1, width),
        inputs.reshape(-1, width),
        outputs,
        partial_sums,
        first_column=0,
    )
    return outputs, partial_sums.sum(0)


@gelu_backward.register_fake
def _(gradient, inputs):  # type: ignore[no-untyped-def]
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    return outputs, inputs.new_empty(inputs.shape[-1:], dtype=torch.float32)


@torch.library.custom_op("llm::join_columns", mutates_args=())
def join_columns(parts: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Concatenate tensors along their last dimension, and sum over all others.

    Args:
        parts: [..., width of the part] each.
        dtype: Dtype of the result.

    Returns:
        The concatenation, [..., width]; and its sum over all rows, fp32 [width].
    """
    first_part, width = parts[0], sum(part.shape[-1] for part in parts)
    num_rows = first_part.numel() // first_part.shape[-1]
    outputs = first_part.new_empty((*first_part.shape[:-1], width), dtype=dtype)
    partial_sums = _empty_program_sums(num_rows, width, first_part)
    first_column = 0
    for part in parts:
        rows = part.reshape(num_rows, part.shape[-1])
        _write_and_sum_columns(rows, None, outputs, partial_sums, first_column=first_column)
        first_column += part.shape[-1]
    return outputs, partial_sums.sum(0)


@join_columns.register_fake
def _(parts, dtype):  # type: ignore[no-untyped-def]
    first_part, width = parts[0], sum(part.shape[-1] for part in parts)
    outputs = first_part.new_empty((*first_part.shape[:-1], width), dtype=dtype)
    return outputs, first_part.new_empty(width, dtype=torch.float32)


def _empty_program_sums(num_rows: int, width: int, like: Tensor) -> Tensor:
    """Return memory for the sums of the programs, fp32 [programs, width]."""
    num_programs = triton.cdiv(num_rows, _TILE_ROWS * _TILES_PER_PROGRAM)
    return like.new_empty((num_programs, width), dtype=torch.float32)


def _write_and_sum_columns(
    gradient: Tensor,
    inputs: Tensor | None,
    outputs: Tensor,
    partial_sums: Tensor,
    *,
    first_column: int,
) -> None:
    """Write some columns of `outputs`, and the sums over their rows.

    Args:
        gradient: The values to write, [rows, columns], or GELU's gradient of the output.
        inputs: GELU's input, [rows, columns]; None without GELU.
        outputs: [..., width]; its columns from `first_column` on are written.
        partial_sums: Sums of the programs, fp32 [programs, width].
        first_column: Index of the first written column.
    """
    num_rows, num_columns = gradient.shape
    gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
    grid = triton.cdiv(num_columns, _TILE_COLUMNS), len(partial_sums)
    _write_and_sum_tiles[grid](
        *(gradient, gradient if inputs is None else inputs.contiguous(), outputs, partial_sums),
        *(num_rows, num_columns, gradient.stride(0), partial_sums.shape[1], first_column),
        has_gelu=inputs is not None,
        tile_rows=_TILE_ROWS,
        tile_columns=_TILE_COLUMNS,
        num_tiles=_TILES_PER_PROGRAM,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write_and_sum_tiles(  # type: ignore[no-untyped-def]
    gradients,
    inputs,
    outputs,
    partial_sums,
    num_rows,
    num_columns,
    gradient_stride,
    width,
    first_column,
    has_gelu: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    num_tiles: tl.constexpr,
):
    """Copy some tiles below one another, perhaps through GELU's gradient, and sum them."""
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    is_column = columns < num_columns
    program = tl.program_id(1)
    sums = tl.zeros([tile_rows, tile_columns], tl.float32)
    for tile in range(num_tiles):
        rows = (program * num_tiles + tile) * tile_rows + tl.arange(0, tile_rows)
        mask = (rows < num_rows)[:, None] & is_column[None, :]
        rows = rows.to(tl.int64)[:, None]
        values = tl.load(
            gradients + rows * gradient_stride + columns[None, :], mask=mask, other=0.0
        )
        values = values.to(tl.float32)
        if has_gelu:
            x = tl.load(inputs + rows * num_columns + columns[None, :], mask=mask, other=0.0)
            x = x.to(tl.float32)
            # tanh(u) = 1 - 2 upper, which neither overflows nor cancels. 0.7978... is sqrt(2 / pi).
            upper = 1.0 / (tl.exp(1.5957691216057308 * (x + 0.044715 * x * x * x)) + 1.0)
            slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
            values *= (1.0 - upper) * (1.0 + 2.0 * x * upper * slope)
        values = values.to(outputs.dtype.element_ty)
        positions = rows * width + first_column + columns[None, :]
        tl.store(outputs + positions, values, mask=mask)
        sums += tl.where(mask, values.to(tl.float32), 0.0)
    position = program.to(tl.int64) * width + first_column + columns
    tl.store(partial_sums + position, tl.sum(sums, 0), mask=is_column)
